"""How long training stands still for a snapshot, against one `copy_` of the same bytes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine import save_timed, wait_ready
from benchmarks.measure import interleave, timed
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, change_everything, everything_lazy, gpt2_state, state_bytes, tensors
from ckpt_engine import Checkpointer

TITLE = "Stall: training blocked by one snapshot"
EAGER_LIMIT = 1.25
FENCE_LIMIT = 0.20
FIRST_LIMIT = 2.0
COMPUTE_COPIES = 2.0
"""Length of the simulated forward and backward, in copies: the least for which the lazy target holds."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    nbytes: int
    rounds: int
    firsts: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 15, 5),
    Scale.QUICK: Size(1_493_000_000, 5, 2),
    Scale.TINY: Size(4_000_000, 2, 1),
}


def run(bench: Bench) -> BarResult:
    """Measure steady eager and lazy stalls interleaved with the reference copy, then first snapshots."""
    size = SIZES[bench.scale]
    state = gpt2_state(size.nbytes)
    nbytes = state_bytes(state)
    reference = ReferenceCopy(nbytes)
    with bench.scratch("stall") as folder:
        eager, lazy = Checkpointer(folder / "eager"), LazySteps(folder / "lazy", state)
        with eager, lazy.checkpointer:
            counter = iter(range(1, 1_000_000))

            def save_eager() -> float:
                change_everything(state)  # what did not change would not be copied
                seconds, handle = save_timed(eager, state, next(counter))
                handle.wait()
                return seconds

            for _ in range(2):
                for warm_up in (save_eager, reference.run, lazy.run):
                    warm_up()
            lazy.calibrate(COMPUTE_COPIES * statistics.median(reference.run() for _ in range(5)))
            taken = interleave(
                {
                    "copy_": reference.run,
                    "eager": save_eager,
                    "compute": lazy.compute_alone,
                    "lazy": lazy.run,
                },
                size.rounds,
                tick=bench.say,
            )
        firsts = [_first(folder / f"first-{i}", state, bench) for i in range(size.firsts)]
    copies = taken["copy_"]
    fences, returns, computes = lazy.samples(size.rounds)
    return BarResult(
        "stall",
        TITLE,
        {
            "state": f"{nbytes / 1e9:.2f} GB fp32, {sum(1 for _ in tensors(state))} tensors (GPT-2 with Adam)",
            "threads": f"{torch.get_num_threads()} of torch",
            "snapshots": "every element changes between two of them",
            "eager": "time of `save`; the snapshot before is durable, its slot is warm",
            "lazy": f"forward and backward: matrix products taking {COMPUTE_COPIES:g} copies when alone, all threads",
            "reference": "one `copy_` of one flat tensor of the same bytes into a touched buffer",
            "first snapshot": "new Checkpointer, `prepare(state)`, training until `ready()`, then `save`",
        },
        (
            Check("eager stall / copy_", "x", "at most", EAGER_LIMIT, ratios(taken["eager"], copies)),
            Check("lazy fence wait / copy_", "x", "at most", FENCE_LIMIT, ratios(fences, copies)),
            Check(
                "first snapshot after prepare / steady",
                "x",
                "at most",
                FIRST_LIMIT,
                tuple(first / statistics.median(taken["eager"]) for first in firsts),
            ),
        ),
        (
            Series("one copy_", "s", tuple(copies)),
            Series("eager save", "s", tuple(taken["eager"])),
            Series("lazy save returns after", "s", tuple(returns)),
            Series("lazy fence wait", "s", tuple(fences)),
            Series("forward and backward alone", "s", tuple(taken["compute"])),
            Series(
                "forward and backward while staging", "s", tuple(computes), "includes the copy's share of the cores"
            ),
            Series("lazy total cost", "s", ratios_minus(taken["lazy"], taken["compute"]), "save + fence + slowdown"),
            Series("first eager save after prepare", "s", tuple(firsts)),
        ),
    )


class ReferenceCopy:
    """One `copy_` of `nbytes` between two flat, touched tensors."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes // 4)
        self._target = torch.zeros(nbytes // 4)

    def run(self) -> float:
        return timed(lambda: self._target.copy_(self._source))


class LazySteps:
    """Steps of `save`, forward and backward, fence; the samples are kept apart."""

    def __init__(self, folder: Path, state: State) -> None:
        self.checkpointer = Checkpointer(folder)
        self._state = state
        self._step = 0
        self._products = 1
        self._matrix = torch.randn(1024, 1024)
        self._out = torch.empty(1024, 1024)
        self._parts: list[tuple[float, float, float]] = []

    def calibrate(self, seconds: float) -> None:
        """Make `compute_alone` last about `seconds`."""
        self._products = 20
        alone = statistics.median(self.compute_alone() for _ in range(5))
        self._products = max(1, round(self._products * seconds / alone))

    def compute_alone(self) -> float:
        """A forward and backward without any snapshot."""
        return timed(self._compute)

    def run(self) -> float:
        """One step; seconds from before `save` to after the fence."""
        change_everything(self._state)
        began = time.perf_counter()
        self._step += 1
        _, handle = save_timed(self.checkpointer, self._state, self._step, lazy=everything_lazy)
        saved = time.perf_counter()
        self._compute()
        computed = time.perf_counter()
        fence = self.checkpointer.before_update()
        ended = time.perf_counter()
        handle.wait()
        self._parts.append((fence, saved - began, computed - saved))
        return ended - began

    def samples(self, count: int) -> tuple[list[float], list[float], list[float]]:
        """Fence waits, save times and compute times of the last `count` steps."""
        fences, returns, computes = zip(*self._parts[-count:], strict=True)
        return list(fences), list(returns), list(computes)

    def _compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix, out=self._out)


def ratios_minus(with_it: list[float], without: list[float]) -> tuple[float, ...]:
    """Round by round differences of two interleaved series."""
    return tuple(a - b for a, b in zip(with_it, without, strict=True))


def _first(folder: Path, state: State, bench: Bench) -> float:
    """Stall of the first snapshot of a new Checkpointer, after `prepare`."""
    bench.say(f"first snapshot · {folder.name}")
    matrix = torch.randn(256, 256)
    with Checkpointer(folder) as checkpointer:
        checkpointer.prepare(state)
        wait_ready(checkpointer, lambda: torch.mm(matrix, matrix))
        seconds, handle = save_timed(checkpointer, state, 1)
        handle.wait()
    return seconds
