"""What a tracked run costs training, to a tenth of a percent: single steps with and without, in one process."""

from __future__ import annotations

import itertools
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import CpuMeter, started_since
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from benchmarks.workloads import SEED, perceptron
from ckpt_engine import Checkpointer
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.observe.events import AttemptsFound
from ckpt_engine.observe.run_times import hook_time

TITLE = "Budget: single steps with and without snapshots in turn, in one process"
BUDGET = 0.01
MARGIN = 0.001
"""How much the upper end of the confidence interval may be above the budget."""
WIDTH = 0.99
"""Where a measurement ends: half the width by `MARGIN`. The rule never sees the value (Chow and Robbins 1965)."""
MTBF_SECONDS = 1.0
"""So short that the budget decides the frequency; with failures as rare as usual, far fewer snapshots are taken."""
INPUTS, BATCH_SIZE = 64, 128
RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure: pairs of steps until the interval is narrow, after the first ones, which do not count.

    Args:
        pairs: at least.
        most: at most.
    """

    parameters: int
    pairs: int
    most: int
    first: int


SIZES = {
    Scale.FULL: Size(4_000_000, 5400, 18_600, 300),
    Scale.QUICK: Size(4_000_000, 1000, 1000, 200),
    Scale.TINY: Size(20_000, 20, 20, 5),
}
LOOK = 1200
"""Pairs between two looks at the width of the interval."""
AFTER = 2
"""Steps after a snapshot was written that belong to it: caches are cold."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps in a row.

    Args:
        wall, trainer, writer: seconds of the clock, and of the processor in each process.
        waited: seconds in which the training thread could have run, and another thread had the core.
        hooks: seconds in the engine's hooks, by their own clock.
    """

    steps: int
    wall: float
    trainer: float
    writer: float
    waited: float
    hooks: float


class Loop:
    """A user's own loop that can be left after any step, with snapshots or without."""

    def __init__(self, model: nn.Module, data: TensorDataset, checkpointer: Checkpointer | None) -> None:
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        self._loader = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
        self._loss = nn.CrossEntropyLoss()
        self._checkpointer = checkpointer
        self.cadence: Cadence | None = None
        self._steps = self._train()

    def run(self, steps: int) -> int:
        """Train so many steps, and on until a snapshot that is taken is written; how many steps that were."""
        taken = 0
        while taken < steps:
            next(self._steps)
            taken += 1
            if self.cadence is not None and self.cadence._snapshots.in_flight:
                steps = taken + 1 + AFTER
        return taken

    def share_state(self, other: Loop) -> None:
        """Continue with the moments of another one's optimizer."""
        self._optimizer.state = other._optimizer.state

    def _train(self) -> Iterator[None]:
        if self._checkpointer is not None:
            run = self._checkpointer.track(model=self._model, optimizer=self._optimizer, loader=self._loader)
            self.cadence = run._run.cadence
        for _ in itertools.count():
            for inputs, labels in self._loader:
                self._loss(self._model(inputs), labels).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                yield


class Meter:
    """Measures steps."""

    def __init__(self, writers: Sequence[psutil.Process]) -> None:
        self._writers = CpuMeter(writers)
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def measure(self, loop: Loop, steps: int = 1) -> Stretch:
        before = self._read()
        taken = loop.run(steps)
        wall, trainer, both, waited, hooks = (b - a for a, b in zip(before, self._read(), strict=True))
        return Stretch(taken, wall, trainer, both - trainer, waited, hooks)

    def _read(self) -> tuple[float, float, float, float, float]:
        both = self._writers.read()
        waited = int(self._schedule.read_text().split()[1]) / 1e9
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), usage.ru_utime + usage.ru_stime, both, waited, hook_time.seconds


@contextmanager
def without_hooks() -> Iterator[None]:
    """Without what a tracked run has made torch call at the steps of any optimizer of the process."""
    hooks: list[dict[int, Any]] = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    yield
    for one, those in zip(hooks, kept, strict=True):
        one.update(those)


def one_pair(loops: tuple[Loop, Loop], meter: Meter, cadence: Cadence, order: random.Random) -> tuple[Stretch, Stretch]:
    """One step of each loop in random order; where a snapshot made that several of one, as many of the other."""
    off: list[Stretch] = []

    def without(steps: int) -> None:
        with without_hooks():
            off.append(meter.measure(loops[1], steps))
        cadence.exclude(off[-1].wall)

    if order.random() < 0.5:
        without(1)
    on = meter.measure(loops[0])
    if (left := on.steps - len(off)) > 0:
        without(left)
    return on, Stretch(*(sum(parts) for parts in zip(*map(astuple, off), strict=True)))


def run(bench: Bench) -> BarResult:
    """Steps of a loop with snapshots and of one without, which train the same tensors, in pairs of random order."""
    torch.set_num_threads(1)  # threads of torch that wait for each other make a step a tenth longer or shorter
    size = SIZES[bench.scale]
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    order = random.Random(SEED)
    pairs: list[tuple[Stretch, Stretch]] = []
    before = tuple(psutil.Process().children(recursive=True))
    with (
        bench.scratch("budget") as folder,
        Checkpointer(folder / "run", overhead=BUDGET, mtbf=MTBF_SECONDS, at_end=False) as checkpointer,
    ):
        torch.manual_seed(SEED)
        model = perceptron(size.parameters, inputs=INPUTS)
        loops = Loop(model, data, checkpointer), Loop(model, data, None)
        taken = loops[0].run(AFTER)
        loops[1].share_state(loops[0])
        loops[1].run(taken)  # both are at the same batch of an epoch from here on
        cadence = loops[0].cadence
        assert cadence is not None
        meter = Meter(started_since(before))
        began = 0.0, 0.0
        for number in range(size.first + size.most):
            # Time that a run survives does not correct how often it is said to fail.
            cadence.emit(AttemptsFound((), ()))
            if number == size.first:
                began = _account(cadence)
            pair = one_pair(loops, meter, cadence, order)
            if number >= size.first:
                pairs.append(pair)
            if number % 100 == 0:
                bench.say(f"pair {number} of {size.first + size.pairs} to {size.first + size.most}")
            if len(pairs) >= size.pairs and (len(pairs) - size.pairs) % LOOK == 0:
                looked = time.perf_counter()
                wide = half_width(interval_of(pairs, trained))
                cadence.exclude(time.perf_counter() - looked)
                if wide <= WIDTH * MARGIN:
                    break
        charged, clean = (b - a for a, b in zip(began, _account(cadence), strict=True))
        snapshots = int(checkpointer.snapshots()[-1].seq)
    return _result(size, pairs, charged / clean if clean else 0.0, snapshots)


def _account(cadence: Cadence) -> tuple[float, float]:
    clean, spent, hooks = cadence._account.totals
    return spent + hooks, clean


def interval(on: Sequence[float], off: Sequence[float]) -> tuple[float, float, float]:
    """What the sum of `on` is beyond that of `off`, as a share, with a bootstrap interval over pairs (Efron 1979)."""
    pairs, generator = np.array([on, off]), np.random.default_rng(SEED)
    count = pairs.shape[1]
    sums = np.array([pairs[:, generator.integers(0, count, count)].sum(axis=1) for _ in range(RESAMPLES)])
    low, high = np.quantile(sums[:, 0] / sums[:, 1] - 1.0, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(pairs[0].sum() / pairs[1].sum() - 1.0), float(low), float(high)


def interval_of(pairs: Sequence[tuple[Stretch, Stretch]], of: Callable[[Stretch], float]) -> tuple[float, float, float]:
    """`interval` of what `of` tells of each stretch."""
    return interval(*([of(one) for one in kind] for kind in zip(*pairs, strict=True)))


def half_width(found: tuple[float, float, float]) -> float:
    """Of an interval."""
    return (found[2] - found[1]) / 2.0


def trained(one: Stretch) -> float:
    """Seconds that training took. A step without a writer beside it waits for a core because of other processes."""
    return one.wall if one.steps > 1 else one.wall - one.waited


def _result(size: Size, pairs: Sequence[tuple[Stretch, Stretch]], accounted: float, snapshots: int) -> BarResult:
    def measured(of: Callable[[Stretch], float]) -> tuple[float, float, float]:
        return tuple(100 * share for share in interval_of(pairs, of))  # type: ignore[return-value]

    def in_order(of: Callable[[Stretch], float]) -> tuple[float, float, float]:
        middle, low, high = measured(of)
        return low, middle, high

    truth, low, high = measured(trained)
    far = [(on, off) for on, off in pairs if on.steps == 1]
    timed = interval(
        [off.wall + on.hooks if on.steps == 1 else on.wall for on, off in pairs], [b.wall for _, b in pairs]
    )
    beyond = interval([on.wall - on.hooks for on, _ in far], [off.wall for _, off in far])
    ways = {
        "seconds of the clock, waits for other processes included": lambda one: one.wall,
        "processor time of the trainer": lambda one: one.trainer,
        "processor time of trainer and writer": lambda one: one.trainer + one.writer,
        "processor time of the trainer, and its waits for a core": lambda one: one.trainer + one.waited,
    }
    step = sum(b.wall for _, b in pairs) / sum(b.steps for _, b in pairs)
    return BarResult(
        "budget",
        TITLE,
        {
            "loop": f"a plain loop with `track`, perceptron of {size.parameters / 1e6:.1f} million parameters with "
            f"fused Adam ({12 * size.parameters / 1e6:.0f} MB of state) on the digits of scikit-learn, "
            "one thread, and the same loop without snapshots in the same process, which trains the same tensors",
            "steps": f"{len(pairs)} pairs of one step each, in random order; a step that takes a snapshot with all "
            f"until it is written and {AFTER} after that, beside as many without. {size.first} pairs before them are "
            "not counted. The account leaves out the steps without",
            "pairs": f"at least {size.pairs} and at most {size.most}, until half the width of the interval is "
            f"{100 * WIDTH * MARGIN:.3f} points, looked at every {LOOK} pairs",
            "training": "wall time; of a step without a snapshot less what it waited for a core, which other processes "
            "had (run-queue delay)",
            "interval": f"{CONFIDENCE:.0%}, by bootstrap over pairs ({RESAMPLES} resamples)",
            "budget": "failures declared so frequent that the budget alone decides how often",
        },
        (
            Check(
                "upper end of the interval of the overhead, less the budget",
                "points",
                "at most",
                100 * MARGIN,
                (high - 100 * BUDGET,),
            ),
            Check(
                "half the width of the interval", "points", "at most", 100 * MARGIN, (half_width((truth, low, high)),)
            ),
            Check(
                "overhead, as the run accounts for it, beside the measured one",
                "points",
                "at most",
                100 * MARGIN,
                (abs(100 * accounted - truth),),
            ),
        ),
        (
            Series("overhead", "%", (low, truth, high), "lower end, estimate, upper end"),
            Series("overhead, as the run accounts for it", "%", (100 * accounted,)),
            *(
                Series(f"overhead, {name}", "%", in_order(of), "lower end, estimate, upper end")
                for name, of in ways.items()
            ),
            Series(
                "overhead, hooks of steps without a snapshot by their own clock",
                "%",
                (100 * timed[1], 100 * timed[0], 100 * timed[2]),
                "lower end, estimate, upper end",
            ),
            Series(
                "steps without a snapshot, beyond these hooks",
                "%",
                (100 * beyond[1], 100 * beyond[0], 100 * beyond[2]),
                "lower end, estimate, upper end: what no part names",
            ),
            Series("one step without", "s", (step,)),
            Series("snapshots", "", (float(snapshots),)),
        ),
    )
