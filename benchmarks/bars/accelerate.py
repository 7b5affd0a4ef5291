"""What saving costs with Accelerate and with transformers' Trainer: ours against their own, at the same interval."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.accelerate_loop import (
    Laps,
    Sizes,
    accelerate_laps,
    accelerate_state_bytes,
    transformers_laps,
    transformers_state_bytes,
)
from benchmarks.bars.stall import ReferenceCopy
from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios

TITLE = "Accelerate and transformers: a save every few steps"
STALL_LIMIT = 2.0
"""In one copy of the state and the writer's processor time, shared out over all cores: training needs all of them."""
SHARE_LIMIT = 0.4
"""Of what the library's own way to save costs."""

LOOPS = {
    Scale.FULL: (Sizes(8_000_000, 64, 50, 9), Sizes(8_000_000, 4, 50, 9), 5),
    Scale.QUICK: (Sizes(8_000_000, 64, 50, 9), Sizes(8_000_000, 4, 50, 9), 2),
    Scale.TINY: (Sizes(20_000, 4, 36, 12), Sizes(20_000, 2, 36, 12), 1),
}
"""Loop with Accelerate, training with transformers, rounds."""

Train = Callable[[Path, Sizes, str], Laps]


class _Side:
    """One library: training without saving, with its own way, and with ours.

    Args:
        name: of the training, for people.
        own: how its own way is called, by `train` and by people.
        ours: how ours is called by people.
    """

    def __init__(self, name: str, own: tuple[str, str], ours: str, train: Train, sizes: Sizes, nbytes: int) -> None:
        self.name, self.own, self.ours, self.nbytes = name, own[1], ours, nbytes
        self.hand = f"{name}, copy and direct write by hand"
        self._kinds = {f"{name}, no saving": "none", self.own: own[0], self.hand: "hand", ours: "ours"}
        self._train, self._sizes = train, sizes
        self._copy = ReferenceCopy(nbytes)
        self.laps: dict[str, list[Laps]] = {what: [] for what in self._kinds}
        self.copies: list[float] = []

    def candidates(self, folder: Path) -> dict[str, Callable[[], float]]:
        """What takes part in the rounds."""

        def measured(what: str, kind: str) -> Callable[[], float]:
            def run() -> float:
                target = folder / kind
                laps = self._train(target, self._sizes, kind)
                shutil.rmtree(target, ignore_errors=True)
                self.laps[what].append(laps)
                return laps.training_seconds

            return run

        def copy() -> float:
            self.copies.append(min(self._copy.run() for _ in range(3)))
            return self.copies[-1]

        return {what: measured(what, kind) for what, kind in self._kinds.items()} | {f"copy, {self.name}": copy}

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        self.copies.clear()
        for laps in self.laps.values():
            laps.clear()

    def checks(self) -> tuple[Check, ...]:
        stalls = [one.stall_seconds for one in self.laps[self.ours]]
        theirs = [one.stall_seconds for one in self.laps[self.own]]
        writer = [one.writer_seconds / len(one.saved) / (os.cpu_count() or 1) for one in self.laps[self.ours]]
        least = [copy + share for copy, share in zip(self.copies, writer, strict=True)]
        return (
            Check(f"{self.ours}: stall / (copy_ + writer / cores)", "x", "at most", STALL_LIMIT, ratios(stalls, least)),
            Check(f"{self.ours}: stall / that of {self.own}", "x", "at most", SHARE_LIMIT, ratios(stalls, theirs)),
        )

    def _whole_cost(self, laps: Laps, plain: Laps) -> float:
        """Seconds that one save adds to all steps until the next one; the first save is left out."""
        every, saves = self._sizes.every, self._sizes.steps // self._sizes.every
        first, last = 2 * every - 1, saves * every - 1
        return (laps.seconds_between(first, last) - plain.seconds_between(first, last)) / (saves - 2)

    def series(self) -> tuple[Series, ...]:
        base = self.laps[f"{self.name}, no saving"]
        found = [
            Series(f"{self.name}, one step", "s", tuple(one.training_seconds / self._sizes.steps for one in base)),
            Series(f"copy_, {self.name}", "s", tuple(self.copies)),
        ]
        for what in (self.own, self.hand, self.ours):
            pairs = list(zip(self.laps[what], base, strict=True))
            found += [
                Series(f"{what}: stall", "s", tuple(one.stall_seconds for one, _ in pairs), "per save"),
                Series(
                    f"{what}: overhead",
                    "%",
                    tuple(100 * (one.training_seconds / plain.training_seconds - 1) for one, plain in pairs),
                    "to the end of the last step",
                ),
                Series(
                    f"{what}: overhead until written",
                    "%",
                    tuple(100 * (one.seconds_until_written / plain.seconds_until_written - 1) for one, plain in pairs),
                    "the end of a run included",
                ),
                Series(
                    f"{what}: whole cost of a save", "s", tuple(self._whole_cost(one, plain) for one, plain in pairs)
                ),
                Series(f"{what}: saves", "", tuple(float(len(one.saved)) for one, _ in pairs)),
            ]
        return tuple(found)


def run(bench: Bench) -> BarResult:
    """Both libraries, each without saving, with its own way to save and with ours, interleaved."""
    loop, trainer, rounds = LOOPS[bench.scale]
    sides = (
        _Side(
            "Accelerate",
            ("save_state", "accelerator.save_state"),
            "AdaptiveCheckpoint",
            accelerate_laps,
            loop,
            accelerate_state_bytes(loop),
        ),
        _Side(
            "transformers",
            ("trainer", "Trainer's own saving"),
            "TransformersCallback",
            transformers_laps,
            trainer,
            transformers_state_bytes(trainer),
        ),
    )
    with bench.scratch("accelerate") as folder:
        candidates = {name: one for side in sides for name, one in side.candidates(folder).items()}
        for warm_up in candidates.values():
            warm_up()
        for side in sides:
            side.forget()
        interleave(candidates, rounds, tick=bench.say)
    return BarResult(
        "accelerate",
        TITLE,
        {
            "Accelerate": f"perceptron with fused Adam, {sides[0].nbytes / 1e6:.0f} MB of state, batch of "
            f"{loop.batch_size}, {loop.steps} steps on {torch.get_num_threads()} threads, a save every {loop.every}",
            "transformers": f"GPT-2 with AdamW, {sides[1].nbytes / 1e6:.0f} MB of state, batch of "
            f"{trainer.batch_size}, {trainer.steps} steps, a save every {trainer.every}",
            "stall": "what a save adds to its own step and the one after it, beyond steps of typical length: the "
            "median of a run's saves",
            "whole cost": "what a save adds to all steps until the next one; the first save is left out",
            "by hand": "one copy, and a thread that writes it around the page cache and syncs it: the least that makes "
            "a state durable beside training. What it costs beyond the copy is the price of writing on this machine",
            "overhead": "wall time against the run without saving in the same round",
        },
        tuple(check for side in sides for check in side.checks()),
        tuple(series for side in sides for series in side.series()),
        (
            "save_state and the Trainer keep the newest two, and do not sync: a power cut can lose what they wrote.",
            "The Trainer saves once more at its end.",
        ),
    )
