"""What adapters call: takes and restores the snapshots of one run. It connects the parts, and decides nothing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from ckpt_engine.config import Config, load_config
from ckpt_engine.config.live import live_file
from ckpt_engine.config.rehearsal import Rehearsal
from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.errors import ArgumentError, ConfigError, SnapshotFailedError, WaitTimeoutError
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import (
    LOG,
    AttemptsFound,
    Event,
    EventSink,
    LogSink,
    Notice,
    SnapshotFailed,
    TierDegraded,
    WriterLost,
    announce,
    is_failure,
)
from ckpt_engine.observe.resume_report import resumed_from_memory
from ckpt_engine.observe.run_times import times_of
from ckpt_engine.probe.recorder import NOTE, FlightRecorder
from ckpt_engine.ranks.session import session_of
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore import load as restore
from ckpt_engine.restore.changes import OTHER_WAY, Changes
from ckpt_engine.restore.choose import Candidate, ManifestCheck
from ckpt_engine.restore.load import Restorer
from ckpt_engine.snapshot import arguments
from ckpt_engine.snapshot.arena import Slots
from ckpt_engine.snapshot.newest_state import NewestState
from ckpt_engine.snapshot.ownership import Tenure
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.snapshot.save_request import WAIT_SECONDS, Request, SaveHandle
from ckpt_engine.snapshot.writer_link import writer_config
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import fork_of
from ckpt_engine.store.rows import read_lives
from ckpt_engine.writer.client import WriterClient

CLOSE_TIMEOUT_SECONDS = 600.0
AGREE_SECONDS = 300.0
T = TypeVar("T")
U = TypeVar("U")
Named = Callable[[], Mapping[str, T]]


class Ending:
    """What the end of a run has to know of what stops it; here nothing does."""

    @property
    def stopped_by(self) -> str | None:
        """Who has asked the run to stop, if that is so."""
        return None

    @property
    def tells(self) -> bool:
        """Whether the end says what is late: as an error, or in the log if the run is to stop. Else others say it."""
        return True

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for."""
        return at_most

    def hurries(self, copies: bool) -> bool:  # noqa: ARG002
        """Whether a wait ends now; `copies`: one for what further tiers lack, which can be done without."""
        return False

    def leave(self) -> None:
        """The run is closed: of several ranks this one has nothing more to do."""

    def ended(self) -> None:
        """Everything is durable."""


class Engine:
    """The snapshots of one run, for the code that drives a training loop: see docs/architecture.md.

    Args:
        root: folder of the run, or any fsspec URL such as `s3://bucket/run1`; or a YAML file, or a mapping of options.
        ranks: where several processes train together, see docs/many-ranks.md; None: this one is alone.
        options: see docs/configuration.md.

    Nothing is started, written or locked before the first `start`, `prepare` or `save`. All methods belong to the
    training thread.

    Attributes:
        newest: the newest state that was to be saved.

    Raises:
        ConfigError: an option is unknown or impossible.

    Examples:
        >>> engine = Engine("/data/run1", every_n_steps=500)
        >>> engine.start(resumes=True)
        >>> state = engine.load()
        >>> engine.save(state, step=step)
        >>> engine.close()
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        *,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        self.config = load_config(root, **options)
        self._rehearsal = Rehearsal.of_environment()
        if self._rehearsal is not None:
            text = "a rehearsal (CKPT_REHEARSAL is set): snapshots go to %s, and the process ends after step %d"
            LOG.warning(text, self.config.root_url, self._rehearsal.end)
        self._session = session_of(ranks, self.config)
        self.follow_file(root, options)
        self.events: EventSink = LogSink()
        self.loaded: restore.Loaded | None = None
        self._pipeline = Pipeline(
            self._open_writer,
            # Of several ranks each keeps one more complete snapshot: they die at different ones.
            self.config.arena_slots + (self.config.memory is not None and self._session is not None),
            self._emit,
            memory=self.config.memory is not None,
            session=self._session,
            pickle_paths=self.config.pickle,
            tier=self.config.root_url,
            process=self.config.writer == "process",
            eager=self.config.lazy == "off",
        )
        rank = 0 if self._session is None else self._session.ranks.rank
        self.tenure = Tenure(self.config.root_url, rank, partial(self.close, failed=True), self._pipeline.drain)
        self._restorer = Restorer(self.config, self._session, self._pipeline, self._emit, self.tenure)
        self.times = times_of(self.config.root_url, SystemClock())
        self._fatal: list[TierDegraded] = []
        self.ending = Ending()
        self._closing, self._close_by = False, math.inf
        self.newest = NewestState(self.config.on_error)

    @property
    def root_url(self) -> str:
        """Where the snapshots go."""
        return self.config.root_url

    @property
    def facts(self) -> dict[str, str]:
        """Where the run is and how far its snapshots are, for people."""
        loaded, durable = self.loaded, self.newest.durable_step
        resumed = {} if loaded is None else {"resumed from": f"step {loaded.info.step:,}"}
        return {"at": self.root_url, **resumed, "newest durable": f"step {durable:,}" if durable >= 0 else "none yet"}

    def paced_by(self, pace: Callable[[], Mapping[str, Any]]) -> None:
        """What decides how often snapshots are taken, see `Cadence.pace`: for further tiers and `ckpt status`.

        Args:
            pace: see `Cadence.pace`.
        """
        self._pipeline.pace = pace

    @property
    def rhythm(self) -> str:
        """How often snapshots are taken, and why, for people; empty where nothing decides it."""
        return f"snapshots {why}" if (why := self._pipeline.pace().get("why")) else ""

    def follow_file(self, source: object, options: Mapping[str, Any]) -> None:
        """Where the options came from a YAML file, an edit of it takes effect while training runs.

        Args:
            source: that file, or any other source of options.
            options: keywords that win over it.
        """
        self.live = live_file(source, options)

    def start(self, *, resumes: bool = False) -> None:
        """Take the run's lease and start the writer, unless that is done.

        Waits up to a minute for a writer that is still finishing the snapshots of a crashed trainer. If that writer
        offers the last one from memory (memory tier), the wait goes on in the background after half a second: `ready`
        is False until it is over, and `wait` waits for it. Another engine of this process that writes the run is
        closed first, as after a notebook's cell that has failed.

        Args:
            resumes: `choose` or `load` comes next: what these need is made ready meanwhile.

        Raises:
            ClosedError: this one is closed, or a newer one of this process has taken the run over.
            LeaseHeldError: another process writes this run; names it.
            StorageError: the root cannot be written.
            WriterError: the writer does not start.
        """
        self.tenure.claim()
        if resumes:
            self._restorer.open_ahead()
        self._restorer.attach()
        self._pipeline.start()
        self.times.begin()

    def start_fresh(self, how: str) -> None:
        """Training does not go on from what is there, after `start`: what stays of that is said.

        Args:
            how: what the user does to go on from it.
        """
        self._pipeline.lineage.fresh(how)
        self.times.fresh()
        self._say_what_stays()

    def go_on_after(self, info: SnapshotInfo) -> None:
        """Training goes on from this snapshot although its state came from elsewhere, such as this process itself.

        Args:
            info: the snapshot.
        """
        self._restorer.go_on_after(info)

    @property
    def attempt(self) -> str:
        """What names this process in the line of its snapshots."""
        return self._pipeline.lineage.line().attempt

    def prepare(self, state: Any, *, lazy: LazyPredicate | None = None, touch: bool = True) -> None:
        """See `Checkpointer.prepare`.

        Args:
            touch: False: only plan for the state. Where training uses all cores, touching memory takes more from it
                than the first snapshots gain.
        """
        lazy = arguments.function("lazy", lazy)
        self.tenure.claim()
        self._pipeline.prepare(state, lazy, touch=touch and self._rehearsal is None)

    @property
    def slots(self) -> Slots:
        """The host memory that snapshots are copied into."""
        return self._pipeline.slots

    @property
    def recorder(self) -> FlightRecorder | None:
        """What records the steps of the run; None: nothing does."""
        return self._pipeline.recorder

    def record(
        self, optimizers: Named[torch.optim.Optimizer], modules: Named[torch.nn.Module]
    ) -> FlightRecorder | None:
        """Record the steps of these optimizers from now on; None: that is off.

        Args:
            optimizers: those of the run now, by name.
            modules: names for their parameters.
        """
        self._pipeline.groups.name(optimizers)
        if self.config.replay == "off":
            return None
        self._pipeline.record(FlightRecorder(optimizers, modules, self.ranks, stops=self.config.replay == "stop"))
        return self._pipeline.recorder

    def expect_replay(self, found: restore.Loaded, other_way: str) -> None:
        """Training continues from what was loaded: the steps that it repeats are compared.

        Args:
            found: what was loaded.
            other_way: why training is to go another way than before; "": it is not.
        """
        if (recorder := self.recorder) is None:
            return
        storages = (tier.storage for tier in self._restorer.places() if tier.storage.url not in self._restorer.away)
        earlier = read_lives(storages, recorder.rank, but=recorder.name)
        other_way = other_way or (OTHER_WAY if self.changes else "")
        step = 0 if self.changes.restarts else found.info.step
        recorder.expect(found.manifest.notes.get(NOTE), step, earlier, other_way=other_way)

    @property
    def changes(self) -> Changes:
        """What is to be changed in the snapshot that was loaded last."""
        return self._restorer.changes

    @property
    def forked_from(self) -> str:
        """The snapshot of another run that the one that was loaded goes back to; "": there is none."""
        return str(fork_of(self._restorer.line_note) or "")

    @property
    def memory(self) -> bool:
        """Whether there is a memory tier: not where host memory is too short for it, or the writer is a thread."""
        return self._pipeline.memory

    def begin_step(self, step: int) -> None:
        """Training is about to begin `step`, right after what a snapshot of `step - 1` holds; for the memory tier.

        After a crash this tells how many steps were lost. A loop that calls `save` at every step need not call it.

        Args:
            step: its number.

        Raises:
            ArgumentError: `step` is no whole number.
        """
        if type(step) is not int or not 0 <= step <= arguments.MOST:
            step = arguments.whole_number("step", step)
        if self._rehearsal is not None:
            self._rehearse(step - 1, self._rehearsal.end)
        self.times.boundary(step - 1)
        if self._pipeline.started and (pulse := self._pipeline.pulse).beat(step):
            pulse.spend(self.times)

    def ready(self, *, durable: bool = True, cold: bool = False) -> bool:
        """Whether `save` would take a snapshot now instead of skipping it. Never blocks.

        Args:
            durable: as `save` will be given it.
            cold: True: also where it would have to touch new memory, and training would wait several times as long.
        """
        return not self.tenure.closed and self._pipeline.ready(durable, cold)

    def save(
        self,
        state: Any,
        *,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        epoch: int | None = None,
        reason: str = "manual",
        lazy: LazyPredicate | None = None,
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> SaveHandle:
        """See `Checkpointer.save`.

        Args:
            reason: why it is taken; stored.
        """
        self.tenure.claim()
        try:
            wanted = Request.of(step, metrics, epoch, reason, lazy, notes, durable)
        except ArgumentError:
            self._pipeline.miss(0, "its arguments were refused")  # all ranks go on counting alike
            raise
        if not wanted.durable and self.config.memory is None:
            raise ConfigError("durable=False needs the memory tier", hint="put `memory` first in `tiers`")
        wanted = replace(wanted, notes={**wanted.notes, **self._restorer.line_note})
        if self._rehearsal is not None:
            self._rehearse(wanted.step, self._rehearsal.end)
        self._surface()
        self._restorer.detach()
        self.times.boundary(wanted.step)
        began = time.monotonic()
        handle = self._pipeline.save(state, wanted)
        if handle.skipped is None:
            self.newest.note_wanted(wanted.step, handle)
            self.newest.in_vain_seconds = 0.0
        self.times.waited("stall", time.monotonic() - began)
        self._pipeline.pulse.spend(self.times)
        self._say_what_stays()
        return handle

    def _rehearse(self, step: int, end: int) -> None:
        """In a rehearsal no snapshot is skipped, and the process ends when its last step is complete: at once, as if it
        were killed, but that its snapshots are durable.

        Args:
            step: that is complete.
            end: the last one of the rehearsal.
        """
        self.wait(CLOSE_TIMEOUT_SECONDS)
        if step >= end:
            self.close(CLOSE_TIMEOUT_SECONDS)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def miss(self, step: int, why: str, *, durable: bool = True) -> None:
        """Of several ranks: this one takes no snapshot of `step` although the others do.

        Args:
            step: that of the snapshot.
            why: said to the others.
            durable: as the others give it to `save`.
        """
        self._pipeline.miss(arguments.whole_number("step", step), why, durable=durable)

    def agree(self, make: Callable[[], T]) -> T:
        """What a function returns on rank 0, a JSON value, on every rank; without ranks what it returns.

        Args:
            make: called on rank 0 only; where it raises, all ranks do.
        """
        return make() if self._session is None else self._session.agree(make, AGREE_SECONDS)

    def meet(self, make: Callable[[], T], combine: Callable[[list[T | None]], U]) -> U:
        """What `combine` makes on rank 0 of what `make` returns on each rank, on every rank.

        Args:
            make: called on each rank; returns a JSON value.
            combine: called on rank 0, with one value of each rank; None of a rank that did not come.
        """
        return combine([make()]) if self._session is None else self._session.meet(make, combine, AGREE_SECONDS)

    @property
    def count(self) -> int:
        """Of several ranks: how many snapshots they have counted, those that failed or were missed included."""
        return self._session.count if self._session is not None else 0

    @property
    def ranks(self) -> Ranks | None:
        """Who takes the snapshots together; None: this process alone."""
        return self._session.ranks if self._session is not None else None

    @property
    def divided(self) -> bool:
        """Whether the ranks are on nodes with roots of their own; known once the writer was started."""
        return self._session is not None and self._session.divided

    @property
    def replicates(self) -> bool:
        """Whether other machines keep what this rank has in memory."""
        return self._session is not None and self._session.replicates and self.memory

    def before_update(self) -> float:
        """See `Checkpointer.before_update`."""
        seconds = 0.0 if self.tenure.forked else self._pipeline.stager.fence()
        if seconds:
            self.times.waited("fence", seconds)
        return seconds

    def poll(self) -> None:
        """Take in what happened in the background: settles handles, emits events, surfaces errors. Never blocks.

        Raises:
            SnapshotFailedError: with `on_error: raise`, once per failure, with its cause; with `on_failure: fail`, once
                for a tier that fails.
        """
        self._pipeline.poll()
        if self._fatal or self._pipeline.in_flight.failures:
            self._surface()

    def choose(self, step: int | None = None, *, check: ManifestCheck | None = None) -> Candidate | None:
        """The snapshot that `load` would try first, or None if there are none at all; reads its manifest only.

        A `load` after it goes by what further tiers have listed for it.

        Args:
            step: that of the snapshot; None: the newest.
            check: raises if a manifest does not fit.

        Raises:
            NoUsableSnapshotError: there are snapshots, and none is usable; says why for each. Or there are none, and a
                tier does not answer.
            ResumeError: no snapshot of `step`.
        """
        self.tenure.require_open()
        step, _, check = arguments.of_load(step, None, None, check)
        return self._restorer.choose(step, check)

    def load(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        live: restore.Live | None = None,
        check: ManifestCheck | None = None,
        back: bool = False,
    ) -> Any | None:
        """See `Checkpointer.load`.

        Args:
            live: in the place of `into`: makes some of the live state once the snapshot is chosen. No match is needed.
            check: raises if a manifest does not fit; asked before data is read.
            back: what is newer than `step` is to be replaced. Else, and if there is something newer, what is saved from
                here on is a branch beside it.
        """
        step, live, check = arguments.of_load(step, into, live, check)
        self.tenure.require_open()
        self.times.begin()
        began = time.monotonic()
        how: dict[str, Any] = {"into": into, "live": live, "check": check, "pickle_paths": self.config.pickle}
        found = self._restorer.load(step, back=arguments.flag("back", back), **how)
        # The state belongs to the caller: a second reference here would hold its memory for the whole run.
        self.loaded = found and replace(found, state=None)
        self.times.waited("restore", time.monotonic() - began)
        self.times.begin()
        # What a process rolls back to later is no resume.
        self.times.resumed_at = self.times.resumed_at or (found.info.step if found is not None else 0)
        if found is not None and (self._session is None or self._session.coordinates):
            self._tell(found)
        return None if found is None else found.state

    def snapshots(self, *, nearest: bool = False) -> list[SnapshotInfo]:
        """All snapshots that any tier has, or the `nearest` one, which no other tier can hold up, oldest first.

        Args:
            nearest: only the tier that is nearest is asked.

        Raises:
            StorageError: no tier answers.
        """
        return ask_tiers.snapshots([self._restorer.nearest()] if nearest else self._restorer.places())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight, not beyond a stop or what `begin_close` says. See `Checkpointer.wait`."""
        began, most = time.monotonic(), arguments.seconds(timeout, WAIT_SECONDS)
        done = self._pipeline.drain(min(most, max(0.0, self._close_by - began)), self.ending.hurries)
        self.newest.in_vain_seconds = 0.0 if done else time.monotonic() - began
        return done

    def begin_close(self, timeout: float | None) -> None:
        """What comes from here on until `close` has ended takes so long in all.

        Args:
            timeout: see `Checkpointer.close`.
        """
        most = arguments.seconds(timeout, CLOSE_TIMEOUT_SECONDS + self.config.wait_at_end)
        self._close_by = time.monotonic() + most - self.newest.in_vain_seconds

    def close(self, timeout: float | None = None, *, failed: bool = False) -> None:
        """See `Checkpointer.close`."""
        if timeout is not None or self._close_by == math.inf:
            self.begin_close(timeout)
        if self._closing or self.tenure.forked:
            return
        self._closing = True
        self.times.over()
        if self._pipeline.started:
            self._pipeline.pulse.spend(self.times)
        self._restorer.detach()
        keeps = failed and self.memory and self._session is not None
        try:
            left = self.ending.seconds_left(max(0.0, self._close_by - time.monotonic()))
            error = sys.exception()
            failed = failed and self.ending.stopped_by is None and is_failure(error)
            why = self.ending.stopped_by or ("" if error is None else type(error).__name__)
            self._pipeline.close(left, why=why, failed=failed, keeps=keeps, hurries=self.ending.hurries)
        except WaitTimeoutError as err:
            if self.ending.tells and self.ending.stopped_by is None:
                raise
            if self.ending.tells:
                LOG.error("%s", err)
        except KeyboardInterrupt:
            self._closing = False
            raise
        finally:
            self.ending.leave()
            if self._closing:
                self.tenure.over()
        loss = self.newest.loss
        if loss is None or self._fatal:
            self._surface()
        self.ending.ended()
        # Where an exception is on its way the user must see that one.
        if loss is not None and (failed or sys.exception() is not None or self.config.on_error == "warn"):
            LOG.error("%s", loss)
        elif loss is not None:
            raise loss from self.newest.cause

    def _open_writer(self, memory: bool, emit: Callable[[Event], object]) -> WriterClient:
        config = writer_config(self.config, memory=memory, ranks=self._session is not None)
        from ckpt_engine.writer.launch import open_client

        begin = partial(open_client, thread=not self._pipeline.process, emit=emit)

        def start(config: WriterConfig) -> WriterClient:
            return self._pipeline.lineage.checked(begin(config))

        return self._session.open(lambda ranks: start(replace(config, ranks=ranks))) if self._session else start(config)

    def _say_what_stays(self) -> None:
        if (news := self._pipeline.lineage.news()) is not None:
            self._emit(Notice("WARNING", news))

    def _emit(self, event: Event) -> None:
        is_late = isinstance(event, SnapshotFailed) and event.code == WaitTimeoutError.code
        if self._closing and not self.ending.tells and (is_late or isinstance(event, WriterLost)):
            return  # the writer continues without this process with what it has not written yet
        if isinstance(event, AttemptsFound):
            self.times.found(event)
        self.newest.emit(event)
        if isinstance(event, TierDegraded) and event.fatal:
            self._fatal.append(event)
        elif isinstance(event, TierDegraded):
            # At the end the line about what is missing says it.
            known = event.tier in self._restorer.away or (self._closing and self._restorer.is_further(event.tier))
            self._restorer.away.discard(event.tier)
            event = replace(event, known=known)
        self.events.emit(event)

    def _tell(self, found: restore.Loaded) -> None:
        line = resumed_from_memory(found.lost_steps) if found.from_memory else None
        if isinstance(self.events, LogSink):  # nothing else reports of this resume
            if line is not None:
                announce(LOG, line)
            for text in found.left_out:
                LOG.warning("%s", text)
        elif line is not None:
            self._emit(Notice("INFO", line))

    def _surface(self) -> None:
        if self._fatal:
            event = self._fatal.pop(0)
            raise SnapshotFailedError(f"{event.tier} failed, and on_failure is fail: [{event.code}] {event.message}")
        failures = self._pipeline.in_flight.failures
        failure = failures.pop(0) if failures else None
        if failure is not None and self.config.on_error == "raise":
            self.newest.cause = None  # the script knows now, and decides
            text = f"a snapshot failed in the background: {failure.message}"
            raise SnapshotFailedError(text, hint=failure.hint) from failure
