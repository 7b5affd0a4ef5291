"""Whether a training has diverged, and where it continues: pure rules, and the record of a rollback at the run's root.

`LossGuard` judges losses alone. `plan_rollback` chooses the snapshot; the record counts rollbacks, stays for good, and
is over as soon as there is a newer snapshot than the newest it knows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from ckpt_engine.observe.number_types import Positive
from ckpt_engine.observe.units import count
from ckpt_engine.store import names
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage

WINDOW = 128
"""Losses that say what is usual."""
LEAST = 16
"""Before there are so many nothing is far above."""
SPREADS = 8.0
LEAST_SPREAD = 0.125
"""Of the median: a loss that hardly varies is no reason to be strict; a spike is at least twice the median."""
PATIENCE = 4
"""Losses in a row that are far above the others, until it is no bad batch any more."""


class On(StrEnum):
    """What counts as divergence."""

    NAN = "nan"
    """A loss that is not finite."""
    LOSS_SPIKE = "loss_spike"
    """That, or losses far above the usual ones."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Training has diverged.

    Args:
        step: of the loss that has shown it.
        first_step: of the first loss in question.
        loss: of `step`.
        usual: the median before it.
        rank: of several, which has seen it.
    """

    step: int
    first_step: int
    loss: float
    usual: float | None
    rank: int | None = None

    def text(self) -> str:
        """For people."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        if not math.isfinite(self.loss):
            return f"the loss of step {self.step} is {self.loss}{where}"
        since = f"since step {self.first_step}, and {self.loss:.4g} at step {self.step}"
        return f"the loss{where} is far above its usual {self.usual:.4g} {since}"


def earliest(found: Iterable[Divergence | None]) -> Divergence | None:
    """What several ranks have seen, as one: that with the earliest first loss; None: none has seen anything."""
    seen = [one for one in found if one is not None]
    return min(seen, key=lambda one: (one.first_step, one.step, one.rank or 0), default=None)


def limit_of(usual: Sequence[float]) -> float:
    """The loss above which one is far above `usual`: median plus eight robust standard deviations (1.4826 x MAD).

    Infinite while there are too few. The median absolute deviation does not grow with the outliers themselves, which
    a standard deviation does (Rousseeuw and Croux, 1993).
    """
    if len(usual) < LEAST:
        return math.inf
    median = statistics.median(usual)
    spread = 1.4826 * statistics.median(abs(loss - median) for loss in usual)
    return median + SPREADS * max(spread, LEAST_SPREAD * abs(median))


@dataclass(eq=False)
class LossGuard:
    """Judges losses one after the other. Losses that are far above do not become usual.

    Args:
        on: what counts.
    """

    _on: On
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)
    _first: int = field(default=0, init=False)
    _in_a_row: int = field(default=0, init=False)

    @property
    def suspicious(self) -> bool:
        """The last loss was far above: a state after it must not replace one from before."""
        return self._in_a_row > 0

    def judge(self, step: int, loss: float) -> Divergence | None:
        """Take in the loss of `step`; the divergence, if it is one."""
        finite = math.isfinite(loss)
        if finite and (self._on is On.NAN or loss <= limit_of(self._usual)):
            self._usual.append(loss)
            self._in_a_row = 0
            return None
        self._first = step if self._in_a_row == 0 else self._first
        self._in_a_row += 1
        if finite and self._in_a_row < PATIENCE:
            return None
        return Divergence(step, self._first, loss, statistics.median(self._usual) if self._usual else None)


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """A run goes back.

    Args:
        snapshot, step: where it goes on.
        newest: id of the newest snapshot when that was decided.
        diverged_step: of the first loss in question.
        skip_batches: that each rank leaves out from there on; whole optimizer steps.
        count: how many rollbacks the run has had, this one included.
        why: what the loss was, for people.
        ranks: with samples of their own, that were there when it was decided.
    """

    snapshot: str
    step: int
    newest: str
    diverged_step: int
    skip_batches: int
    count: int
    why: str
    ranks: Positive = 1

    def batches_of(self, ranks: int) -> int:
        """Batches that each of `ranks` ranks leaves out: together as many as `skip_batches` of each were, or more.

        All ranks together go through an epoch in one order, whatever their number is. So these are the same samples.
        """
        return -(-self.skip_batches * self.ranks // ranks)

    def on(self, ranks: int, in_whole_steps: Callable[[int], int]) -> RollbackRecord:
        """As a start with so many ranks does it; see `batches_of`.

        Args:
            in_whole_steps: so many batches, or a few more, that no optimizer step is cut in two.
        """
        return replace(self, skip_batches=in_whole_steps(self.batches_of(ranks)), ranks=ranks)

    def text(self) -> str:
        """For the resume report."""
        verb = "is" if self.skip_batches == 1 else "are"
        return f"rollback {self.count}: {self.why}; {self.skipped()} {verb} skipped"

    def skipped(self) -> str:
        """What is left out, for people."""
        return count(self.skip_batches, "batch") + (f" of each of {self.ranks} ranks" if self.ranks > 1 else "")


def plan_rollback(
    snapshots: Sequence[tuple[str, int]],
    found: Divergence,
    before: RollbackRecord | None,
    *,
    skip_batches: int,
    at_most: int,
    ranks: int = 1,
) -> RollbackRecord | str:
    """Go back to the newest snapshot; to an older one than last time if that did not get beyond the last divergence.

    Args:
        snapshots: id and step of those that are durable, oldest first; none was taken after the divergence began.
        before: the last rollback.
        ranks: see `RollbackRecord`.

    Returns:
        The rollback, or why there is none.
    """
    count = 1 if before is None else before.count + 1
    if count > at_most:
        return f"it was rolled back {at_most} times already, as often as rollback.at_most allows"
    below = before.step if before is not None and found.first_step <= before.diverged_step else None
    fitting = [one for one in snapshots if one[1] < found.first_step and (below is None or one[1] < below)]
    if not fitting:
        older = "" if below is None else f"; the rollback to step {below} did not get beyond step {found.first_step}"
        return f"there is no snapshot to go back to{older}"
    snapshot, step = fitting[-1]
    return RollbackRecord(snapshot, step, snapshots[-1][0], found.first_step, skip_batches, count, found.text(), ranks)


def write_rollback(storage: Storage, rollback: RollbackRecord) -> None:
    """Remember it at the run's root.

    Raises:
        StorageError
    """
    storage.put(names.ROLLBACK, [memoryview(seal(asdict(rollback)) + b"\n")], exclusive=False)


def read_rollback(storage: Storage) -> RollbackRecord | None:
    """The last one of the run, over or not.

    Raises:
        CorruptError: what is there is none.
        StorageError
    """
    return stored(storage, names.ROLLBACK, parse_rollback)


def parse_rollback(text: bytes, where: str) -> RollbackRecord:
    """The rollback that a file with this text has.

    Raises:
        CorruptError: it has none.
    """
    return parsed(text, where, RollbackRecord, "remove it to go on at the newest snapshot")
