"""What a far tier in trouble costs; fails if a bar is missed.

`python -m tests.restore.far_tiers.campaign [--json out.jsonl]`

Each cell trains with a far tier on a real S3 server over a line that gets into trouble at the start, in the middle or
at the end, and right before or after that the same training without that tier. It tells how much later the first step
came and the process had ended, what was said, and whether the last snapshot is durable. At the start the training
resumes from the nearest tier; `--moments fresh` is a start of Lightning that does not resume.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.restore.far_tiers.line import SLOW, STATES, WORKS, Line
from tests.servers.s3 import S3Server, free_port, serving

KINDS = ("lightning", "accelerate", "plain")
MOMENTS = ("start", "middle", "end")
FRESH = "fresh"
STEPS = 40
ALLOWED_SECONDS = 10.0
"""`wait_at_end` of all trainings: what the user allows for copies of the last snapshot to a tier that gets on."""
FIRST_BAR_SECONDS, EXIT_BAR_SECONDS = 3.0, 5.0
_PATIENCE_SECONDS = 200.0


@dataclass
class Life:
    """One training: seconds to its first step, seconds from its last one to its exit, and what it said of S3 before
    its last step and after."""

    first: float = -1.0
    leaving: float = -1.0
    slowest_ratio: float = 0.0
    steps: int = 0
    durable: int = 0
    status: int = -1
    said: list[str] = field(default_factory=list)
    said_at_the_end: list[str] = field(default_factory=list)
    errors: str = ""


@dataclass
class Cell:
    """A pair of trainings, with the tier in trouble and without it. `copied`: the tier has the last snapshot."""

    kind: str
    state: str
    moment: str
    ours: Life = field(default_factory=Life)
    without: Life = field(default_factory=Life)
    copied: bool = False
    seconds: float = 0.0

    @property
    def first_later(self) -> float:
        return self.ours.first - self.without.first

    @property
    def exit_later(self) -> float:
        return self.ours.leaving - self.without.leaving

    @property
    def exit_bar(self) -> float:
        return EXIT_BAR_SECONDS + (ALLOWED_SECONDS if self.state == SLOW else 0.0)

    def misses(self) -> list[str]:
        """The bars that are missed."""
        ours = self.ours
        waits = [line for line in ours.said if "waiting for " in line]  # for another reason than what comes later
        words = [len(waits), len(ours.said) - len(waits), len(ours.said_at_the_end)]
        late = ours.leaving > self.without.leaving + EXIT_BAR_SECONDS
        heard = ours.said or ours.said_at_the_end or self.copied
        found = {
            "first step": self.first_later > FIRST_BAR_SECONDS,
            "exit": self.exit_later > self.exit_bar,
            "lost": ours.status != 0 or ours.durable != ours.steps or ours.steps == 0,
            "lines": max(words) > 1,
            "silent": not heard or (late and not ours.said_at_the_end),
            "baseline": self.without.status != 0,
        }
        return [name for name, missed in found.items() if missed]

    def text(self) -> str:
        misses = self.misses()
        return (
            f"{self.kind:10} {self.state:8} {self.moment:7} {self.first_later:+6.1f} {self.exit_later:+6.1f} "
            f"{len(self.ours.said)} + {len(self.ours.said_at_the_end)} {'copied' if self.copied else 'near  '} "
            f"{self.ours.slowest_ratio:5.1f} {self.seconds:4.0f}  {'MISSED: ' + ', '.join(misses) if misses else 'ok'}"
        )


HEADER = "trainer    tier     moment   first   exit lines last   step x secs  verdict"


class Training:
    """A process that has imported what it needs and waits for the line that lets it begin."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.restore.far_tiers.trainer", json.dumps(job)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._errors: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend((time.time(), text) for text in self._process.stderr)

    def _tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if '"ready"' in text:
                return

    def live(self, line: Line | None, state: str, moment: str) -> Life:
        """Play it, and end what it leaves behind."""
        life, began, last, times = Life(), 0.0, 0.0, list[float]()
        process = self._process
        assert process.stdout is not None
        change = line.become if line is not None else lambda _: None
        change(state if moment in ("start", FRESH) else WORKS)
        clock = threading.Timer(_PATIENCE_SECONDS, process.kill)
        clock.start()
        children: list[psutil.Process] = []
        self._tell()
        for text in process.stdout:
            try:
                row = json.loads(text)
            except ValueError:
                self._errors.append((time.time(), text))
                continue
            if row["what"] == "built":
                began = row["at"]
            elif row["what"] == "step":
                times.append(row["at"])
                life.steps = row["step"]
                life.first = row["at"] - began if life.first < 0 else life.first
                if len(times) == STEPS // 2 and moment == "middle":
                    change(state)
            elif row["what"] == "last":
                children = psutil.Process(process.pid).children()
                change(state)
                self._tell()
            elif row["what"] == "leaves":
                last = row["at"]
        life.status = process.wait()
        life.leaving = time.time() - last
        clock.cancel()
        for child in children:  # writers that go on by themselves
            with suppress(psutil.Error):
                child.send_signal(signal.SIGTERM)
        self._reader.join(5.0)
        self._sum_up(life, times, last)
        return life

    def _sum_up(self, life: Life, times: Sequence[float], last: float) -> None:
        gaps = sorted(b - a for a, b in pairwise(times))
        life.slowest_ratio = gaps[-1] / gaps[len(gaps) // 2] if gaps else 0.0
        for at, text in self._errors:
            if "s3://" in text:
                (life.said_at_the_end if at > last else life.said).append(text.strip())
        life.errors = "".join(text for _, text in self._errors) if life.status else ""
        newest = Repository(LocalStorage(self._job["near"])).list()
        life.durable = newest[-1].step if newest else 0


class Campaign:
    """Plays cells. What trainings resume from is made once for each kind of trainer, and copied.

    Args:
        server: has the further tiers.
        folder: has the nearest tiers.
    """

    def __init__(self, server: S3Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._before: dict[str, tuple[Path, str]] = {}
        self._count = 0

    @contextmanager
    def _line(self) -> Iterator[Line]:
        host, _, port = self._server.url.removeprefix("http://").partition(":")
        with Line((host, int(port)), free_port()) as line:
            yield line

    def _bucket(self, like: str | None = None) -> str:
        bucket = self._server.make_bucket(f"b{os.urandom(6).hex()}")
        client = self._server.client()
        for item in client.list_objects_v2(Bucket=like).get("Contents", ()) if like is not None else ():
            client.copy_object(Bucket=bucket, Key=item["Key"], CopySource={"Bucket": like, "Key": item["Key"]})
        return bucket

    def _job(self, kind: str, near: Path, bucket: str | None, line: Line, *, resumes: bool) -> dict[str, Any]:
        tier = bucket and {"url": f"s3://{bucket}/run", "storage_options": self._server.options(line.url)}
        options = {"wait_at_end": ALLOWED_SECONDS if bucket else 0}
        job = {"kind": kind, "near": str(near), "far": tier, "steps": STEPS, "resume": resumes, "options": options}
        return job | ({"epochs": 2} if resumes else {})

    def _earlier(self, kind: str) -> tuple[Path, str]:
        """The folder of the nearest tier, and the bucket, of a training that has ended well."""
        if kind not in self._before:
            near, bucket = self._folder / f"{kind}-before", self._bucket()
            with self._line() as line:
                job = self._job(kind, near, bucket, line, resumes=False) | {"options": {"wait_at_end": 100}}
                training = Training(job)
                training.wait_ready()
                life = training.live(line, WORKS, "never")
            assert life.status == 0, life.errors
            self._before[kind] = near, bucket
        return self._before[kind]

    def play(self, cell: Cell) -> None:
        began = time.monotonic()
        self._count += 1
        resumes = cell.moment == "start"
        earlier = self._earlier(cell.kind) if resumes else None
        bucket = self._bucket(earlier[1] if earlier else None)
        nears = {name: self._folder / f"{bucket}-{name}" for name in ("ours", "without")}
        with self._line() as line:
            trainings = {}
            for name, near in nears.items():
                if earlier is not None:
                    shutil.copytree(earlier[0], near)
                of = bucket if name == "ours" else None
                trainings[name] = Training(self._job(cell.kind, near, of, line, resumes=resumes))
            for one in trainings.values():
                one.wait_ready()
            order = sorted(nears, reverse=self._count % 2 == 0)
            for name in order:
                ours = name == "ours"
                life = trainings[name].live(line if ours else None, cell.state, cell.moment if ours else "never")
                setattr(cell, name, life)
            newest = self._server.client().list_objects_v2(Bucket=bucket, Prefix="run/snapshots/").get("Contents", ())
        there = [names.manifest_id(item["Key"].removeprefix("run/")) for item in newest]
        cell.copied = cell.ours.steps in [one.step for one in there if one is not None]
        cell.seconds = time.monotonic() - began
        for near in nears.values():
            shutil.rmtree(near, ignore_errors=True)  # a writer may still go on with its copies


def cells(kinds: Sequence[str], states: Sequence[str], moments: Sequence[str]) -> list[Cell]:
    return [
        Cell(kind, state, moment)
        for kind in kinds
        for state in states
        for moment in moments
        if moment != FRESH or kind == "lightning"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, all_of_them in (("kinds", KINDS), ("states", STATES), ("moments", MOMENTS)):
        parser.add_argument(f"--{name}", default=",".join(all_of_them))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    todo = cells(*(getattr(options, name).split(",") for name in ("kinds", "states", "moments")))
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, serving("moto", Path(folder)) as server:
        campaign = Campaign(server, Path(folder))
        for cell in todo:
            campaign.play(cell)
            print(cell.text(), flush=True)
            if cell.misses():
                said = [
                    *cell.ours.said,
                    *cell.ours.said_at_the_end,
                    cell.ours.errors[-600:],
                    cell.without.errors[-600:],
                ]
                print("\n".join(f"    {one[:300]}" for one in said if one), flush=True)
            if options.json:
                more = {"first_later": cell.first_later, "exit_later": cell.exit_later, "misses": cell.misses()}
                with options.json.open("a") as out:
                    out.write(json.dumps({**asdict(cell), **more}) + "\n")
    missed = sum(bool(cell.misses()) for cell in todo)
    exits = f"{EXIT_BAR_SECONDS:.0f} s, of a slow tier {ALLOWED_SECONDS:.0f} more"
    bars = f"first step {FIRST_BAR_SECONDS:.0f} s, exit {exits}"
    print(f"{len(todo)} cells in {sum(cell.seconds for cell in todo) / 60:.0f} min, {missed} miss a bar ({bars})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
