"""Runs a script three times: as a whole, killed behind its last snapshot, and started again; and judges the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exact.silent.lab import KILL, SNAPSHOT
from tests.support import interpreters

NUMBER_BYTES = 24
"""Of each number of a state that a script leaves."""
REPOSITORY = Path(__file__).parents[3]
SHARE = 0.1


@dataclass(frozen=True)
class Judgement:
    """What came of a script.

    Attributes:
        same: the end is that of the whole run, bit for bit.
        declared: what the resume report says is not restored, apart from the repeated steps; or why it is refused.
        replay: of the resume report.
        apart: the first repeated step after which a tenth of all numbers differ; None: there is none.
    """

    same: bool
    declared: tuple[str, ...]
    replay: Mapping[str, Any]
    apart: int | None

    @property
    def verdict(self) -> str:
        """`silent`, `false alarm`, or how the difference is shown, if there is one."""
        differs = self.replay["result"] == "different"
        if self.same:
            return "false alarm" if differs else "bitwise"
        if differs and (self.apart is None or self.replay["first"]["step"] <= self.apart + 2):
            return "found"
        return "declared" if self.declared else "silent"


def judge(name: str, folder: Path) -> Judgement:
    """Run it."""
    assert _live(name, folder / "whole", seed=1) == 0, (folder / "whole" / "log").read_text()
    assert _live(name, folder / "run", seed=1, KILL=str(KILL)) == -signal.SIGKILL, (folder / "run" / "log").read_text()
    (folder / "run" / "log").unlink()
    if _live(name, folder / "run", seed=2) != 0:
        last = (folder / "run" / "log").read_text().strip().rpartition("\n")[2]
        assert "[CKPT" in last, last
        return Judgement(False, (last,), {"result": "refused"}, None)
    report = json.loads((folder / "run" / "ck" / "resume-report.json").read_text())
    assert report["step"] == SNAPSHOT, report
    rows = [f"{row['name']}: {row['why']}" for row in report["not_restored"] if row["name"] != "repeated steps"]
    shares = {step: _share(folder, str(step)) for step in range(SNAPSHOT + 1, KILL + 1)}
    apart = next((step for step, share in shares.items() if share >= SHARE), None)
    return Judgement(not _share(folder, "end"), tuple(rows), report["replay"], apart)


def _live(name: str, folder: Path, seed: int, **environment: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as log:
        process = interpreters.Popen(
            [sys.executable, "-m", "tests.exact.silent", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "SEED": str(seed),
                "STATES": str(folder / f"states-{seed}"),
                **environment,
            },
        )
        return process.wait(120)


def _share(folder: Path, name: str) -> float:
    """Of the numbers of a state, those that differ in the resumed run."""
    whole, resumed = ((folder / life / name).read_bytes() for life in ("whole/states-1", "run/states-2"))
    if len(whole) != len(resumed):
        return 1.0
    places = range(0, len(whole), NUMBER_BYTES)
    return sum(whole[at : at + NUMBER_BYTES] != resumed[at : at + NUMBER_BYTES] for at in places) / len(places)
