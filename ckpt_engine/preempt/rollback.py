"""Where a run that has diverged goes on: a pure choice, and the object in the run's root that remembers it.

The object is never removed: it counts, and it is over as soon as there is a newer snapshot than the newest it knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.errors import CorruptError, FormatError, StorageMissingError
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.store import layout
from ckpt_engine.store.sealed import seal, unseal
from ckpt_engine.store.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Rollback:
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
    ranks: int = 1

    def batches_of(self, ranks: int) -> int:
        """Batches that each of `ranks` ranks leaves out: together as many as `skip_batches` of each were, or more.

        All ranks together go through an epoch in one order, whatever their number is. So these are the same samples.
        """
        return -(-self.skip_batches * self.ranks // ranks)

    def on(self, ranks: int, in_whole_steps: Callable[[int], int]) -> Rollback:
        """As a start with so many ranks does it; see `batches_of`.

        Args:
            in_whole_steps: so many batches, or a few more, that no optimizer step is cut in two.
        """
        return replace(self, skip_batches=in_whole_steps(self.batches_of(ranks)), ranks=ranks)

    def text(self) -> str:
        """For the resume report."""
        return f"rollback {self.count}: {self.why}; {self.skipped()} are skipped"

    def skipped(self) -> str:
        """What is left out, for people."""
        return f"{self.skip_batches} batches" + (f" of each of {self.ranks} ranks" if self.ranks > 1 else "")


def plan_rollback(
    snapshots: Sequence[tuple[str, int]],
    found: Divergence,
    before: Rollback | None,
    *,
    skip_batches: int,
    at_most: int,
    ranks: int = 1,
) -> Rollback | str:
    """Go back to the newest snapshot; to an older one than last time if that did not get beyond the last divergence.

    Args:
        snapshots: id and step of those that are durable, oldest first; none was taken after the divergence began.
        before: the last rollback.
        ranks: see `Rollback`.

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
    return Rollback(snapshot, step, snapshots[-1][0], found.first_step, skip_batches, count, found.text(), ranks)


def is_pending(rollback: Rollback | None, newest: str) -> bool:
    """Whether a start whose newest snapshot is `newest` has to go back: nothing was saved since that was decided."""
    return rollback is not None and rollback.newest == newest


def write_rollback(storage: Storage, rollback: Rollback) -> None:
    """Remember it at the run's root.

    Raises:
        StorageError
    """
    text = seal(to_json(rollback)) + b"\n"
    storage.put(layout.ROLLBACK, [memoryview(text)], exclusive=False)


def read_rollback(storage: Storage) -> Rollback | None:
    """The last one of the run, over or not.

    Raises:
        CorruptError: what is there is none.
        StorageError
    """
    try:
        text = storage.get(layout.ROLLBACK)
    except StorageMissingError:
        return None
    return parse_rollback(text, f"{storage.url}/{layout.ROLLBACK}")


def parse_rollback(text: bytes, where: str) -> Rollback:
    """The rollback that a file with this text has.

    Raises:
        CorruptError: it has none.
    """
    hint = "remove it to go on at the newest snapshot"
    try:
        return of_json(unseal(text, where))
    except FormatError as err:
        raise CorruptError(err.message, hint=hint) from err
    except (LookupError, TypeError, ValueError, OverflowError) as err:  # the last is that of an infinite number
        raise CorruptError(f"{where} is damaged: {err}", hint=hint) from err


def to_json(rollback: Rollback) -> dict[str, Any]:
    """The inverse of `of_json`."""
    return dataclasses.asdict(rollback)


def of_json(row: dict[str, Any]) -> Rollback:
    """What a JSON object says.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: it is none.
    """
    return Rollback(
        str(row["snapshot"]),
        int(row["step"]),
        str(row["newest"]),
        int(row["diverged_step"]),
        int(row["skip_batches"]),
        int(row["count"]),
        str(row["why"]),
        max(1, int(row.get("ranks", 1))),
    )
