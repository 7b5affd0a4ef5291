"""The values that say how exactly a loader's position is recorded or was put back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Difference", "Effect", "Exactness", "Level", "OnChange", "Restoration"]


class Level(StrEnum):
    """How much of the uninterrupted run's data stream a resumed run repeats."""

    EXACT = "exact"
    """The same samples in the same order with the same augmentation, bit for bit."""
    ORDER_ONLY = "order only"
    """The same samples in the same order; what was drawn at random per sample may differ."""
    NOT_RESTORED = "not restored"
    """Not even the order of samples is promised."""


_RANK = {Level.EXACT: 0, Level.ORDER_ONLY: 1, Level.NOT_RESTORED: 2}


@dataclass(frozen=True, slots=True)
class Exactness:
    """A level and why it is not higher; `reasons` is empty if and only if the level is exact."""

    level: Level = Level.EXACT
    reasons: tuple[str, ...] = ()

    def lowered(self, level: Level, reason: str) -> Exactness:
        """This with one more reason; the level never rises."""
        return Exactness(max(self.level, level, key=_RANK.__getitem__), (*self.reasons, reason))

    def also(self, other: Exactness) -> Exactness:
        """The lower level of the two with the reasons of both, none twice."""
        reasons = self.reasons + tuple(r for r in other.reasons if r not in self.reasons)
        return Exactness(max(self.level, other.level, key=_RANK.__getitem__), reasons)


class Effect(StrEnum):
    """What a difference between the saved and the current loader does to a resume."""

    HARMLESS = "harmless"
    AUGMENTATION = "order exact, augmentation not"
    REFUSED = "refused"
    OTHER_SAMPLES = "other samples"


class OnChange(StrEnum):
    """What becomes of an epoch that is resumed in its middle with a changed loader: the option `data`."""

    REFUSE = "refuse"
    RESTART_EPOCH = "restart_epoch"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of the fingerprint that changed since the snapshot; values are shown, never compared again."""

    field: str
    saved: object
    current: object
    effect: Effect

    def __str__(self) -> str:
        return f"{self.change} ({self.effect})"

    @property
    def change(self) -> str:
        """What was, and what is."""
        if self.effect is Effect.OTHER_SAMPLES:
            return f"{self.field} has other values"
        return f"{self.field} was {self.saved!r}, now {self.current!r}"


@dataclass(frozen=True, slots=True)
class Restoration:
    """What loading a state achieved, for the resume report.

    `exactness` is final once the first batch was fetched: the replayed sample order is verified on the way there.
    """

    exactness: Exactness
    differences: tuple[Difference, ...]
    mode: str
    phase: str
    batches: int
    """Batches of the epoch that were trained before the snapshot and are not delivered again."""
    restarted: bool = False
    """The epoch starts again at its first batch, because the loader has changed."""
    again: str = ""
    """Where the data set's own state is of no use: a sentence that says what is done instead, and why."""
