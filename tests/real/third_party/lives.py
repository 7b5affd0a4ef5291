"""Lives of a program: killed at random instants, and compared with one that nothing interrupts."""

from __future__ import annotations

import atexit
import base64
import json
import multiprocessing
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_engine.cli.root import open_run
from ckpt_engine.frequency.triggers import END
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.tools.compare import Comparison
from ckpt_engine.tools.outline import children
from tests.real.third_party.lines import edit
from tests.real.third_party.table import Program

LIFE_SECONDS = 900.0
OFFLINE = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
PRELOADED = (
    *("torch", "numpy", "lightning.pytorch", "transformers.trainer", "transformers.models.bert.modeling_bert"),
    *("datasets", "sentence_transformers", "trl.trainer.sft_trainer", "pytorch_forecasting", "hydra"),
    *("ckpt_engine.checkpointer", "accelerate_ckpt", "lightning_ckpt"),
)
"""Imported once, so that a life takes as long as the program; what is not installed is left out."""
_NOTES = ("/ckpt_engine/audit/locals", "/ckpt_engine/loop/numbers/")
"""What of a loop's variables a process has seen: no state, but what the report is made of."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


class Ranks:
    """The processes of one life."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self._processes = processes

    @property
    def code(self) -> int | None:
        """None while all run or have ended well, and not all have."""
        codes = [process.exitcode for process in self._processes]
        return next((code for code in codes if code), None if None in codes else 0)

    def wait(self, seconds: float) -> None:
        """Until they have ended, or one has failed."""
        deadline = time.monotonic() + seconds
        while self.code is None and (left := deadline - time.monotonic()) > 0:
            wait([process.sentinel for process in self._processes if process.exitcode is None], min(left, 1.0))

    def kill(self) -> None:
        """SIGKILL for all, and the workers of their loaders."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(60.0)


def live(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """One process of a program, as `python FILE ARGUMENTS` would run it."""
    os.setsid()
    output = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # that of a new process, for the workers of its loaders
    warnings.simplefilter("ignore")
    random.seed()  # as a new process does; else all lives would draw the same without a seed
    np.random.seed()
    sys.argv, sys.path[:] = list(words), [str(folder), *sys.path]
    runpy.run_path(words[0], run_name="__main__")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


class Lives:
    """Lives of one program, in a folder of its own for each variant."""

    def __init__(self, program: Program, source: Path) -> None:
        self.program, self.source = program, source
        self.named: set[str] = set()
        """What resume reports of lives that came to an end, or were killed, say was not restored."""

    def make(self, name: str) -> Path:
        """A copy with our lines; "unchanged" is without."""
        folder = self.source.with_name(name)
        shutil.copytree(self.source, folder)
        if name != "unchanged":
            root = repr(str(folder / "run"))
            for file, changes in self.program.changes.items():
                edit(folder / file, [(old, new.replace("ROOT", root)) for old, new in changes])
        return folder

    def start(self, folder: Path) -> Ranks:
        """All ranks of one life."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        count, words = self.program.ranks, (self.program.file, *self.program.arguments)
        ranks = []
        for rank in range(count):
            own = {"WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank), **meet} if count > 1 else {}
            ranks.append(_context.Process(target=live, args=(folder, words, own)))
            ranks[-1].start()
        return Ranks(ranks)

    def run(self, folder: Path) -> list[str]:
        """One life to its end; what it said."""
        ranks = self.start(folder)
        ranks.wait(LIFE_SECONDS)
        if ranks.code != 0:
            ranks.kill()
            raise SystemExit(f"{folder}: exit code {ranks.code}: {(folder / 'said.txt').read_text()[-600:]}")
        return self.said(folder)

    def said(self, folder: Path) -> list[str]:
        return re.findall(self.program.spoken, (folder / "said.txt").read_text())

    def kill_often(self, folder: Path, kills: int, seconds: float, draw: random.Random) -> int:
        """Lives that are killed so often, or until one comes to its end; then one more. How many were killed.

        Args:
            seconds: that training takes without an interruption.
        """
        for number in range(kills):
            ranks, before = self.start(folder), snapshots(folder)
            deadline = time.monotonic() + LIFE_SECONDS
            while ranks.code is None and snapshots(folder) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            ranks.wait(draw.uniform(0, 1.6 * seconds / kills))  # a random instant
            self._read_reports(folder)
            if ranks.code is not None:
                if ranks.code:
                    ranks.kill()
                    raise SystemExit(f"{folder}: life {number}: {(folder / 'said.txt').read_text()[-600:]}")
                return number
            ranks.kill()
        self.run(folder)
        self._read_reports(folder)
        return kills

    def _read_reports(self, folder: Path) -> None:
        for report in folder.glob("run*/resume-report.json"):
            rows = json.loads(report.read_text())["not_restored"]
            self.named |= {f"{row['name']}: {row['why']}" for row in rows}


def snapshots(folder: Path) -> set[str]:
    """The manifests of all runs of a program."""
    return {path.name for path in folder.glob("run*/snapshots/[!.]*.json")}


def differences(one: Path, other: Path) -> dict[str, str]:
    """Of the last step that each run has a snapshot of in both folders, bit for bit, by path; see `of_run`."""
    names = {path.name for folder in (one, other) for path in folder.glob("run*")}
    return {f"{run}/{path}": row for run in sorted(names) for path, row in of_run(one / run, other / run).items()}


def of_run(one: Path, other: Path) -> dict[str, str]:
    """The same of one run. What is measured does not count.

    What was pickled is compared without the identities of parts that are equal.
    """
    runs = [instants(open_run(str(folder)).holders) for folder in (one, other)]
    newest = max(runs[0].keys() & runs[1].keys())
    step, candidates = newest[0], [run[newest] for run in runs]
    rows = (row for row in Comparison(*candidates) if not row.measured)
    found = {row.path: f"step {step}: {row}" for row in rows if not any(one in f"/{row.path}" for one in _NOTES)}
    pickled = [dict(pickled_below(one.manifest.tree, "")) for one in candidates]
    return {path: row for path, row in found.items() if path not in pickled[0] or len({p[path] for p in pickled}) > 1}


def instants(holders: Mapping[Any, Any]) -> dict[tuple[int, bool], Candidate]:
    """The snapshots of a run, by step and whether the run was over: one of the last boundary is none of the end."""
    found = (assemble(one.id, holders[one]) for one in sorted(holders, key=lambda one: one.seq))
    return {(one.info.step, one.info.reason == END): one for one in found}


def pickled_below(node: Any, path: str) -> Iterator[tuple[str, bytes]]:
    """What was pickled at or below a node of a snapshot that was made here, without references within."""
    if isinstance(node, dict) and node.get("$") == "pickle":
        out = BytesIO()
        writer = pickle.Pickler(out)
        writer.fast = True
        writer.dump(pickle.loads(base64.b64decode(node["b64"])))
        yield path, out.getvalue()
    for key, child in children(node) or ():
        yield from pickled_below(child, f"{path}/{key}".lstrip("/"))


def verify(name: str, program: Program, source: Path, kills: int) -> dict[str, Any]:
    """The verdict on one program."""
    program.prepare(source)
    lives = Lives(program, source)
    unchanged = lives.run(lives.make("unchanged"))
    whole = lives.make("whole")
    first = lives.run(whole)
    twice = lives.make("twice")
    lives.run(twice)
    ambient = differences(whole, twice)  # streams that nothing seeds, names of folders: no matter of a resume
    times = sorted(path.stat().st_mtime for path in (whole / "run" / "data").glob("[!.]*"))
    began = min(path.stat().st_mtime for path in (whole / "run").rglob("*"))
    draw, killed, runs, differing = random.Random(name), 0, 0, []
    named: set[str] = set()
    while killed < kills and runs < kills:
        folder, runs = lives.make(f"killed-{runs}"), runs + 1
        killed += lives.kill_often(folder, kills - killed, times[-1] - began, draw)
        differing += [row for path, row in differences(whole, folder).items() if path not in ambient]
        said = set(lives.said(folder))
        differing += [f"printed only by a run that was killed: {line}" for line in sorted(said - set(first))]
        differing += [f"printed only by a run that was not: {line}" for line in sorted(set(first) - said)]
        named |= lives.named
    unknown = sorted(row for row in named if not any(one in row for one in program.named))
    return {
        "verdict": "not exact" if differing else "false alarm" if unknown else "bitwise",
        "kills": killed,
        "runs": runs,
        "unchanged by us": sorted(unchanged) == sorted(first),
        "lines": len(first),
        "differences": differing[:5],
        "differ without a kill": sorted(ambient)[:9],
        "named": sorted(named),
        "named without a reason": unknown,
    }
