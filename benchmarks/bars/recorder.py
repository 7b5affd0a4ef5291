"""What the flight recorder costs at an optimizer step: processor time of the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from ckpt_engine.probe.recorder import FlightRecorder
from ckpt_engine.store.rows import ROWS

TITLE = "Flight recorder: a row at each optimizer step"
LIMIT_MICROSECONDS = 30.0
TENSORS = (600, 10_000)
SHAPE = (16, 16)


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure: `steps` in each of `rounds`, after the first ones, which touch memory that is new."""

    steps: int
    rounds: int
    first: int = ROWS


SIZES = {Scale.FULL: Size(320, 101), Scale.QUICK: Size(320, 21), Scale.TINY: Size(16, 1, first=16)}


class Idle(torch.optim.Optimizer):
    """Has the state of AdamW, and a step that only calls the hooks."""

    def __init__(self, tensors: int) -> None:
        parameters = [nn.Parameter(torch.randn(SHAPE)) for _ in range(tensors)]
        super().__init__(parameters, {"lr": 1e-3})
        for one in parameters:
            self.state[one] = {"step": torch.ones(()), "exp_avg": torch.rand(SHAPE), "exp_avg_sq": torch.rand(SHAPE)}

    @override
    def step(self, closure: Any = None) -> None:
        """Changes nothing."""


def run(bench: Bench) -> BarResult:
    """Steps with the recorder and without it, in turn, in one process."""
    size = SIZES[bench.scale]
    batch = [torch.randn(32, 128), torch.randint(0, 10, (32,)), torch.randn(32), torch.ones(32, 1)]
    candidates = {
        f"{tensors} {who}": _candidate(Idle(tensors), batch, size, records=who == "with")
        for tensors in TENSORS
        for who in ("with", "without")
    }
    for candidate in candidates.values():
        candidate()
    taken = interleave(candidates, size.rounds, tick=bench.say)
    return BarResult(
        "recorder",
        TITLE,
        {
            "optimizer": f"{' and '.join(f'{one:,}' for one in TENSORS)} parameters of {SHAPE[0]} x {SHAPE[1]} numbers "
            "with the state of AdamW, and a step that does nothing",
            "batch": "a list of four tensors, one of 16 KiB",
            "time": f"processor time of the thread, for each of {size.steps} steps, beyond that of steps without, "
            f"after {size.first:,} steps: these touch memory that is new",
            "versions": f"torch {torch.__version__}",
        },
        tuple(
            Check(
                f"{tensors:,} tensors: a step",
                "µs",
                "at most",
                LIMIT_MICROSECONDS,
                tuple(a - b for a, b in zip(taken[f"{tensors} with"], taken[f"{tensors} without"], strict=True)),
            )
            for tensors in TENSORS
        ),
        tuple(Series(f"{name}, a step", "µs", tuple(samples)) for name, samples in taken.items()),
    )


def _candidate(optimizer: Idle, batch: Any, size: Size, *, records: bool) -> Callable[[], float]:
    def measured() -> float:
        recorder = FlightRecorder(lambda: {"optimizer": optimizer}, dict, None, stops=False) if records else None
        try:
            _train(optimizer, recorder, batch, size.first)
            began = time.thread_time()
            _train(optimizer, recorder, batch, size.steps)
            return (time.thread_time() - began) / size.steps * 1e6
        finally:
            if recorder is not None:
                recorder.close()

    return measured


def _train(optimizer: Idle, recorder: FlightRecorder | None, batch: Any, steps: int) -> None:
    for _ in range(steps):
        if recorder is not None:
            recorder.took(batch)
        optimizer.step()
