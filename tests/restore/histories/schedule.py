"""Random schedules of two jobs over one place, and what must be true when they are over.

At most one job has the lease; the other one has loaded before that, or waits for it. `play` decides by its seed alone
what happens next. `judge` knows from what the jobs have said which snapshots follow which, and asks the places only
what is there.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.restore import load as restore
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.restore.histories import jobs

KEPT = 2
ACTS = 16
PATIENCE_SECONDS = 170.0
KINDS = tuple(jobs.KINDS)
_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """What the processes of jobs have imported already."""
    _context.set_forkserver_preload(["tests.restore.histories.jobs", *modules])


@dataclass
class Job:
    """A job as seen from outside."""

    kind: str
    resume: bool
    process: Any
    connection: Connection
    attempt: str = ""
    loaded: str | None = None
    continues: Job | None = None
    durable: dict[str, list[str]] = field(default_factory=dict)
    waits: bool = False
    has_lease: bool = False
    over: bool = False
    outcome: str = ""

    def history(self) -> list[Job]:
        """The jobs whose snapshots are of this one's line, the first one first."""
        return [*(self.continues.history() if self.continues is not None else ()), self]


class BrokenJobError(AssertionError):
    """A job did what it must not."""


class Schedule:
    """One schedule.

    Args:
        seed: of everything.
        folder: for the places and logs.
        kind: the trainer of its jobs.
    """

    def __init__(self, seed: int, folder: Path, kind: str) -> None:
        self.folder, self._kind = folder, kind
        self._rng = rng = random.Random(seed)
        self.near, self.far = folder / "near", folder / "far"
        memory, further = rng.random() < 0.3, rng.random() < 0.4
        self.options: dict[str, Any] = {
            "tiers": [*(["memory"] if memory else []), str(self.near), *([str(self.far)] if further else [])],
            "keep": {"last": KEPT},
            "every_n_steps": 1,
            "linger": 3,
        }
        if not memory and rng.random() < 0.4:
            self.options["writer"] = "thread"
        self.jobs: list[Job] = []
        self.said: list[str] = []
        self.overtaken = 0
        self._began = time.monotonic()
        self._slots: list[Job | None] = [None, None]

    # ---- playing

    def play(self) -> None:
        """Until it is over; all jobs have ended, and their writers too."""
        try:
            for _ in range(ACTS):
                self._act()
            for job in sorted((one for one in self._slots if one), key=lambda one: one.waits):
                self._finish(job)
        finally:
            for job in self.jobs:
                if job.process.is_alive():
                    job.process.kill()
                job.process.join(PATIENCE_SECONDS)
                job.connection.close()
        for place in self.places():
            acquire(place.storage, wait_seconds=PATIENCE_SECONDS).release()

    def places(self) -> list[Repository]:
        """Those that there are by now."""
        return [Repository(LocalStorage(path)) for path in (self.near, self.far) if (path / "ckpt.json").exists()]

    def _act(self) -> None:
        slot = self._rng.randrange(2)
        job = self._slots[slot]
        if job is None:
            self._slots[slot] = self._start()
        elif not job.waits:
            self._go_on(job)
        self._slots = [None if one is None or one.over else one for one in self._slots]

    def _start(self) -> Job:
        kind = self._kind
        resume = self._rng.random() < 0.7
        here, there = _context.Pipe()
        arguments = (kind, self.options, resume, there, str(self.folder / f"job{len(self.jobs)}.log"))
        process = _context.Process(target=jobs.main, args=arguments, daemon=True)
        process.start()
        there.close()
        job = Job(kind, resume, process, here)
        self.jobs.append(job)
        self._note(f"job {len(self.jobs) - 1} ({kind}, {'resumes' if resume else 'fresh'}) starts")
        if kind == "plain":
            self._hear(job)
            if resume and self._rng.random() < 0.9:
                self._ask(job, "load")
        elif self._holder() is not None:
            job.waits = True
        else:
            self._hear(job)
        return job

    def _go_on(self, job: Job) -> None:
        what = self._rng.choices(["save", "load", "end", "die"], [12, 1, 2, 2])[0]
        if what == "load" and (job.kind != "plain" or job.has_lease):
            what = "save"
        self._note(f"job {self.jobs.index(job)}: {what}")
        if what == "die":
            self._kill(job)
        elif what == "end":
            self._finish(job)
        elif what == "save" and not job.has_lease and self._holder() is not None:
            job.connection.send("save")
            job.waits = True
        else:
            self._ask(job, what)

    def _ask(self, job: Job, what: str) -> None:
        job.connection.send(what)
        self._hear(job)

    def _finish(self, job: Job) -> None:
        if job.waits:
            self._released(job)
        while not job.over:
            with suppress(BrokenPipeError):
                job.connection.send("end")
            self._hear(job)
        self._let_go(job)

    def _kill(self, job: Job) -> None:
        writers = psutil.Process(job.process.pid).children() if self._rng.random() < 0.3 else []
        os.kill(job.process.pid, signal.SIGKILL)
        for one in writers:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        job.process.join(PATIENCE_SECONDS)
        job.over, job.outcome = True, "killed"
        with suppress(EOFError, OSError):
            while job.connection.poll():
                self._take(job, job.connection.recv())
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """It had the lease, perhaps: who waits for that has it now."""
        job.has_lease = False
        for other in self._slots:
            if other is not None and other is not job and other.waits:
                self._released(other)

    def _released(self, job: Job) -> None:
        job.waits = False
        self._hear(job)

    def _holder(self) -> Job | None:
        return next((one for one in self._slots if one is not None and one.has_lease and not one.over), None)

    def _hear(self, job: Job) -> None:
        """Take in what a job says until it waits for a request, or is over."""
        while not job.over:
            if not job.connection.poll(PATIENCE_SECONDS):
                raise BrokenJobError(f"job {self.jobs.index(job)} says nothing")
            said = job.connection.recv()
            if self._take(job, said):
                return

    def _take(self, job: Job, said: Sequence[Any]) -> bool:
        match said[0]:
            case "ready":
                return True
            case "began":
                job.has_lease, job.attempt = True, said[1]
                self._follows(job, said[2])
            case "durable":
                self._maker(job, said[2]).durable.setdefault(said[1], []).append(said[2])
            case "loaded":
                job.loaded = said[1]
            case "error" | "ended":
                job.over, job.outcome = True, " ".join(said)
            case "overtaken":
                self.overtaken += 1
            case "broken":
                raise BrokenJobError(f"job {self.jobs.index(job)}: {said[1]}, see {self.folder}")
        if said[0] != "durable":
            self._note(f"job {self.jobs.index(job)} says {' '.join(map(str, said))}")
        return False

    def _maker(self, job: Job, snapshot: str) -> Job:
        """The job that made a snapshot: a job also copies what an earlier one made to its further tiers."""
        made = [one for one in self.jobs if any(snapshot in found for found in one.durable.values())]
        before = job.loaded is not None and _seq(snapshot) <= _seq(job.loaded)
        return next(iter(made), (job.continues if before else None) or job)

    def _follows(self, job: Job, loaded: str | None) -> None:
        job.loaded = loaded
        if loaded is None or job.continues is not None:
            return
        # What was never acknowledged, such as the last snapshot of one that was killed, says of whom it is.
        attempts = {info.line.attempt for place in self.places() for info in place.list() if info.id == loaded}
        others = [one for one in self.jobs if one is not job]
        made = [one for one in others if any(loaded in found for found in one.durable.values())]
        job.continues = next(iter([*made, *(one for one in others if one.attempt in attempts)]), None)

    def _note(self, line: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:6.1f} s  {line}")

    # ---- judging

    def judge(self) -> tuple[int, list[str]]:
        """How many acknowledged snapshots had to be there, and what is wrong."""
        wrong: list[str] = []
        counted = 0
        for place in self.places():
            infos = place.list()
            for job in self._tips():
                mine = {one.attempt for one in job.history() if one.attempt}
                line = [info for info in infos if info.line.attempt in mine]
                for snapshot in (one for part in job.history() for one in _of(part, place)):
                    newer = sum(info.seq > _seq(snapshot) for info in line)
                    if newer >= KEPT:
                        continue
                    counted += 1
                    if all(info.id != snapshot for info in line):
                        wrong.append(
                            f"{snapshot} of job {self.jobs.index(job)}'s line is gone from {place.storage.url}"
                        )
            for info in infos:
                found = restore.load([place], only=info.id)
                if found is None:
                    wrong.append(f"{info.id} at {place.storage.url} cannot be read")
        wrong += self._resumed_too_early()
        return counted, wrong

    def _tips(self) -> list[Job]:
        """Jobs that have snapshots and that no other job with snapshots has gone on from."""
        having = [job for job in self.jobs if any(job.durable.values())]
        passed = [id(one) for job in having for one in job.history()[:-1]]
        return [job for job in having if id(job) not in passed]

    def _resumed_too_early(self) -> list[str]:
        """Jobs that resumed and went on from something else than the newest snapshot that was acknowledged before."""
        near = f"{LocalStorage(self.near).url}"
        wrong = []
        for number, job in enumerate(self.jobs):
            mine = [_seq(one) for one in _of_url(job, near)]
            if job.loaded is None or not mine:
                continue
            others = [_seq(one) for other in self.jobs if other is not job for one in _of_url(other, near)]
            missed = [seq for seq in others if _seq(job.loaded) < seq < min(mine)]
            if missed:
                wrong.append(f"job {number} went on from {job.loaded}, and {len(missed)} newer ones were there")
        return wrong


def _of(job: Job, place: Repository) -> list[str]:
    return _of_url(job, place.storage.url)


def _of_url(job: Job, url: str) -> list[str]:
    """What was acknowledged at a place, however its URL is written."""
    bare = url.removeprefix("file://")
    return [one for tier, found in job.durable.items() if tier.removeprefix("file://") == bare for one in found]


def _seq(snapshot: str) -> int:
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    return parsed.seq
