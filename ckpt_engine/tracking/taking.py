"""Asks the engine for a snapshot of a loop, and tells the cadence what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ckpt_engine.errors import LeaseHeldError, StorageError, UnstorableLeafError, WriterError
from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.snapshot.handle import SaveHandle
from ckpt_engine.tracking.engine import Engine


class Taker:
    """Takes the snapshots of one loop. Training thread only.

    Args:
        engine: takes them.
        cadence: is told of each.
        log: of the adapter.
    """

    def __init__(self, engine: Engine, cadence: Cadence, log: logging.Logger) -> None:
        self._engine = engine
        self._cadence = cadence
        self._log = log
        self._took = False

    def take(self, state: Callable[[], Any], *, step: int, durable: bool, **options: Any) -> SaveHandle | None:
        """A snapshot of `step`; None: there is none, and that was said.

        Args:
            state: makes the state; its time counts as part of the stall.
            step: of the run.
            durable: False: into memory only.
            options: more of `Checkpointer.save`.

        Raises:
            LeaseHeldError: another process writes this run.
            StorageError, WriterError: with `on_error: raise`, as `Checkpointer.save`.
            UnstorableLeafError: the same, and if it is the first one: then it is for the user to mend now.
        """
        began = time.perf_counter()
        try:
            handle = self._engine.save(state(), step=step, durable=durable, **options)
        except (StorageError, WriterError, UnstorableLeafError) as err:
            wrong = isinstance(err, UnstorableLeafError) and not self._took
            if wrong or isinstance(err, LeaseHeldError) or self._engine.config.on_error == "raise":
                raise
            self._log.error("no snapshot of step %d: %s", step, err)
            self._cadence.skipped(step, "error")
            return None
        stall = time.perf_counter() - began
        if handle.skipped is not None:
            if durable:
                self._cadence.skipped(step, "busy")
            return None
        self._took = True
        if durable:
            self._cadence.taken(step, stall)
        else:
            self._cadence.held(step, stall)
        return handle
