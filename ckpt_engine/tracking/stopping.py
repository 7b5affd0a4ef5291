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
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.tracking.edits import Edits
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.halt import Halt
from ckpt_engine.tracking.together import Take

END_WAIT_SECONDS = 600.0
"""How long the end of a run waits for what is in flight, where nobody stops it."""

EXCEPTION_WAIT_SECONDS = 30.0
"""How long an exception waits for what is in flight."""


def uncaught() -> BaseException | None:
    """The exception that is being handled, or that has ended the script or the notebook's cell."""
    return sys.exception() or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


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
        metrics = RunMetrics(cadence)
        self._ledger, self._watch = open_watch(config, SystemClock(), engine.ranks)
        self._board = Board(config.status, self._watch.outlook, metrics.numbers)
        self._edits = Edits(engine.live, cadence, self._watch, log)
        self._halt = Halt(self._watch, engine, SystemExit, log, cadence)
        self._shared = self._halt.shared
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
        return self._shared.stop(step, self._watch.stop, asked=self._asked, fits=self._halt.fits)

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
            return self._halt.now(stop, take) if self._shared is None else self._halt.together(stop, take)
        finally:
            self.close()

    def no_batch(self, error: Exception, where: str, take: Take) -> None:
        """A loader has failed.

        Args:
            where: see `Together.all_stuck`.

        Raises:
            SystemExit, KeyboardInterrupt: a stop has ended its workers too, and takes effect now; as `end`.
        """
        stop = self._watch.stop
        if stop is None or self._halt.done or not is_dead_worker(error):
            return
        if self._shared is not None and not self._shared.stop_stuck(stop, where):
            return
        self._log.warning("%s: no batch came: %s", stop.notice.who, error)
        raise self.end(stop, take) from error

    @property
    def stops(self) -> bool:
        """Whether the run was told to stop: what becomes durable is decided then."""
        return self._halt.stops

    def failed(self, error: BaseException, found: str) -> None:
        """An exception ends the run: wait for what is in flight, and say what is durable.

        Args:
            found: what became of the last step.
        """
        self._engine.wait(self.seconds_left(EXCEPTION_WAIT_SECONDS))
        self._log.warning("%s: %s; %s", type(error).__name__, self._watch.durable(), found)

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
        self._halt.complete = sys.exc_info()[0] is None
        if stop is None or self._halt.done or not self._halt.complete:
            return
        self._log.warning("%s: it came when training was over", stop.notice.who)
        self._engine.wait(self.seconds_left(END_WAIT_SECONDS))
        raise self._halt.exit_of(stop)
