"""Ends a run that must stop: at a boundary, with the best snapshot that becomes durable in time."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckpt_engine.engine import Ending, Engine
from ckpt_engine.errors import CkptError, DivergedError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.loop.rank_decisions import SharedCadence, Take
from ckpt_engine.observe.events import announce
from ckpt_engine.observe.units import count, duration, share
from ckpt_engine.preempt.loop_steps import UNSEEN
from ckpt_engine.preempt.stop_plan import StopChoice
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.preempt.watch import PreemptionWatch

_LEAVE_SECONDS = 60.0
"""How long other ranks wait for rank 0 to have closed a run that has diverged."""
EXCEPTION_WAIT_SECONDS = 30.0
"""How long an exception waits for what is in flight."""
_OTHERS_SECONDS = 5.0
"""Of that the rank whose writer waits for the parts of others: these may only hear of a failure when it is gone."""
_REPORTED_STEPS = 100
_MOST_UNSTOPPED = 4
"""Optimizer steps after which a loop that has shown no boundary yet is stopped at one of them."""
_FOR_THE_EXIT = 0.1
"""Share of the time left that is not waited for further tiers: the process must end too."""


class Halt(Ending):
    """Stops training at a boundary. Training thread only.

    Args:
        watch: who knows of the stop.
        engine: of the run.
        ends_with: makes of an exit code the exception that ends the run.
        log: of the adapter.
        cadence: of the run; it knows of other ranks, if there are any.
    """

    def __init__(
        self,
        watch: PreemptionWatch,
        engine: Engine,
        ends_with: Callable[[int], BaseException],
        log: logging.Logger,
        cadence: Cadence,
    ) -> None:
        self.watch = watch
        self._engine = engine
        self._ends_with = ends_with
        self._log = log
        self._cadence = cadence
        self.shared = cadence if isinstance(cadence, SharedCadence) else None
        """The cadence of several ranks."""
        self.done = False
        self.complete = False
        """Training has come to its end by itself."""
        self.metrics: set[str] | None = None
        """Of the snapshots that were taken; None: none was."""
        self._exit: BaseException | None = None
        self._until: float | None = None
        """Without a stop: so long others wait for rank 0."""
        self._gone_by: float | None = None
        """When this rank, which has failed, waits for nothing any more."""
        engine.ending = self
        if self.shared is not None:
            self.shared.together.verdicts.patience = self.seconds_left
            self.shared.together.verdicts.stop = lambda: self.stop

    def end(self, stop: Stop, take: Take) -> BaseException:
        """Do what fits, or what all ranks have agreed on; wait for it as long as there is time, say what came of it.

        Returns:
            What ends the run; see `exit_of`.

        Raises:
            KeyboardInterrupt: another Ctrl-C.
        """
        if self.shared is None:
            return self._end(stop, lambda: self._make_durable(stop, take))
        return self._end(stop, partial(self._take_last, self.stop or stop, self.shared.last, take))

    def fits(self, stop: Stop) -> bool:
        """Of several ranks the first asks ahead: whether a snapshot after the next step will be durable in time."""
        plan = self.watch.run.plan(stop, ahead=True)
        self._log.warning("%s: %s", stop.notice.who, plan.why)
        return plan.choice is StopChoice.SNAPSHOT

    def unsaved(self, stop: Stop) -> BaseException:
        """End at an optimizer step of a loop that reaches no boundary; as `end`, without a snapshot of this step."""

        def work() -> None:
            self._log.warning(
                "%s: training stops without a snapshot of this step: its loop reaches no boundary; "
                "iterate the tracked loader, or call step() at the end of the loop's body",
                stop.notice.who,
            )
            self._engine.wait(_left(stop))

        return self._end(stop, work)

    def _end(self, stop: Stop, work: Callable[[], object]) -> BaseException:
        self.watch.attend()
        try:
            work()
        except CkptError as err:
            self._log.error("%s: %s", stop.notice.who, err)
        else:
            self._tell(stop)
        self.done = True
        return self.exit_of(stop)

    def diverged(self) -> None:
        """All ranks end now with an error that they agree on."""
        self.done = True
        self._until = time.monotonic() + _LEAVE_SECONDS

    def fail(self) -> None:
        """An exception ends this rank. Others may be in a collective until it is gone: it does not wait long for them.

        What its writer lacks then comes later: it goes on by itself.
        """
        if self.shared is not None and self._gone_by is None:
            gathers = self.shared.together.verdicts.leads or self._engine.divided
            self._gone_by = time.monotonic() + (_OTHERS_SECONDS if gathers else EXCEPTION_WAIT_SECONDS)

    @property
    def tells(self) -> bool:
        """See `Ending.tells`: a rank that has failed has said what is durable, also where its launcher signals it."""
        return self._gone_by is None

    def stop_too(self, stop: Stop) -> None:
        """All ranks end for a divergence, and have agreed that they are stopped as well."""
        assert self.shared is not None
        own = self.watch.stop
        deadline = stop.deadline if own is None else min(stop.deadline, own.deadline)
        self.shared.halting = self.shared.halting or replace(stop, deadline=deadline)

    def end_of(self, error: BaseException) -> BaseException:
        """What ends a run that an error ends: of a diverged one that is to stop as well, what ends that.

        `fit` may be called again after a rollback, and the notice would be lost.
        """
        stop = self.stop
        if stop is None or not isinstance(error, DivergedError):
            return error
        self.watch.attend()
        self._log.error("%s: %s", stop.notice.who, error)
        self.done = True
        end = self.exit_of(stop)
        end.__cause__ = error
        return end

    def exit_of(self, stop: Stop) -> BaseException:
        """What ends a run that has stopped: `KeyboardInterrupt` after a Ctrl-C, else what carries the exit code."""
        is_lost = self._engine.newest.loss is not None and self._engine.config.on_error != "warn"
        code = stop.notice.exit_code or int(is_lost)
        self._exit = KeyboardInterrupt() if stop.notice.interrupts else self._ends_with(code)
        return self._exit

    @property
    def stopped_by(self) -> str | None:
        """Who has asked this rank, or all of them, to stop."""
        return None if self.stop is None else self.stop.notice.who

    def hurries(self, copies: bool) -> bool:
        """A Ctrl-C came that ends a wait for copies, or the time of a stop is over."""
        stop = self.stop
        return stop is not None and ((copies and stop.notice.interrupts) or self.seconds_left(math.inf) <= 0.0)

    @property
    def stop(self) -> Stop | None:
        """The stop that all ranks have agreed on, or what this one knows."""
        agreed = self.shared.halting if self.shared is not None else None
        return self.watch.stop if agreed is None else agreed

    def ended(self) -> None:
        """Everything is durable: one line says what the run has, unless what has ended it says so."""
        if self.complete and self.stop is None and (self.shared is None or self.shared.together.verdicts.leads):
            fraction, at_most = self._cadence.overhead_fraction, self._engine.config.overhead
            budget = "" if self._cadence.adaptive.decision is None else f" of {share(at_most)}"
            if not budget and self._cadence.interval_steps is not None and fraction > at_most:
                budget = " (every_n_steps is set: no budget applies)"
            overhead = f"overhead {share(fraction)}{budget}"
            if (decision := self._cadence.adaptive.decision) is not None and decision.costs.hook_share > at_most / 10.0:
                overhead += f", {share(decision.costs.hook_share)} in hooks of each step"
            loaded = self._engine.loaded
            resumed = None if loaded is None else (loaded.info.step, loaded.place)
            announce(self._log, self.watch.run.summary(overhead, resumed, self._cadence.overtaken))
            best = self._engine.config.root_keep.best
            if best is not None and self.metrics is not None and best.monitor not in self.metrics:
                have = ", ".join(sorted(self.metrics)[:5]) or "none"
                self._log.warning(
                    "keep.best ranks by %r, which no snapshot of this process has; they have %s", best.monitor, have
                )

    def leave(self) -> None:
        """See `Together.leave`. One that has failed does not wait, nor does one after a second Ctrl-C."""
        if self.shared is not None:
            waits = (self.done or self.complete) and not self._is_interrupted()
            self.shared.together.leave(self._leave_seconds if waits else 0.0)

    @property
    def _leave_seconds(self) -> float:
        """How long other ranks wait for rank 0, and it for them. In a run that ends by itself only it waits."""
        if self._until is not None:
            return self.seconds_left(self._until - time.monotonic())
        if (stop := self.stop) is not None:
            return stop.deadline - time.monotonic()
        return math.inf if self.shared is not None and self.shared.together.verdicts.leads else 0.0

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for: `at_most`, and not beyond a stop's deadline, or a second Ctrl-C.

        One of several ranks that has failed waits a few seconds in all, see `fail`.
        """
        if self.watch.signals.interrupted:
            return 0.0
        if self._gone_by is not None:
            at_most = max(0.0, min(at_most, self._gone_by - time.monotonic()))
        stop = self.stop
        return at_most if stop is None else max(0.0, min(at_most, (1.0 - _FOR_THE_EXIT) * _left(stop)))

    @property
    def over(self) -> bool:
        """What becomes durable is decided: the run has been stopped, or a second Ctrl-C wants it to end now."""
        return self.done or self.watch.signals.interrupted

    def seconds_after(self, exception: BaseException, usual: float) -> float:
        """How long an exception may wait for what is in flight: not at all after a second Ctrl-C."""
        if self.stop is None:
            return self.seconds_left(usual)
        at_once = isinstance(exception, KeyboardInterrupt) and not self.done
        return 0.0 if at_once else self.seconds_left(math.inf)

    def _is_interrupted(self) -> bool:
        """A Ctrl-C that is not the one that stops the run; one after the handlers were put back raises at once."""
        raised = sys.exception()
        return self.watch.signals.interrupted or (isinstance(raised, KeyboardInterrupt) and raised is not self._exit)

    def _make_durable(self, stop: Stop, take: Take) -> None:
        plan = self.watch.run.plan(stop)
        # Who presses Ctrl-C and loses nothing reads two lines: what happens, and what is safe.
        level = logging.INFO if stop.notice.interrupts and not plan.lost_steps else logging.WARNING
        self._log.log(level, "%s: %s", stop.notice.who, plan.why)
        if plan.choice is not StopChoice.SNAPSHOT:
            if plan.choice is StopChoice.FLUSH:
                self.watch.run.flush.begin()
            self._engine.wait(_left(stop))
            self.watch.run.flush.wait(self._engine.poll, partial(_left, stop))
        else:
            self._take_last(stop, "signal", take)

    def _take_last(self, stop: Stop, reason: str | None, take: Take) -> None:
        """The last snapshot, if there is to be one, and what is in flight, as long as there is time."""
        if reason is not None:
            if not self._engine.ready():
                # A slot is free when what is in flight is durable. A rank without one would make it absent for all.
                self._engine.wait(_left(stop))
            take(reason)
        self._engine.wait(_left(stop))

    def _tell(self, stop: Stop) -> None:
        self._engine.poll()
        left = _left(stop)
        spare = f"{duration(left)} to spare" if left > 0.0 else "too late"
        text = "%s: %s (%s); continue with the same command"
        self._log.warning(text, stop.notice.who, self.watch.run.durable(), spare)


class MissedBoundaries:
    """Counts the optimizer steps of a loop since its last boundary, or the batches of a loop without an optimizer.

    Args:
        halt: ends the run.
        log: of the adapter.
        what: is counted.
    """

    def __init__(self, halt: Halt, log: logging.Logger, what: str) -> None:
        self._halt, self._log, self._what = halt, log, what
        self._steps = self._all_steps = 0
        self._stoppable_at: int | None = None
        """How many of all steps came before the last boundary where a stop could end the run; None: there was none."""

    def reached(self, *, can_stop: bool) -> None:
        """The loop is at a boundary."""
        self._steps = 0
        if can_stop:
            self._stoppable_at = self._all_steps

    def stepped(self) -> Stop | None:
        """One more; the stop that ends the run here, as no boundary comes."""
        self._steps += 1
        self._all_steps += 1
        if self._steps == _REPORTED_STEPS:
            self._report()
        unstopped = self._all_steps - (self._stoppable_at or 0)
        if unstopped < _MOST_UNSTOPPED or (stop := self._halt.watch.stop) is None or self._halt.done:
            return None
        waits = self._stoppable_at is not None and self._halt.seconds_left(1.0) > 0.0
        return None if waits else stop

    def end(self) -> None:
        """The loop has ended, and has announced no step."""
        if 0 < self._steps < _REPORTED_STEPS:
            self._report()

    def _report(self) -> None:
        self._halt.watch.run.steps.first = UNSEEN
        self._log.warning(
            "%s without a boundary: no snapshot can be taken; call step() at the end of the loop's body, "
            "or track the optimizer and iterate the tracked loader",
            count(self._steps, self._what),
        )


def _left(stop: Stop) -> float:
    return max(0.0, stop.deadline - time.monotonic())
