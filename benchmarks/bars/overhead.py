"""Whether a training run stays within the overhead budget it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from typing_extensions import override

from benchmarks.lightning_loop import Fit, Module
from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import AttemptsFound
from lightning_ckpt import AdaptiveCheckpoint

TITLE = "Overhead: a Lightning run against its budget"
BUDGETS = (0.01, 0.035, 0.05)
INPUTS = 64
BATCH_SIZE = 128
MTBF_SECONDS = 1.0
"""So short that the budget decides the frequency; with failures as rare as usual, far fewer snapshots are taken."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    parameters: int
    steps: int
    rounds: int


SIZES = {
    Scale.FULL: Size(4_000_000, 1200, 5),
    Scale.QUICK: Size(4_000_000, 300, 2),
    Scale.TINY: Size(20_000, 20, 1),
}


def run(bench: Bench) -> BarResult:
    """Fit without the callback and with it at each budget, interleaved; the same seeded training every time."""
    size = SIZES[bench.scale]
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    beyond: dict[float | None, list[float]] = {budget: [] for budget in (None, *BUDGETS)}
    starting: list[float] = []
    taken_snapshots: dict[float, list[float]] = {budget: [] for budget in BUDGETS}
    with bench.scratch("overhead") as folder:
        numbers = iter(range(1_000_000))

        def fit(budget: float | None) -> Callable[[], float]:
            def measured() -> float:
                run_folder = folder / str(next(numbers))
                module = Module(size.parameters, INPUTS)
                callbacks = [] if budget is None else [_callback(run_folder, budget)]
                fitting = Fit(str(folder), module, data, BATCH_SIZE, size.steps, callbacks=callbacks)
                fitting.run()
                if budget is not None:
                    starting.append(fitting.starting_seconds)
                    taken_snapshots[budget].append(_count(run_folder))
                beyond[budget].append(100 * fitting.share_beyond_typical_steps)
                return fitting.training_seconds

            return measured

        for budget in (None, BUDGETS[0]):
            fit(budget)()
        for counts in (*taken_snapshots.values(), *beyond.values(), starting):
            counts.clear()
        taken = interleave(
            {"without": fit(None), **{f"{budget:.1%}": fit(budget) for budget in BUDGETS}}, size.rounds, tick=bench.say
        )
    without = taken["without"]
    return BarResult(
        "overhead",
        TITLE,
        {
            "training": f"Lightning, perceptron of {size.parameters / 1e6:.1f} million parameters with fused Adam "
            f"({12 * size.parameters / 1e6:.0f} MB of state) on the digits of scikit-learn, {size.steps} steps",
            "callback": "AdaptiveCheckpoint(folder, overhead=budget), no snapshot at the end, and failures declared so "
            "frequent that the budget alone decides how often",
            "overhead": "wall time from the first step to the end of the last, making the arena ready and learning the "
            "interval included, against the run without in the same round; starting the writer process, before the "
            "first step, is shown by itself",
        },
        tuple(
            Check(
                f"overhead at a budget of {budget:.1%}",
                "%",
                "at most",
                100 * budget,
                tuple(100 * (a / b - 1) for a, b in zip(taken[f"{budget:.1%}"], without, strict=True)),
            )
            for budget in BUDGETS
        ),
        (
            Series("training without", "s", tuple(without)),
            Series("start of a run with the callback", "s", tuple(starting), "once, before the first step"),
            Series("one step without", "s", tuple(s / size.steps for s in without)),
            *(
                Series(
                    f"overhead at {budget:.1%}, by steps",
                    "%",
                    tuple(a - b for a, b in zip(beyond[budget], beyond[None], strict=True)),
                    "time beyond steps of the run's own median length, less that of the run without",
                )
                for budget in BUDGETS
            ),
            *(
                Series(f"durable snapshots at {budget:.1%}", "", tuple(counts))
                for budget, counts in taken_snapshots.items()
            ),
        ),
    )


class JustBegun(AdaptiveCheckpoint):
    """A run that has just begun at each step: time that it survives does not correct how often it is said to fail."""

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.cadence.emit(AttemptsFound((), ()))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def _callback(folder: Path, budget: float) -> AdaptiveCheckpoint:
    return JustBegun(str(folder), overhead=budget, mtbf=MTBF_SECONDS, at_end=False)


def _count(folder: Path) -> float:
    """Snapshots made in a run: the number of the newest one."""
    found = Checkpointer(folder).snapshots()
    return float(found[-1].seq) if found else 0.0
