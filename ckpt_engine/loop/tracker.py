"""What `track` starts: takes the snapshots of a user's own loop at fetch boundaries when they are due, and resumes from
the newest one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_engine.audit.audit import Audit
from ckpt_engine.audit.carried import calls_now, taking_part
from ckpt_engine.audit.roots import read_by_loading
from ckpt_engine.data import rng
from ckpt_engine.engine import Engine
from ckpt_engine.loop import components
from ckpt_engine.loop.boundary import RunInstant, TrainingRun, uncaught
from ckpt_engine.loop.capture import Capture
from ckpt_engine.loop.components import Counters, NamedParts, Surroundings
from ckpt_engine.loop.distributed_models import wrappers_of
from ckpt_engine.loop.failing_loop import BoundaryRecord, FailingRun, ImpossibleError, Undo
from ckpt_engine.loop.feed import Feed, obstacle_of
from ckpt_engine.loop.halt import EXCEPTION_WAIT_SECONDS, MissedBoundaries
from ckpt_engine.loop.loader_source import LoaderSource
from ckpt_engine.loop.loop_boundary import LoopBoundary
from ckpt_engine.loop.loops import Loops
from ckpt_engine.loop.phases import BEGUN, CLOSED, ENDED, FRESH, OPEN, RESTORING
from ckpt_engine.loop.progress import LoopProgress
from ckpt_engine.loop.rank_decisions import Take
from ckpt_engine.loop.resume import LoopResume
from ckpt_engine.loop.steps_made import StepsMade, needs_optimizer
from ckpt_engine.loop.turns import Turns
from ckpt_engine.observe.curves import Curve, Curves
from ckpt_engine.observe.run_times import hook_time
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.snapshot.step_fence import StepFence
from ckpt_engine.undo import on_failure


class Tracker(LoopProgress):
    """Snapshots of a training loop whose body stays as it is; resumes when it is made.

    A snapshot is taken when a followed loader is asked for the next batch after an optimizer step. All methods belong
    to the training thread. The run itself is bit for bit the same as without a tracker.

    Args:
        engine: takes and restores the snapshots.
        parts: the components of a snapshot.
        sources: the loaders to follow, by name.
        surroundings: what runs the loop.
        trainer: its name, for the snapshot's notes and the log.
        folder: where the resume report goes if the run's place is not a local folder.
        begins_at: none of our snapshots is resumed, the user knows, and training begins at this step.

    Raises:
        LeaseHeldError, StorageError, WriterError: as `Engine.start`.
        NoUsableSnapshotError, MismatchError, ResumeError: as `LoopResume.load`.
    """

    exception_wait_seconds = EXCEPTION_WAIT_SECONDS
    """How long the end by an exception waits for what is in flight."""

    def __init__(
        self,
        engine: Engine,
        parts: NamedParts,
        sources: Mapping[str, LoaderSource],
        surroundings: Surroundings,
        *,
        trainer: str,
        folder: Path,
        begins_at: int | None = None,
    ) -> None:
        log, outside = logging.getLogger(f"ckpt_engine.{trainer}"), calls_now()
        audit = Audit(
            engine.config.hidden,
            lambda: taking_part({**parts.objects, **surroundings.audited()}, self._sources, outside),
            log,
            ahead=self._ahead,
        )
        capture = Capture(parts, audit, engine.ranks, lambda: wrappers_of(parts.modules.values()))
        run = TrainingRun(engine, trainer, components.device_of(parts), capture, log)
        super().__init__(run, begins_at or 0)
        self._parts, self._surroundings = parts, surroundings
        self._failing = FailingRun(run)
        self._missed = MissedBoundaries(run.stopping.halt, log, "optimizer step" if parts.optimizers else "batch")
        fence = StepFence(self.before_update)
        self._stepped = StepsMade(parts.optimizers, fence.uses_left)
        engine.start(resumes=begins_at is None and engine.config.resume_word != "off")
        self._sources = dict(sources)  # feeds and positions do not keep their loaders alive
        self._feeds = [Feed(name, source, self) for name, source in sources.items()]
        self._loops = Loops(self._feeds, log, parts.optimizers.values(), parts.objects.values())
        self._resume = LoopResume(engine, parts, self._feeds, surroundings, folder, log, audit)
        with on_failure(self._release_feeds):
            self._take_over(begins_at)
        self._hooks = ExitStack()
        """What `release` undoes besides loaders."""
        fence.install()
        self._hooks.callback(fence.remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        engine.tenure.release = self._abandoned
        run.cadence.start(self._turns.step)
        run.stopping.start(self._turns.step)

    # ---- what the loop reads and calls

    @property
    def global_step(self) -> int:
        """Optimizer steps so far, those before a resume included; several optimizers in one batch count once."""
        # Where it is read, a loop may be about to begin.
        begins = self._loops.start.read() and self._training is None
        if begins and not any(one.phase in OPEN for one in self._feeds):
            self._run.capture.audit.begin("batch")
            self._resume.begins()
        return self._turns.step

    @hook_time.counted
    def step(self) -> None:
        """A boundary that the loop announces itself, as the last statement of its body.

        For loops that do not ask a followed loader for each batch. Each turn counts, one without an optimizer step too.

        Raises:
            SnapshotFailedError: as `Engine.poll`.
            ClosedError: this is closed, or a newer one of this process has taken the run over.
            SystemExit, KeyboardInterrupt: a request to stop; what fits into the grace is durable.
        """
        self._engine.tenure.require_open()
        if not self._parts.optimizers:
            self._count_step()
        turns = self._turns
        feed = next((one for one in turns.due_feeds if one.phase in OPEN), None)
        others = self._surroundings.accumulating() or any(one.phase in OPEN for one in self._feeds)
        if not turns.has_stepped and not others and self._training is None:
            turns.step += 1
        if turns.has_stepped:
            self._resume.trains()
            self._resume.say(self._loops.counts_again())
            self._boundary(feed)
            turns.is_announced = True

    def before_update(self) -> None:
        """The fence: call before code that changes weights without an optimizer. Cheap if nothing is being copied.

        Raises:
            StateError: as `Checkpointer.before_update`.
        """
        self._failing.last.changes()
        if self._loops.resumed is not None:
            self._resume.say(self._loops.skips_again(ended=False))
        self._run.complete_copies()

    def finish(self, *, complete: bool | None = None) -> None:
        """Take the final snapshot if training is complete, and leave the loop's objects as they were found.

        Args:
            complete: whether the loop ran to its end; None: the last pass over the training loader ended by itself,
                or a loop without one has announced its last step, and no exception is being handled.

        Raises:
            SystemExit, KeyboardInterrupt: a request to stop after its last boundary.
        """
        if self._life.phase is CLOSED:
            return
        waits, turns, error = self._life.phase is RESTORING, self._turns, sys.exception()
        self._life.close()
        self._run.stopping.watch.run.steps.trained(turns.step)
        try:
            if complete is None:
                done = turns.is_announced if self._training is None else self._training.phase is ENDED
                complete = done and not turns.has_stepped and error is None
            if not turns.is_announced and self._training is None and error is None:
                self._missed.end()
            if (
                waits
                and error is None
                and (self._resume.is_unfinished or any(one.requests.asked_at for one in self._feeds))
            ):
                self._run.log.error("resumed at step %d, and the loop has trained on no batch", turns.step)
            if complete or error is None:
                self._end_training(complete=complete)
            else:
                self.failed_with(error)
            self._resume.end(turns.step)
        finally:
            self.release()
            self._run.stopping.over()

    def release(self) -> None:
        """Leave the loop's objects as they were found, without a final snapshot."""
        self._life.close()
        self._run.stopping.close()
        self._hooks.close()
        self._release_feeds()

    def continue_after(self, loader: str, epochs: int, batches: int) -> None:
        """A run of others goes on in epoch `epochs` of this loader after so many batches. Before its first pass."""
        self._training = feed = next(one for one in self._feeds if one.name == loader)
        feed.begin_after(epochs, batches)
        self._life.continue_after(feed, batches)

    def follow(self, name: str, source: LoaderSource) -> None:
        """One more loader from now on, instead of one that was followed by that name."""
        for feed in [one for one in self._feeds if one.name == name]:
            feed.release()
            self._feeds.remove(feed)
        self._sources[name] = source
        self._feeds.append(Feed(name, source, self))
        self._resume.late(self._feeds[-1])

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long, which was not training. Passes over tracked loaders announce themselves."""
        self._run.evaluated(seconds)

    def continue_curves(self, curves: Callable[[], Sequence[Curve]]) -> None:
        """The loggers continue where the snapshot is; once, as soon as `curves` finds any."""
        if not self._surroundings.curves:
            self._surroundings.curves = found = Curves(self._engine.root_url, curves())
            loaded = self._engine.loaded
            self._resume.report.add([], found.go_on({} if loaded is None else loaded.manifest.notes))

    def numbers(self) -> dict[str, float]:
        """How the run stands, as loggers get it: `ckpt/overhead_percent` and so on, see `log.loggers`. Any thread."""
        return self._run.metrics.logged(self._run.config.log.loggers)

    def failed_with(self, error: BaseException | None) -> None:
        """See `FailingRun.end`. Never raises."""
        self._failing.end(error)

    def abandon_resume(self) -> None:
        """The script loads another state itself: positions and streams of the snapshot do not count any more."""
        self.before_update()
        if self._life.phase is RESTORING:
            self._life.forget_place()
            for feed in self._feeds:
                feed.forget()
            self._engine.start_fresh("load no other state after it has resumed")

    # ---- Listener

    def asked(self, feed: Feed) -> None:
        """A followed loader is asked for a batch."""
        life, turns = self._life, self._turns
        if feed.phase is BEGUN:
            self._engine.times.begin()
        life.settle()
        if found := self._loops.asked(feed):
            self._resume.say(*found)
        turns.note_request(feed, self._training)
        # Where another pass is not over this one is an evaluation in an epoch, or they are zipped.
        is_first = feed.delivered == 0 and life.phase is FRESH
        if is_first and not any(one.phase in OPEN for one in self._feeds if one is not feed):
            self._run.capture.audit.begin("batch")
            self._run.capture.audit.boundary(self._counters(feed), taking=False)
        if life.phase is RESTORING and feed is life.resumed:
            if feed.resumed is not None:
                self._run.capture.audit.begin("batch")
                self._resume.at_first_fetch()
                self._run.begins(feed.lead.ahead or 0)
                life.watch(self._parts)
                self._run.cadence.start(turns.step)
            if (problems := self._loops.problems_at(feed)) is not None:
                self._resume.say(*problems)
                life.arrive()
        elif feed in turns.due_feeds or (feed is self._training and feed.delivered == 0 and feed.history.starts_only):
            self._boundary(feed)
            self._failing.waits = True
        turns.asked_feeds.add(feed)

    def given(self, feed: Feed, batch: Any) -> None:
        """It gave one: the restored position is final now."""
        self._failing.waits = False
        self._run.took(batch)
        if not (self._parts.optimizers or self._turns.is_announced) and (stop := self._missed.stepped()) is not None:
            raise self._end(stop, None)
        if feed in (self._training, self._life.resumed):
            self._resume.publish()

    def failed(self, feed: Feed, error: Exception) -> None:
        """It had none to give: a stop that has ended its workers takes effect at the boundary before."""
        where = f"{feed.name} {feed.history.epochs} {feed.delivered}"
        if (stop := self._run.stopping.no_batch(error, where)) is not None:
            raise self._end(stop, lambda reason: self._take_before(feed, reason)) from error

    def over(self, feed: Feed) -> None:
        """A pass over a followed loader is complete, or was left."""
        self._resume.say(self._loops.skips_again(ended=True))
        self._turns.asked_feeds.discard(feed)
        self._life.settle()
        self._loops.over(feed)
        ended = feed.phase is ENDED and not feed.without_step
        # A resumed pass may end on the way: its last batch was trained, which was not known to be the last.
        if self._life.phase is RESTORING and not (ended and feed is self._life.resumed):
            if not (ended and feed.delivered):  # else its saved pass was at its end, which the loop has now seen
                self._resume.again(feed)
                self._life.put_back.append(feed)
            return
        if feed is self._life.resumed:
            self._life.forget_place()
        if feed.progress.trained:
            self._run.complete_copies()  # averaged weights may be swapped in for an evaluation
            self._failing.left()
        elif self._turns.step and (seconds := feed.requests.pass_seconds()) is not None:
            self.evaluated(seconds)

    def report_inexact(self, problem: str) -> None:
        """Passes over a followed loader cannot be repeated."""
        self._run.log.warning("a resume will not be exact: %s", problem)

    @hook_time.counted
    def _after_step(self, stepped: torch.optim.Optimizer, *_: Any) -> None:
        untracked = self._loops.untracked
        optimizer = stepped if id(stepped) in untracked.tracked_ids else untracked.tracked(stepped)
        if optimizer is None:
            if not self._parts.optimizers:
                own = {id(p) for module in self._parts.modules.values() for p in module.parameters()}
                if not own.isdisjoint(map(id, components.managed([stepped]))):
                    raise needs_optimizer("optimizer")
            return
        self._count_step()
        self._stepped.mark(optimizer)
        if (stop := self._missed.stepped()) is not None:
            raise self._end(stop, None)

    def _count_step(self) -> None:
        if not self._loops.start.over:
            self._resume.trains()
        self._life.begin_training()
        self._loops.stepped()
        self._turns.count_step()
        asked = self._turns.asked_feeds
        if asked and self._training not in asked:
            self._training = next(one for one in self._feeds if one in asked)

    # ---- boundaries

    def _boundary(self, feed: Feed | None) -> None:
        turns = self._turns
        obstacle = obstacle_of(feed, accumulating=self._surroundings.accumulating())
        around, unclear = self._loops.boundary(feed, turns.due_feeds)
        self._training, obstacle = around or self._training, obstacle or unclear
        self._missed.reached(can_stop=obstacle is None)
        if obstacle is None:
            for one in turns.due_feeds:
                one.progress.interior = one.delivered > 0
        self._run.capture.audit.hidden.stepped()
        self._stepped.look()
        here = LoopBoundary(self, feed, obstacle)
        self._run.boundary(turns.step, here)
        if obstacle is None:
            self._failing.reached(turns.step, lambda: self._record(feed, here))
        else:
            self._failing.missed(turns.step, obstacle)
        self._stepped.clear()
        turns.end_boundary(feed, around)

    def _end(self, stop: Stop, take: Take | None) -> BaseException:
        """See `Halt.end` and `Halt.unsaved`; then signals are the script's, which may catch the exception."""
        try:
            return self._run.stopping.halt.unsaved(stop) if take is None else self._run.stopping.halt.end(stop, take)
        finally:
            self._run.stopping.close()

    def _end_training(self, *, complete: bool) -> None:
        # Its last batches may have changed what no optimizer steps, after a snapshot of this step.
        over = "end" if self._training is not None and self._training.phase is ENDED else None
        reason = self._run.cadence.ended(self._turns.step) or over
        if complete and self._run.config.at_end and reason is not None:
            states = self._resume.waiting | {one.name: one.next_pass_state() for one in self._feeds}
            self._run.take_at_end(self._instant(self._training, states, finished=True), reason)

    def _instant(self, feed: Feed | None, states: Mapping[str, Any], *, finished: bool = False) -> RunInstant:
        batch = 0 if feed is None else feed.trained_on
        own = partial(self._own, feed, states, finished=finished)
        return RunInstant(
            step=self._turns.step,
            epoch=self.epoch,
            state=lambda: self._state(self._surroundings.now(), self._stepped, own()),
            metrics=self.metrics,
            notes=lambda: {"batch": batch, **self._surroundings.now().notes()},
        )

    def _take_before(self, feed: Feed, reason: str) -> SaveHandle | None:
        """A snapshot after the last complete step, while the loop waits for a batch; None where none may be taken."""
        if self._life.phase is RESTORING or feed is not self._training:
            return None
        here = LoopBoundary(self, feed, obstacle_of(feed, accumulating=self._surroundings.accumulating()))
        return here.take(reason, durable=True) if here.obstacle() is None else None

    def _positions(self) -> dict[str, Any]:
        return self._resume.waiting | self._loops.positions()

    def _state(
        self, counters: Counters, stepped: Container[int], own: Mapping[str, Any], undo: Undo | None = None
    ) -> dict[str, Any]:
        own = {
            "flags": {name: components.dump_flags(module) for name, module in self._parts.modules.items()},
            "metric_states": components.dump_all(self._parts.objects),
            **own,
            "surroundings": counters.dump(),
            "cadence": self._run.cadence.state(),
        }
        gradients = {} if own["finished"] else components.waiting_gradients(self._parts, stepped)
        return self._run.capture.state(own, gradients, undo)

    def _own(self, feed: Feed | None, states: Mapping[str, Any], *, finished: bool = False) -> dict[str, Any]:
        counts = self._training or feed
        return {
            "finished": finished,
            "training": None if feed is None else feed.name,
            "counts": None if counts is None else counts.name,
            "feeds": dict(states),
            "epoch": 0 if counts is None else states[counts.name]["epochs"],
            "batch": 0 if feed is None else states[feed.name]["delivered"],
            "step": self._turns.step,
            "metrics": dict(self.metrics),
            "loop": {} if finished else self._loops.state(feed),
            "reused": self._stepped.reused(),
        }

    def _record(self, feed: Feed | None, here: LoopBoundary) -> BoundaryRecord:
        """Raises ImpossibleError where the last batch of an epoch was trained, although that was not known."""
        if (why := here.obstacle()) is not None:
            raise ImpossibleError(f"no snapshot can be taken there: {why}")
        own = self._own(feed, here.states) | {"buffer_syncs": self._run.capture.gradient_order.syncs()}
        stepped, counters = frozenset(self._stepped), self._surroundings.now()
        why = "it has gradients of earlier batches" if components.waiting_gradients(self._parts, stepped) else ""
        return BoundaryRecord(own, partial(self._state, counters, stepped), lambda: own["metrics"], counters.notes, why)

    def _ahead(self) -> set[str]:
        ahead = [one.name for one in self._feeds if one.position.lookahead]
        return read_by_loading({name: self._sources[name].base for name in ahead})

    # ---- resuming

    def _take_over(self, begins_at: int | None) -> None:
        streams = rng.capture()
        if (own := self._resume.load(begins_at)) is None:
            return
        self._turns = Turns(int(own["step"]))
        self.metrics.update(own["metrics"])
        self._stepped.expect(own.get("reused", ()))
        if own["cadence"] is not None:
            self._run.resume(own["cadence"])
        if own["training"] is not None:
            feeds = {one.name: one for one in self._feeds}
            resumed = feeds[own["training"]]
            self._training = feeds.get(own.get("counts") or "", resumed)
            self._life.resume(resumed)
            self._loops.expect(own, resumed)
            if not own["finished"]:
                rng.restore(streams)  # until the first batch what the script draws is its own
        elif own["cadence"] is not None:
            if own.get("loop", {}).get("start", False):
                rng.restore(streams)
            self._loops.start.streams = own["rng"]
            self._loops.counted = own.get("loop", {}).get("numbers", {})
            self._resume.say(*own.get("loop", {}).get("says", ()))

    def _abandoned(self) -> None:
        """The process ends, or a newer engine takes the run over, and this was not closed."""
        error = uncaught()
        if self._life.phase is not CLOSED and (error is not None or not self._engine.tenure.replaced):
            self.failed_with(error)
        self.release()

    def _release_feeds(self) -> None:
        for feed in self._feeds:
            feed.release()
        self._sources.clear()
