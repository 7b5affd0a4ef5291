"""Training on an accelerator, as a machine without one sees it: a step takes its time and leaves the cores alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from benchmarks.engine import save_timed
from benchmarks.measure import timed
from benchmarks.plain_loop import PlainLoop, Saver
from benchmarks.workloads import SEED, State, change_everything, everything_lazy
from ckpt_engine import Checkpointer
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import AttemptsFound

Shapes = Sequence[tuple[int, ...]]


def resnet50() -> Shapes:
    """Weights and biases of a ResNet50: 25.6 million."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            out = 4 * width
            found += [(width, inputs, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
            found += [(width,)] * 4 + [(out,)] * 2
            if block == 0:
                found += [(out, inputs, 1, 1), (out,), (out,)]
            inputs = out
    return [*found, (1000, 2048), (1000,)]


def resnet18() -> Shapes:
    """Of a ResNet18: 11.7 million."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            found += [(width, inputs, 3, 3), (width, width, 3, 3), *[(width,)] * 4]
            if block == 0 and width != inputs:
                found += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    return [*found, (1000, 512), (1000,)]


def vgg16() -> Shapes:
    """Of a VGG16: 138 million, most of them in one tensor."""
    found: list[tuple[int, ...]] = []
    inputs = 3
    for width, many in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(many):
            found += [(width, inputs, 3, 3), (width,)]
            inputs = width
    return [*found, (4096, 25088), (4096,), (4096, 4096), (4096,), (1000, 4096), (1000,)]


def momentum_state(shapes: Shapes) -> State:
    """Weights and the momentum of SGD: 8 bytes a parameter."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {f"layer.{at}": torch.randn(shape, generator=generator) for at, shape in enumerate(shapes)}
    return {"model": weights, "optimizer": {at: one * 1e-3 for at, one in enumerate(weights.values())}, "step": 0}


class SleepingLoop(PlainLoop):
    """Steps that sleep; before each snapshot every element changes."""

    def __init__(self, state: State, step_seconds: float) -> None:
        self._state, self.step_seconds, self.number = state, step_seconds, 0
        self.changing_seconds = 0.0
        """How long changing every element has taken: an accelerator does that in its step."""

    @override
    def state(self, step: int) -> State:
        self.changing_seconds += timed(lambda: change_everything([self._state["model"], self._state["optimizer"]]))
        return self._state | {"step": step}

    @override
    def train(self, iterations: int, saver: Saver, every: int) -> float:
        """As of a plain loop, less what changing took; until the last snapshot is copied, not until it is durable."""
        began, changing = time.perf_counter(), self.changing_seconds
        for number in range(1, iterations + 1):
            self._step(saver)
            self.number += 1
            if number % every == 0:
                saver.save(self.state(self.number), self.number)
        saver.before_update()
        return time.perf_counter() - began - (self.changing_seconds - changing)

    @override
    def _step(self, saver: Saver | None = None) -> None:
        time.sleep(self.step_seconds)
        if saver is not None:
            saver.before_update()


@dataclass(frozen=True, slots=True)
class Adapted:
    """What a run with an adaptive interval gave: seconds of its second half, steps in it, and the interval."""

    seconds: float
    steps: int
    interval_steps: float


class AdaptiveRun:
    """A sleeping loop whose snapshots come as the cadence wants them, at a budget that failures never undercut."""

    def __init__(self, checkpointer: Checkpointer, budget: float) -> None:
        self.checkpointer = checkpointer
        settings = FrequencySettings(overhead=budget, mtbf_seconds=1.0)
        self._cadence = Cadence(settings, SystemClock(), _Nowhere())
        checkpointer.engine.events = self._cadence

    def train(
        self, loop: SleepingLoop, last: int, first: int = 0, say: Callable[[int], object] = lambda _: None
    ) -> Adapted:
        """From one step to another, saying each; what the first half costs belongs to learning."""
        self._cadence.start(first)
        loop.number = last
        engine, cadence = self.checkpointer.engine, self._cadence
        marks, intervals = list[float](), list[int]()
        middle = first + (last - first) // 2
        for step in range(first + 1, last + 1):
            time.sleep(loop.step_seconds)
            cadence.fence(engine.before_update())
            engine.poll()
            cadence.emit(AttemptsFound((), ()))  # failures stay as often as they are assumed to be
            if cadence.boundary(step) is not None:
                self._take(loop, step)
            if cadence.interval_steps is not None and step > middle:
                intervals.append(cadence.interval_steps)
            if step in (middle, last):
                marks.append(time.perf_counter() - loop.changing_seconds)
            say(step)
        return Adapted(marks[-1] - marks[0], last - middle, sum(intervals) / max(1, len(intervals)))

    def _take(self, loop: SleepingLoop, step: int) -> None:
        if not self.checkpointer.engine.ready():
            self._cadence.skipped(step, "busy")
            return
        before, state = loop.changing_seconds, loop.state(step)
        self._cadence.exclude(loop.changing_seconds - before)
        stall, _ = save_timed(self.checkpointer, state, step, lazy=everything_lazy)
        self._cadence.taken(step, stall)


class _Nowhere:
    def emit(self, event: object) -> None:
        """What the cadence says is read from it."""
