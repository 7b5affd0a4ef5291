"""What checkpoints cost, from pairs of trainings with and without the callback: values, medians and a verdict."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCKS = "blocks.jsonl"


@dataclass(frozen=True, slots=True)
class Block:
    """One short training.

    Args:
        seconds: of its measured steps; what runs after the last of them is not in it.
        cpu_seconds: CPU time of the training process in them, all its threads; not that of the writer.
        snapshots: durable ones taken in these steps.
        own_percent: overhead by the callback's own account; None: without the callback.
    """

    seconds: float
    cpu_seconds: float
    snapshots: int
    own_percent: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A training without and one with the callback, one right after the other."""

    without: Block
    with_callback: Block

    @property
    def percent(self) -> float:
        """How much longer the same steps took with the callback."""
        return 100.0 * (self.with_callback.seconds / self.without.seconds - 1.0)

    @property
    def cpu_percent(self) -> float:
        """How much more CPU time the same steps took the training process with the callback."""
        return 100.0 * (self.with_callback.cpu_seconds / self.without.cpu_seconds - 1.0)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What was measured.

    Args:
        budget_percent: that was given to the callback.
        steps: measured steps of each training.
        pairs: all of them, none left out.
    """

    budget_percent: float
    steps: int
    pairs: tuple[Pair, ...]

    @property
    def percent(self) -> float:
        """The measured overhead: the median over the pairs."""
        return statistics.median(pair.percent for pair in self.pairs)

    @property
    def error_percent(self) -> float:
        """Standard error of the median; infinite for fewer than 3 pairs.

        The larger of two estimates: from the median absolute deviation of the pairs, and from how much the trainings
        without the callback, which should all take the same time, differ among themselves.
        """
        if len(self.pairs) < 3:
            return math.inf
        of_pairs = 1.483 * statistics.median(abs(pair.percent - self.percent) for pair in self.pairs)
        seconds = [pair.without.seconds for pair in self.pairs]
        of_machine = 100.0 * math.sqrt(2.0) * statistics.stdev(seconds) / statistics.mean(seconds)
        return 1.253 * max(of_pairs, of_machine) / math.sqrt(len(self.pairs))

    @property
    def cpu_percent(self) -> float:
        """Additional CPU time of the training process: less disturbed by other programs, blind for waiting."""
        return statistics.median(pair.cpu_percent for pair in self.pairs)

    @property
    def own_percent(self) -> float:
        """What the callback itself accounts for: stalls, fences, waits and slowdown; the median over the pairs."""
        own = [pair.with_callback.own_percent for pair in self.pairs]
        return statistics.median(value for value in own if value is not None)

    @property
    def noise_percent(self) -> float:
        """How much the trainings without the callback differ among themselves: (slowest - fastest) / median."""
        seconds = [pair.without.seconds for pair in self.pairs]
        return 100.0 * (max(seconds) - min(seconds)) / statistics.median(seconds)

    @property
    def snapshots(self) -> int:
        return sum(pair.with_callback.snapshots for pair in self.pairs)

    @property
    def verdict(self) -> str:
        """`within` or `over` the budget; `undecided` if the measured overhead is nearer to it than its error."""
        distance = self.percent - self.budget_percent
        if abs(distance) < self.error_percent:
            return "undecided"
        return "within" if distance < 0 else "over"

    @property
    def summary(self) -> str:
        """The verdict and what it rests on, in a line."""
        pairs = f"median of {len(self.pairs)} pairs of {self.steps} steps, {self.snapshots} snapshots"
        if self.verdict == "undecided":
            noise = f"the trainings without the callback differ by {self.noise_percent:.1f} %"
            return f"not decided, {noise} ({pairs}); the callback itself counts {self.own_percent:.2f} %"
        return (
            f"{self.percent:+.2f} ± {self.error_percent:.2f} % of training time, {self.verdict} the budget of "
            f"{self.budget_percent:g} % ({pairs})"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, the raw seconds included."""
        own = ("percent", "error_percent", "cpu_percent", "own_percent", "noise_percent", "snapshots", "verdict")
        values = {name: getattr(self, name) for name in own}
        if not math.isfinite(self.error_percent):
            values["error_percent"] = None  # JSON has no infinity
        return dataclasses.asdict(self) | values


def pair_up(blocks: Sequence[Block]) -> tuple[Pair, ...]:
    """Pairs of neighbours. Which of the two came first alternates, so that a slow drift of the machine cancels out."""
    return tuple(
        Pair(second, first) if first.own_percent is not None else Pair(first, second)
        for first, second in zip(blocks[::2], blocks[1::2], strict=False)
    )


def read_blocks(path: Path) -> list[Block]:
    """The blocks measured so far."""
    if not path.exists():
        return []
    return [Block(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
