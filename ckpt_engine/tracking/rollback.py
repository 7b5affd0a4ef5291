"""Ends a run that has diverged such that the next start goes back, and tells that start where to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_engine.errors import CkptError, CorruptError, DivergedError, RollbackRequestedError
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.preempt.rollback import (
    Rollback,
    is_pending,
    of_json,
    plan_rollback,
    read_rollback,
    to_json,
    write_rollback,
)
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.verdict import Patience, Verdicts

DURABLE_SECONDS = 60.0
_PLACES_SECONDS = DURABLE_SECONDS + 15.0
"""How long rank 0 waits for what other nodes have on disks of their own."""
_LOOK_SECONDS = 0.05


class Rollbacks:
    """Those of one run. Training thread only.

    Args:
        engine: of the run, whose options have `rollback`.
        log: of the adapter.
        replicas: ranks that have samples of their own.
        in_whole_steps: so many batches, or a few more, that no optimizer step is cut in two.

    Raises:
        StorageError: a place that no storage serves.
    """

    def __init__(
        self,
        engine: Engine,
        log: logging.Logger,
        replicas: int = 1,
        in_whole_steps: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        assert engine.config.rollback is not None
        self._engine = engine
        self._options = engine.config.rollback
        self.replicas = replicas
        self._in_whole_steps = in_whole_steps
        nearest = engine.config.tiers[0]
        self._storage = open_storage(nearest.url, nearest.for_storage())
        self._may_differ = engine.ranks is not None and nearest.is_folder
        """Other ranks may have another folder there."""
        self._log = log

    # ---- at a start

    def pending(self, newest: str) -> Rollback | None:
        """The rollback that a start has to do whose newest snapshot is `newest`; the same on all ranks.

        Rank 0 reads it for all. Where nodes have disks of their own each has it, and rank 0 may be on another one now.

        Raises:
            CorruptError, StorageError: nobody can tell.
        """

        def read() -> dict[str, Any] | None:
            found = self._read()
            return None if found is None else to_json(found)

        def known(rows: list[dict[str, Any] | None]) -> dict[str, Any] | None:
            return _last([row for row in rows if row is not None and row["newest"] == newest]) or _last(rows)

        row = self._engine.meet(read, known) if self._may_differ else self._engine.agree(read)
        found = None if row is None else of_json(row)
        return found if is_pending(found, newest) else None

    # ---- at the end

    def error(
        self, found: Divergence, watch: PreemptionWatch, patience: Patience, verdicts: Verdicts | None = None
    ) -> tuple[DivergedError, dict[str, Any] | None]:
        """What ends training: a `RollbackRequestedError` if the next start goes back, else a `DivergedError`.

        Args:
            patience: of a run that somebody may want to end at once.
            verdicts: of rank 0, where there are several.

        Returns:
            The error, and what other nodes have to `remember`, if they have disks of their own.
        """
        try:
            made, elsewhere = self._decide(found, watch, patience, verdicts)
        except CkptError as err:
            made, elsewhere = f"a rollback failed: {err}", None
        if isinstance(made, str):
            hint = f"{watch.durable()}; change the learning rate, the clipping or the data before going on there"
            return DivergedError(f"{found.text()}; {made}", hint=hint), None
        error = RollbackRequestedError(
            f"{found.text()}; rollback {made.count} of {self._options.at_most}",
            hint=f"start it again, or call fit again, with ckpt_path='auto': it goes on at step {made.step} and skips "
            f"{made.skipped()}",
        )
        return error, elsewhere

    def holds(self, watch: PreemptionWatch, patience: Patience) -> dict[str, Any]:
        """What this rank's node has on its own disk, for rank 0."""
        self._settle(watch, patience)
        try:
            found = self._read()
            rows = [_row(info) for info in self._engine.snapshots()]
        except CkptError as err:
            self._log.error("what is on the disk of this node cannot be told: %s", err)
            return {"snapshots": [], "before": None}
        return {"snapshots": rows, "before": None if found is None else to_json(found)}

    def remember(self, row: dict[str, Any]) -> None:
        """Rank 0, on another node, has decided that."""
        try:
            write_rollback(self._storage, of_json(row))
        except CkptError as err:
            self._log.warning("the rollback is not remembered on this node, but on that of rank 0: %s", err)

    def _decide(
        self, found: Divergence, watch: PreemptionWatch, patience: Patience, verdicts: Verdicts | None
    ) -> tuple[Rollback | str, dict[str, Any] | None]:
        self._settle(watch, patience)
        before, infos = self._read(), self._engine.snapshots()
        snapshots = [(info.id, info.step) for info in infos]
        divided = verdicts is not None and self._engine.divided
        if divided:
            assert verdicts is not None
            said = verdicts.ask(_PLACES_SECONDS)
            snapshots = whole(map(_row, infos), *(one["snapshots"] for one in said))
            rows = [None if before is None else to_json(before), *(one["before"] for one in said)]
            before = None if (last := _last(rows)) is None else of_json(last)
        made = plan_rollback(
            snapshots,
            found,
            before,
            skip_batches=self._in_whole_steps(self._options.skip_batches),
            at_most=self._options.at_most,
            ranks=self.replicas,
        )
        if isinstance(made, str):
            return made, None
        write_rollback(self._storage, made)
        self._log.warning("%s; the next start goes back to step %d", made.text(), made.step)
        return made, to_json(made) if divided else None

    def _read(self) -> Rollback | None:
        try:
            return read_rollback(self._storage)
        except CorruptError as err:
            if not self._engine.divided or self._engine.ranks is None:
                raise
            node = self._engine.ranks.node
            hint = f"remove it there, on {node}: others may have it; or on all nodes, to go on at the newest snapshot"
            raise CorruptError(err.message, hint=hint) from err

    def _settle(self, watch: PreemptionWatch, patience: Patience) -> None:
        """What was taken before the divergence counts, also if it is still on its way or only in memory."""
        deadline = time.monotonic() + DURABLE_SECONDS
        self._engine.wait(max(0.0, patience(DURABLE_SECONDS)))
        if self._engine.memory:
            watch.flush()
        pause = threading.Event()
        while watch.flushing and patience(deadline - time.monotonic()) > 0.0:
            pause.wait(_LOOK_SECONDS)
            self._engine.poll()


def whole(*places: Iterable[list[Any]]) -> list[tuple[str, int]]:
    """Id and step of what some place has whole, or all of them together; oldest first.

    Args:
        places: rows of `holds`: id, step, and of a part the ranks whose shares it has, and how many there are.
    """
    held: dict[tuple[str, int], set[int]] = {}
    found = set()
    for name, step, part in (row for rows in places for row in rows):
        ranks = held.setdefault((name, step), set())
        if part is not None:
            ranks |= {*part[0]}
        if part is None or len(ranks) == part[1]:
            found.add((name, step))
    return sorted(found)


def _row(info: SnapshotInfo) -> list[Any]:
    part = info.partial
    return [info.id, info.step, None if part is None else [[*part.ranks], part.size]]


def _last(rows: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Of what several nodes remember; one that was away may know less."""
    return max((row for row in rows if row is not None), key=lambda row: int(row["count"]), default=None)
