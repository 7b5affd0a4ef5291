"""Who wants something of a tracked run: stops it in time, hands on requests and edited options, shows how it stands."""

from __future__ import annotations

import atexit
import logging
import sys

from ckpt_engine.config import Config
from ckpt_engine.data.torch_private import is_dead_worker
from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.fanout import FanOutSink
from ckpt_engine.observe.metrics import RunMetrics
from ckpt_engine.preempt.board import Board
from ckpt_engine.preempt.notice import Stop
from ckpt_engine.preempt.plan import Choice
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.tracking.edits import Edits
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.halt import Halt, Take
from ckpt_engine.tracking.shared import SharedCadence

END_WAIT_SECONDS = 600.0
"""How long the end of a run waits for what is in flight, where nobody stops it."""


class Stopping:
    """From `start` to `close`, on the training thread. At the end of the interpreter it closes itself.

    Args:
        engine: of the run.
        cadence: where the numbers for the status page come from.
        sinks: gets this run's events.
        log: of the adapter.

    Raises:
        StorageError: a tier that no storage serves.
    """

    def __init__(self, engine: Engine, cadence: Cadence, sinks: FanOutSink, log: logging.Logger) -> None:
        config = engine.config
        self._engine = engine
        self._log = log
        self._shared = cadence if isinstance(cadence, SharedCadence) else None
        metrics = RunMetrics(cadence)
        self._ledger, self._watch = open_watch(config, SystemClock())
        self._board = Board(config.status, self._watch.outlook, metrics.numbers)
        self._edits = Edits(engine.live, cadence, self._watch, log)
        self._halt = Halt(self._watch, engine, SystemExit, log)
        self._asked = False
        if config.guard != "off" or config.rollback is not None:
            log.warning("nobody judges the losses of this loop: guard and rollback are for Lightning only")
        for sink in (metrics, self._ledger, self._watch):
            sinks.add(sink)

    def start(self, step: int) -> None:
        """The run goes on from `step`: signal handlers and threads start. On the main thread, for signals."""
        loaded = self._engine.loaded
        if loaded is not None:
            self._ledger.resumed(loaded.info.step, loaded.place)
        self._watch.boundary(step)
        self._watch.start()
        self._board.start()
        self._edits.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Put signal handlers back, end all threads. Idempotent."""
        atexit.unregister(self.close)
        self._watch.close()
        self._board.close()
        self._edits.close()

    def boundary(self, step: int) -> Stop | None:
        """Step `step` is complete; the stop, if there is one."""
        self._watch.boundary(step)
        self._asked |= self._watch.take_save() is not None
        if self._shared is None:
            return self._watch.stop
        own = self._watch.stop
        fits = own is not None and self._watch.plan(own).choice is Choice.SNAPSHOT
        return self._shared.stop(step, own, asked=self._asked, fits=fits)

    def edited(self, config: Config) -> Config:
        """The options from now on, see `Edits.apply`."""
        return self._edits.apply(config)

    @property
    def asked(self) -> bool:
        """Somebody has asked for a snapshot, and none was taken since; of several ranks rank 0 sees to that."""
        return self._asked and self._shared is None

    def taken(self) -> None:
        """A durable snapshot was taken."""
        self._asked = False

    def end(self, stop: Stop, take: Take) -> BaseException:
        """Do what fits into the grace; what ends the run: `SystemExit`, or `KeyboardInterrupt` after a Ctrl-C.

        Raises:
            KeyboardInterrupt: another Ctrl-C.
        """
        try:
            if self._shared is not None:
                return self._halt.over(self._shared.halt(take))
            return self._halt.now(stop, take)
        finally:
            self.close()

    def no_batch(self, error: Exception, take: Take) -> None:
        """A loader has failed.

        Raises:
            SystemExit, KeyboardInterrupt: a stop has ended its workers too, and takes effect now; as `end`.
        """
        stop = self._watch.stop
        if stop is None or self._halt.done or self._shared is not None or not is_dead_worker(error):
            return  # of several ranks one cannot stop here by itself
        self._log.warning("%s: no batch came: %s", stop.notice.who, error)
        raise self.end(stop, take) from error

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for: `at_most`, and not beyond the deadline of a stop."""
        return self._halt.seconds_left(at_most)

    def over(self) -> None:
        """Training is over, and this is closed.

        Raises:
            SystemExit, KeyboardInterrupt: a stop came too late for a boundary, and no exception is on its way already;
                what is in flight was waited for within the grace.
        """
        stop = self._watch.stop
        if stop is None or self._halt.done or sys.exc_info()[0] is not None:
            return
        self._log.warning("%s: it came when training was over", stop.notice.who)
        self._engine.wait(self.seconds_left(END_WAIT_SECONDS))
        raise self._halt.exit_of(stop)
