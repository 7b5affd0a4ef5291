"""Where the time of a save goes in each adapter: parts of its boundary, and what training loses behind it."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.accelerate_loop import INPUTS, Laps, Sizes, accelerate_laps, transformers_laps
from benchmarks.lightning_loop import Fit, Module, seeded_data
from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from ckpt_engine.loop.capture import Capture
from ckpt_engine.loop.tracker import Tracker
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.snapshot.stage import Staging
from ckpt_engine.state.layout import Planner
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.run import FitRun

TITLE = "Profile: where the time of a save goes in each adapter"
UNEXPLAINED_LIMIT = 0.25
_BOUNDARY, _SAVE = "boundary", "save"
_CALLS: tuple[tuple[str, type, str], ...] = (
    (_BOUNDARY, Tracker, "_boundary"),
    (_BOUNDARY, FitRun, "_boundary"),
    ("capture", Capture, "state"),
    (_SAVE, Pipeline, "save"),
    ("flatten", Planner, "capture"),
    ("stage", Staging, "begin"),
)
SIZES = {
    Scale.FULL: (Sizes(8_000_000, 64, 50, 9), Sizes(8_000_000, 4, 50, 9), 5),
    Scale.QUICK: (Sizes(8_000_000, 64, 50, 9), Sizes(8_000_000, 4, 50, 9), 2),
    Scale.TINY: (Sizes(20_000, 4, 30, 6), Sizes(20_000, 2, 30, 6), 1),
}
"""Loops with Accelerate and Lightning, training with transformers, rounds."""


@dataclass(frozen=True, slots=True)
class Save:
    """One boundary with a save: when it began, seconds by part, page faults.

    `waited`: seconds that threads of training could run and had no core, from its end to the next boundary.
    """

    began: float
    seconds: Mapping[str, float]
    faults: int
    waited: float = 0.0

    @property
    def boundary(self) -> float:
        return self.seconds[_BOUNDARY]

    def parts(self) -> dict[str, float]:
        """The parts of the boundary; they add up to it."""
        named = {part: self.seconds.get(part, 0.0) for part in ("capture", "flatten", "stage")}
        hand_over = self.seconds[_SAVE] - named["flatten"] - named["stage"]
        rest = self.boundary - self.seconds[_SAVE] - named["capture"]
        return named | {"hand-over": hand_over, "rest of the boundary": rest}


@contextmanager
def clocked() -> Iterator[list[Save]]:
    """Saves at the boundaries of what trains meanwhile."""
    found: list[Save] = []
    now: dict[str, float] = defaultdict(float)
    before: list[float] = []

    def around(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if part == _BOUNDARY:
                now.clear()
                if before:
                    found[-1] = replace(found[-1], waited=_waited_for_cores() - before.pop())
            faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                now[part] += time.perf_counter() - began
                if part == _BOUNDARY and _SAVE in now:
                    found.append(Save(began, dict(now), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
                    before.append(_waited_for_cores())

        return run

    patches = [mock.patch.object(owner, name, around(part, getattr(owner, name))) for part, owner, name in _CALLS]
    for patch in patches:
        patch.start()
    try:
        yield found
    finally:
        for patch in patches:
            patch.stop()


def _waited_for_cores() -> float:
    """Seconds that the threads of training could run so far and had no core; those of ours are left out."""
    ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("ckpt-")}
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in ours:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


@dataclass(slots=True)
class _Seen:
    """Of one adapter, over all rounds: saves after the first in each slot, what each added, and the writer's time."""

    saves: list[Save] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    writer: list[float] = field(default_factory=list)

    def add(self, laps: Laps, saves: list[Save]) -> None:
        pairs = list(itertools.pairwise(laps.moments))
        at = [next((i for i, (a, b) in enumerate(pairs) if a <= save.began < b), None) for save in saves]
        touched = {index + more for index in at if index is not None for more in (0, 1)}
        typical = statistics.median(b - a for i, (a, b) in enumerate(pairs) if i not in touched)
        for index, save in list(zip(at, saves, strict=True))[_COLD:]:
            if index is not None and index + 1 < len(pairs):
                self.saves.append(save)
                self.stalls.append(pairs[index + 1][1] - pairs[index][0] - 2 * typical)
        self.writer.append(laps.writer_seconds / len(saves) / (os.cpu_count() or 1))


_COLD = 2
"""The first saves fill memory that was never touched."""


def run(bench: Bench) -> BarResult:
    """Train with each adapter in turn, its parts on the clock."""
    loop, trainer, rounds = SIZES[bench.scale]
    trainings: dict[str, Callable[[Path], Laps]] = {
        "Lightning": partial(_lightning, loop),
        "Accelerate": lambda folder: accelerate_laps(folder, loop, "ours"),
        "transformers": lambda folder: transformers_laps(folder, trainer, "ours"),
    }
    seen = {name: _Seen() for name in trainings}
    with bench.scratch("profile") as folder:

        def once(name: str) -> float:
            with clocked() as saves:
                laps = trainings[name](folder / f"{name}-{len(seen[name].writer)}")
            seen[name].add(laps, saves)
            return laps.training_seconds

        interleave({name: partial(once, name) for name in trainings}, rounds, tick=bench.say)
    return BarResult(
        "profile",
        TITLE,
        {
            "trainings": f"those of the bar `accelerate`; Lightning trains the perceptron; a save every {loop.every} "
            f"steps, without the first {_COLD} of each run",
            "stall": "what a save adds to its own step and the one after it, beyond steps of typical length",
            "waiting for cores": "all threads of training together: a parallel region waits for the last of them",
            "writer": "processor time of its process for one save, start included, shared out over all cores",
        },
        tuple(_check(name, one) for name, one in seen.items()),
        tuple(series for name, one in seen.items() for series in _series(name, one)),
    )


def _check(name: str, seen: _Seen) -> Check:
    known = [save.boundary + save.waited for save in seen.saves]
    left = tuple(abs(stall - one) / max(stall, one) for stall, one in zip(seen.stalls, known, strict=True))
    return Check(f"{name}: stall that no part explains", "x", "at most", UNEXPLAINED_LIMIT, left)


def _series(name: str, seen: _Seen) -> Iterator[Series]:
    yield Series(f"{name}: stall", "s", tuple(seen.stalls))
    for part in seen.saves[0].parts():
        yield Series(f"{name}: {part}", "s", tuple(save.parts()[part] for save in seen.saves))
    behind = tuple(stall - save.boundary for stall, save in zip(seen.stalls, seen.saves, strict=True))
    yield Series(f"{name}: lost behind the boundary", "s", behind)
    yield Series(f"{name}: waiting for cores behind the boundary", "s", tuple(save.waited for save in seen.saves))
    yield Series(f"{name}: writer's share of the cores", "s", tuple(seen.writer))
    yield Series(f"{name}: page faults", "", tuple(float(save.faults) for save in seen.saves))


def _lightning(sizes: Sizes, folder: Path) -> Laps:
    data = seeded_data(sizes.batch_size * sizes.steps, INPUTS)
    callback = AdaptiveCheckpoint(str(folder), every_n_steps=sizes.every, at_end=False)
    module = Module(sizes.parameters, INPUTS)
    fit = Fit(str(folder), module, data, sizes.batch_size, sizes.steps, callbacks=[callback])
    fit.run()
    return Laps(fit.moments, time.perf_counter(), (), fit.helper_seconds)
