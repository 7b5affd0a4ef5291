"""What a far tier in trouble costs: `python -m tests.far.campaign --json out.jsonl`.

Each cell trains with a far tier on a real S3 server over a line that gets into trouble at the start, in the middle or
at the end, and right before that the same training without that tier; it tells how much later the first step came and
the process had ended, what was said, and whether the last snapshot is durable. At the start, Accelerate and the plain
loop resume from the near folder, Lightning both resumes and starts anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.far.line import STATES, WORKS, Line
from tests.servers.s3 import S3Server, free_port, serving

KINDS = ("lightning", "accelerate", "plain")
MOMENTS = ("start", "middle", "end")
STEPS = 60
FIRST_BAR_SECONDS, EXIT_BAR_SECONDS = 3.0, 5.0
_PATIENCE_SECONDS = 400.0


@dataclass
class Life:
    """One training: seconds to its first step, seconds from its last one to its exit, and what it said of S3."""

    first: float = -1.0
    leaving: float = -1.0
    slowest_ratio: float = 0.0
    steps: int = 0
    durable: int = 0
    status: int = -1
    said: list[str] = field(default_factory=list)
    errors: str = ""


@dataclass
class Cell:
    """A pair of trainings, with the tier in trouble and without it."""

    kind: str
    resumes: bool
    state: str
    moment: str
    ours: Life = field(default_factory=Life)
    without: Life = field(default_factory=Life)

    @property
    def first_later(self) -> float:
        return self.ours.first - self.without.first

    @property
    def exit_later(self) -> float:
        return self.ours.leaving - self.without.leaving

    @property
    def lost(self) -> bool:
        return self.ours.status != 0 or self.ours.durable != self.ours.steps or self.ours.steps == 0

    def text(self) -> str:
        what = f"{self.kind}{' auto' if self.resumes else ''} {self.state} at the {self.moment}"
        numbers = f"first step {self.first_later:+.1f} s, exit {self.exit_later:+.1f} s"
        lines = len(self.ours.said)
        return f"{what}: {numbers}, {lines} lines{', LOST' if self.lost else ''}"


def live(job: dict[str, Any], line: Line, state: str, moment: str) -> Life:
    """Play one training."""
    life, began, last, times = Life(), 0.0, 0.0, list[float]()
    line.become(state if moment == "start" else WORKS)
    command = [sys.executable, "-m", "tests.far.trainer", json.dumps(job)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    clock = threading.Timer(_PATIENCE_SECONDS, process.kill)
    clock.start()
    children: list[psutil.Process] = []
    for text in process.stdout:
        try:
            row = json.loads(text)
        except ValueError:
            errors.append(text)
            continue
        if row["what"] == "built":
            began = row["at"]
        elif row["what"] == "step":
            times.append(row["at"])
            life.steps = row["step"]
            if life.first < 0:
                life.first = row["at"] - began
            if len(times) == STEPS // 2:
                line.become(state)
        elif row["what"] == "last":
            children = psutil.Process(process.pid).children()
            line.become(state)
            process.stdin.write("\n")
            process.stdin.flush()
        elif row["what"] == "leaves":
            last = row["at"]
    life.status = process.wait()
    life.leaving = time.time() - last
    clock.cancel()
    reader.join(5.0)
    gaps = sorted(b - a for a, b in pairwise(times))
    life.slowest_ratio = gaps[-1] / gaps[len(gaps) // 2] if gaps else 0.0
    life.said = [text.strip() for text in errors if "s3://" in text]
    life.errors = "".join(errors) if life.status else ""
    newest = Repository(LocalStorage(job["near"])).list()
    life.durable = newest[-1].step if newest else 0
    for child in children:  # writers that go on by themselves
        with suppress(psutil.Error):
            child.send_signal(signal.SIGTERM)
    return life


def play(cell: Cell, server: S3Server, line: Line, folder: Path) -> Cell:
    """Both trainings of a cell. One that resumes at the start has trained before, with a far tier that worked."""
    bucket = server.make_bucket(f"b{os.urandom(6).hex()}")
    far = {"url": f"s3://{bucket}/run", "storage_options": server.options(line.url)}
    for name, tier, state in (("without", None, WORKS), ("ours", far, cell.state)):
        near = folder / f"{bucket}-{name}"
        job = {"kind": cell.kind, "near": str(near), "far": tier, "steps": STEPS, "resume": cell.resumes}
        if cell.resumes:
            live(job, line, WORKS, "start")
            job["epochs"] = 2
        setattr(cell, name, live(job, line, state, cell.moment if tier else "never"))
        shutil.rmtree(near)
    return cell


def cells(kinds: Sequence[str], states: Sequence[str], moments: Sequence[str]) -> list[Cell]:
    found = []
    for kind in kinds:
        for state in states:
            for moment in moments:
                if kind == "lightning" or moment != "start":
                    found.append(Cell(kind, False, state, moment))
                if moment == "start":
                    found.append(Cell(kind, True, state, moment))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, all_of_them in (("kinds", KINDS), ("states", STATES), ("moments", MOMENTS)):
        parser.add_argument(f"--{name}", default=",".join(all_of_them))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving("moto", Path(folder)) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        for one in cells(*(getattr(options, name).split(",") for name in ("kinds", "states", "moments"))):
            with Line((host, int(port)), free_port()) as line:
                cell = play(one, server, line, Path(folder))
            print(cell.text(), flush=True)
            for said in cell.ours.said:
                print("   ", said[:300], flush=True)
            print(cell.ours.errors[-600:], end="", flush=True)
            if options.json:
                with options.json.open("a") as out:
                    out.write(json.dumps({**asdict(cell), "first_later": cell.first_later, "lost": cell.lost}) + "\n")


if __name__ == "__main__":
    main()
