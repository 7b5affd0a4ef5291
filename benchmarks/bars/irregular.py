"""Whether slow steps, evaluations that nothing announces and late data move the interval or the overhead of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from typing_extensions import override

from benchmarks.bars.overhead import BATCH_SIZE, INPUTS, MTBF_SECONDS, JustBegun, Size
from benchmarks.lightning_loop import Fit, Module
from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series

TITLE = "Irregular steps: interval and overhead of a Lightning run"
BUDGET = 0.01
SIZES = {
    Scale.FULL: Size(1_000_000, 500, 7),
    Scale.QUICK: Size(1_000_000, 500, 2),
    Scale.TINY: Size(20_000, 20, 1),
}
SLOW_EACH, SLOW = 50, 9.0
STALL_EACH, STALL = 97, 20.0
EVALUATION_EACH, EVALUATION = 400, 60.0
"""Steps between two, and how many usual steps each takes longer."""


class Uneven(Module):
    """The same training; some of its steps take longer for reasons that have nothing to do with snapshots.

    Args:
        each: seconds of a usual step.
    """

    def __init__(self, parameters: int, inputs: int, each: float) -> None:
        super().__init__(parameters, inputs)
        self._each = each

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for steps, longer in ((SLOW_EACH, SLOW), (STALL_EACH, STALL), (EVALUATION_EACH, EVALUATION)):
            if (batch_idx + 1) % steps == 0:
                time.sleep(longer * self._each)
        return super().training_step(batch, batch_idx)


class _Watched(JustBegun):
    """Remembers how many seconds of training the cadence wanted between two snapshots in the end, and its account."""

    wanted_seconds = 0.0
    accounted = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._run is not None and (decision := self._run.cadence.adaptive.decision) is not None:
            self.wanted_seconds = decision.interval_steps * decision.costs.step_seconds
            self.accounted = self._run.cadence.overhead_fraction


def run(bench: Bench) -> BarResult:
    """Fit with even and with uneven steps, with the callback and without it, interleaved."""
    size = SIZES[bench.scale]
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    wanted: dict[bool, list[float]] = {False: [], True: []}
    accounted: dict[bool, list[float]] = {False: [], True: []}
    beyond: dict[tuple[bool, bool], list[float]] = {
        (uneven, snapshots): [] for uneven in (False, True) for snapshots in (False, True)
    }
    with bench.scratch("irregular") as folder:
        numbers = iter(range(1_000_000))
        usual = [1e-3]

        def fit(uneven: bool, snapshots: bool) -> Callable[[], float]:
            def measured() -> float:
                callback = _callback(folder / str(next(numbers)))
                module = Uneven(size.parameters, INPUTS, usual[0]) if uneven else Module(size.parameters, INPUTS)
                callbacks = [callback] if snapshots else []
                fitting = Fit(str(folder), module, data, BATCH_SIZE, size.steps, callbacks=callbacks)
                fitting.run()
                if snapshots:
                    wanted[uneven].append(callback.wanted_seconds)
                    accounted[uneven].append(100 * callback.accounted)
                beyond[uneven, snapshots].append(100 * fitting.share_beyond_typical_steps)
                return fitting.training_seconds

            return measured

        usual[0] = min(fit(uneven=False, snapshots=False)() for _ in range(2)) / size.steps
        beyond[False, False].clear()
        kinds = {
            f"{'uneven' if uneven else 'even'}, {'with' if snapshots else 'without'}": fit(uneven, snapshots)
            for uneven in (False, True)
            for snapshots in (False, True)
        }
        taken = interleave(kinds, size.rounds, tick=bench.say)
    pairs = zip(taken["uneven, with"], taken["uneven, without"], strict=True)
    return BarResult(
        "irregular",
        TITLE,
        {
            "training": f"as of the bar of the overhead, {size.parameters / 1e6:.1f} million parameters, {size.steps} "
            f"steps, with each {SLOW_EACH}th step {SLOW + 1:g} "
            f"times as long, data that comes {STALL:g} steps late each {STALL_EACH} steps, and an evaluation of "
            f"{EVALUATION:g} steps each {EVALUATION_EACH} that nothing announces",
            "interval": "seconds of training between two snapshots that the cadence wants in the end, beside those of "
            "the even run in the same round: the budget decides both",
        },
        (
            Check(
                "interval, uneven / even",
                "x",
                "at most",
                1.3,
                tuple(a / b if b > 0.0 else 1.0 for a, b in zip(wanted[True], wanted[False], strict=True)),
            ),
            Check(
                "interval, even / uneven",
                "x",
                "at most",
                1.3,
                tuple(b / a if a > 0.0 else 1.0 for a, b in zip(wanted[True], wanted[False], strict=True)),
            ),
            Check(
                f"overhead at a budget of {BUDGET:.1%}",
                "%",
                "at most",
                100 * BUDGET,
                tuple(100 * (a / b - 1) for a, b in pairs),
            ),
        ),
        (
            Series("one usual step", "s", (usual[0],)),
            *(
                series
                for uneven in (False, True)
                for series in _series("uneven" if uneven else "even", taken, wanted[uneven])
            ),
            *(
                Series(
                    f"overhead, {name}, by steps",
                    "%",
                    tuple(a - b for a, b in zip(beyond[uneven, True], beyond[uneven, False], strict=True)),
                    "time beyond steps of the run's own median length, less that of the run without",
                )
                for uneven, name in ((False, "even"), (True, "uneven"))
            ),
            *(
                Series(f"overhead, {name}, as the run accounts for it", "%", tuple(accounted[uneven]))
                for uneven, name in ((False, "even"), (True, "uneven"))
            ),
        ),
    )


def _series(name: str, taken: Mapping[str, Sequence[float]], wanted: Sequence[float]) -> Iterator[Series]:
    pairs = zip(taken[f"{name}, with"], taken[f"{name}, without"], strict=True)
    yield Series(f"overhead, {name}, pair by pair", "%", tuple(100 * (a / b - 1) for a, b in pairs))
    yield Series(f"training without, {name}", "s", tuple(taken[f"{name}, without"]))
    yield Series(f"interval, {name}", "s", tuple(wanted))


def _callback(folder: Path) -> _Watched:
    return _Watched(str(folder), overhead=BUDGET, mtbf=MTBF_SECONDS, at_end=False)
