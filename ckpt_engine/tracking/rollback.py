"""Ends a run that has diverged such that the next start goes back, and tells that start where to."""

from __future__ import annotations

import logging
import threading
import time

from ckpt_engine.errors import CkptError, DivergedError, RollbackRequestedError
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.preempt.rollback import Rollback, is_pending, plan_rollback, read_rollback, write_rollback
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.tracking.engine import Engine

DURABLE_SECONDS = 60.0
_LOOK_SECONDS = 0.05


class Rollbacks:
    """Those of one run. Training thread only.

    Args:
        engine: of the run, whose options have `rollback`.
        log: of the adapter.

    Raises:
        StorageError: a place that no storage serves.
    """

    def __init__(self, engine: Engine, log: logging.Logger) -> None:
        assert engine.config.rollback is not None
        self._engine = engine
        self._options = engine.config.rollback
        nearest = engine.config.tiers[0]
        self._storage = open_storage(nearest.url, nearest.for_storage())
        self._log = log

    def pending(self, newest: str) -> Rollback | None:
        """The rollback that a start has to do whose newest snapshot is `newest`.

        Raises:
            CorruptError, StorageError: nobody can tell.
        """
        found = read_rollback(self._storage)
        return found if is_pending(found, newest) else None

    def error(self, found: Divergence, watch: PreemptionWatch) -> DivergedError:
        """What ends training: a `RollbackRequestedError` if the next start goes back, else a `DivergedError`."""
        try:
            made = self._decide(found, watch)
        except CkptError as err:
            made = f"a rollback failed: {err}"
        if isinstance(made, str):
            hint = f"{watch.durable()}; change the learning rate, the clipping or the data before going on there"
            return DivergedError(f"{found.text()}; {made}", hint=hint)
        return RollbackRequestedError(
            f"{found.text()}; rollback {made.count} of {self._options.at_most}",
            hint=f"start it again, or call fit again, with ckpt_path='auto': it goes on at step {made.step} and skips "
            f"{made.skip_batches} batches",
        )

    def _decide(self, found: Divergence, watch: PreemptionWatch) -> Rollback | str:
        # What was taken before the divergence counts, also if it is still on its way or only in memory.
        deadline = time.monotonic() + DURABLE_SECONDS
        self._engine.wait(DURABLE_SECONDS)
        if self._engine.memory:
            watch.flush()
        pause = threading.Event()
        while watch.flushing and time.monotonic() < deadline:
            pause.wait(_LOOK_SECONDS)
            self._engine.poll()
        snapshots = [(info.id, info.step) for info in self._engine.snapshots()]
        made = plan_rollback(
            snapshots,
            found,
            read_rollback(self._storage),
            skip_batches=self._options.skip_batches,
            at_most=self._options.at_most,
        )
        if isinstance(made, Rollback):
            write_rollback(self._storage, made)
            self._log.warning("%s; the next start goes back to step %d", made.text(), made.step)
        return made
