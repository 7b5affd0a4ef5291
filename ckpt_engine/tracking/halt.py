"""Ends a run that must stop: at a boundary, with the best snapshot that becomes durable in time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.units import duration
from ckpt_engine.preempt.notice import Stop
from ckpt_engine.preempt.plan import Choice, StopPlan
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.snapshot.handle import SaveHandle
from ckpt_engine.tracking.engine import Engine

Take = Callable[[str], SaveHandle | None]
"""Takes a snapshot with that reason; None: it could not be taken, and that was said."""

_LOOK_SECONDS = 0.05
_FOR_THE_EXIT = 0.1
"""Share of the time left that is not waited for further tiers: the process must end too."""


class Halt:
    """Stops training at a boundary. Training thread only.

    Args:
        watch: who knows of the stop.
        engine: of the run.
        ends_with: makes of an exit code the exception that ends the run.
        log: of the adapter.
    """

    def __init__(
        self, watch: PreemptionWatch, engine: Engine, ends_with: Callable[[int], BaseException], log: logging.Logger
    ) -> None:
        self._watch = watch
        self._engine = engine
        self._ends_with = ends_with
        self._log = log
        self.done = False

    def now(self, stop: Stop, take: Take) -> BaseException:
        """Do what fits, wait for it as long as there is time, say what came of it.

        Returns:
            What ends the run; see `exit_of`.

        Raises:
            KeyboardInterrupt: another Ctrl-C.
        """
        self._watch.attend()
        plan = self._watch.plan(stop)
        self._log.warning("%s: %s", stop.notice.who, plan.why)
        try:
            self._make_durable(plan, stop, take)
        except CkptError as err:
            self._log.error("%s: %s", stop.notice.who, err)
        else:
            self._tell(stop)
        self.done = True
        return self.exit_of(stop)

    def over(self, stop: Stop) -> BaseException:
        """All that could be done about the stop was done by others; what ends the run."""
        self._watch.attend()
        self._log.warning("%s", stop.notice.who)
        self._tell(stop)
        self.done = True
        return self.exit_of(stop)

    def exit_of(self, stop: Stop) -> BaseException:
        """What ends a run that has stopped: `KeyboardInterrupt` after a Ctrl-C, else what carries the exit code."""
        return KeyboardInterrupt() if stop.notice.interrupts else self._ends_with(stop.notice.exit_code)

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for: `at_most`, and not beyond the deadline of a stop."""
        stop = self._watch.stop
        return at_most if stop is None else max(0.0, min(at_most, (1.0 - _FOR_THE_EXIT) * _left(stop)))

    def seconds_after(self, exception: BaseException, usual: float) -> float:
        """How long an exception may wait for what is in flight: not at all after a second Ctrl-C."""
        if self._watch.stop is None:
            return usual
        at_once = isinstance(exception, KeyboardInterrupt) and not self.done
        return 0.0 if at_once else self.seconds_left(math.inf)

    def _make_durable(self, plan: StopPlan, stop: Stop, take: Take) -> None:
        if plan.choice is not Choice.SNAPSHOT:
            if plan.choice is Choice.FLUSH:
                self._watch.flush()
            self._engine.wait(_left(stop))
            self._wait_for_the_flushed(stop)
            return
        if not self._engine.ready():
            self._engine.wait(_left(stop))  # a slot is free when what is in flight is durable
        handle = take("signal")
        if handle is not None:
            handle.wait(_left(stop))

    def _wait_for_the_flushed(self, stop: Stop) -> None:
        """What the writer had only in memory is nothing that the engine waits for."""
        pause = threading.Event()
        while self._watch.flushing and _left(stop) > 0.0:
            pause.wait(min(_LOOK_SECONDS, _left(stop)))
            self._engine.poll()

    def _tell(self, stop: Stop) -> None:
        self._engine.poll()
        left = _left(stop)
        spare = f"{duration(left)} to spare" if left > 0.0 else "too late"
        self._log.warning("%s: %s (%s)", stop.notice.who, self._watch.durable(), spare)


def _left(stop: Stop) -> float:
    return max(0.0, stop.deadline - time.monotonic())
