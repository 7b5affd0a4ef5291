"""What a snapshot is asked for with, the id that all ranks give it, and the promise (`SaveHandle`) that the user gets.

Every rank counts the snapshots of all ranks alike, also those that it has no part in. With replication the next
snapshot into memory waits until partners have the one before. Where each node has a root of its own, no node removes a
snapshot before all have a newer one: each leader counts up a number in the ranks' store when its node has committed a
snapshot, and rank 0 looks once per snapshot, without a wait.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Self

import torch

from ckpt_engine.copy.job import JobDone, Mirrored, PersistJob
from ckpt_engine.errors import CkptError, RanksError, SnapshotFailedError, SnapshotSkippedError, WaitTimeoutError
from ckpt_engine.observe.events import SnapshotFailed, WriterLost
from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot import arguments
from ckpt_engine.snapshot.arguments import seconds
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.store.names import parse_id, seq_of

if TYPE_CHECKING:
    from ckpt_engine.snapshot.pipeline import Pipeline

WAIT_SECONDS = 3600.0
"""Of waits without a timeout of their own: forever, unless the engine has a fault."""
PATIENCE_SECONDS = 30.0
"""How long a partner that is gone keeps snapshots from being taken; that is known by then."""
_MISSED = "missed"
_ASKED = 8
"""The newest snapshots of this node that are asked for; all older ones failed somewhere."""
_KEPT = 64
"""Keys that a rank leaves in the store: more than leaders can be behind each other."""


@dataclass(frozen=True, slots=True)
class Request:
    """See `Checkpointer.save` for the fields; all of them are plain values."""

    step: int
    metrics: Mapping[str, float]
    epoch: int | None
    reason: str
    lazy: LazyPredicate | None
    notes: Mapping[str, Any]
    durable: bool

    @classmethod
    def of(cls, step: Any, metrics: Any, epoch: Any, reason: Any, lazy: Any, notes: Any, durable: Any) -> Self:
        """The request that these arguments mean.

        Raises:
            ArgumentError: one of them means nothing that could be stored; names it.
        """
        return cls(
            arguments.whole_number("step", step),
            arguments.metrics(metrics),
            None if epoch is None else arguments.whole_number("epoch", epoch),
            arguments.text("reason", reason),
            arguments.function("lazy", lazy),
            arguments.notes(notes),
            arguments.flag("durable", durable),
        )

    def job(self, **rest: Any) -> PersistJob:
        """The writer's job, of which the others say the rest."""
        return PersistJob(
            step=self.step,
            epoch=self.epoch,
            reason=self.reason,
            metrics=self.metrics,
            notes=self.notes,
            software=software(),
            **rest,
        )


@dataclass(eq=False, repr=False)
class SaveHandle:
    """One `save`. Training thread only.

    Attributes:
        step: as given to `save`.
        stall_seconds: how long `save` kept training from going on.
        skipped: why the snapshot was not taken (back-pressure), or None.
        durable: whether it is to become durable; else it only stays in memory.
        held: it is in memory, where it survives the trainer (only if not `durable`).
        snapshot: id of the snapshot once it is durable, else None.
        error: why it did not become durable, or None.
        has_raised: `wait` has raised it.

    Examples:
        >>> handle = ckpt.save(state, step=step)
        >>> if handle.skipped is None:
        ...     print(handle.wait(timeout=60))  # its id
    """

    _pipeline: Pipeline
    step: int
    durable: bool = field(default=True, kw_only=True)
    skipped: str | None = field(default=None, kw_only=True)
    stall_seconds: float = field(default=0.0, init=False)
    held: bool = field(default=False, init=False)
    snapshot: str | None = field(default=None, init=False)
    error: CkptError | None = field(default=None, init=False)
    has_raised: bool = field(default=False, init=False)

    def done(self) -> bool:
        """Whether the outcome is known: durable, in memory, failed or skipped. Never blocks."""
        self._pipeline.poll()
        return self.settled

    def wait(self, timeout: float | None = None) -> str:
        """Return the snapshot's id once it is durable; one that only stays in memory has none: "" once it is there.

        Args:
            timeout: seconds; None waits up to an hour.

        Raises:
            ArgumentError: `timeout` is no number.
            SnapshotSkippedError: it was not taken; nothing was lost, save again later.
            SnapshotFailedError: it did not become durable; the cause is chained.
            WaitTimeoutError: not durable yet; it may still become so.
        """
        most = seconds(timeout, WAIT_SECONDS)
        if self.skipped is not None:
            raise SnapshotSkippedError(f"the snapshot of step {self.step} was skipped ({self.skipped})")
        if not self._pipeline.wait_for(self, most):
            raise WaitTimeoutError(
                f"the snapshot of step {self.step} is not {'durable' if self.durable else 'with the writer'} yet"
            )
        if self.error is not None:
            self.has_raised = True
            raise SnapshotFailedError(
                f"the snapshot of step {self.step} did not become durable: {self.error.message}", hint=self.error.hint
            ) from self.error
        return self.snapshot or ""

    @property
    def settled(self) -> bool:
        """Whether the outcome was known at the last look."""
        return self.held or self.skipped is not None or self.snapshot is not None or self.error is not None

    def __repr__(self) -> str:
        state = (self.skipped and f"skipped: {self.skipped}") or self.snapshot or self.error
        state = state or ("in memory" if self.held else "in flight")
        return f"<SaveHandle step={self.step} {state}>"


@cache
def software() -> Mapping[str, str]:
    """Versions that bear on whether a resumed run can be bitwise the same."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("ckpt-engine", "numpy", "lightning", "accelerate"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


Save = Callable[[Callable[[], Mapping[str, Any]]], SaveHandle]
"""Takes a snapshot. Its argument says what the writer's job has to know of ranks, once there is one."""


class OwnSnapshots:
    """The snapshots of a process alone: no other rank counts them."""

    def take(self, _wanted: Request, _parent: str | None, _start: Callable[[], object], save: Save) -> SaveHandle:
        """Let `save` take the next one.

        Args:
            parent: the snapshot that this run resumed from.
            start: starts the writer, which ranks need before they can count.
        """
        return save(dict)

    def reopens(self) -> None:
        """A writer is about to start in place of another one."""

    def miss(self, step: int, parent: str | None, why: str, *, durable: bool = True) -> None:
        """This rank takes no snapshot of `step` though all ranks do: it is counted, and no rank waits for this one."""

    @property
    def keeps_up(self) -> bool:
        """Whether another snapshot may be taken into memory."""
        return True

    def heard(self, message: object) -> None:
        """What the writer of this rank has said."""

    def lacking(self) -> str | None:
        """In the end, on rank 0: what is to be said where another node has said that it lacks the last snapshot."""
        return None


@dataclass(eq=False)
class SharedSnapshots(OwnSnapshots):
    """The snapshots that several ranks take together, as one of them counts and knows them. Training thread only.

    Rank 0 knows what the partners of all ranks have, and a leader of one of several places what all places have; other
    ranks know nothing of that.

    Args:
        session: of the ranks.
        cancel: tells the others that this rank has no part in a snapshot, and why.
    """

    _session: Session
    _cancel: Callable[[str, str], None]
    _taking: bool = field(default=False, init=False)
    _waits_for: int | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    _took: str | None = field(default=None, init=False)
    _newest: str | None = field(default=None, init=False)
    _unsure: deque[str] = field(default_factory=partial(deque, maxlen=_ASKED), init=False)
    _left: deque[str] = field(default_factory=deque, init=False)

    def take(self, wanted: Request, parent: str | None, start: Callable[[], object], save: Save) -> SaveHandle:
        """Give it the id that all ranks do. Whatever fails in `save`: all ranks go on counting alike."""
        if not self._session.is_open:  # the ranks have still to agree on their numbers
            start()
        snapshot = self._session.number(wanted.step, parent)
        why = "it failed there"
        self._taking = True
        try:
            handle = save(partial(self.took, snapshot, parent))
            why = handle.skipped or ""
        finally:
            self._taking = False
            if why:
                self._tell(snapshot, why, durable=wanted.durable)
        return handle

    def reopens(self) -> None:
        self._session.reopens(self._taking)

    def miss(self, step: int, parent: str | None, why: str, *, durable: bool = True) -> None:
        if self._session.is_open:
            self._tell(self._session.number(step, parent), why, durable=durable)

    def _tell(self, snapshot: str, why: str, *, durable: bool) -> None:
        if durable:
            self._cancel(snapshot, why)
            self.lacks(snapshot)
        else:
            self._tell_missed(snapshot)

    def _tell_missed(self, snapshot: str) -> None:
        session = self._session
        if session.replicates and not session.coordinates:
            with suppress(RanksError):  # rank 0 is gone: it does not wait
                session.ranks.store.set(_MISSED, snapshot)

    @property
    def keeps_up(self) -> bool:
        """All partners have the snapshot before.

        So all ranks mirror the same ones. Training goes on without snapshots in memory meanwhile.
        """
        if self._waits_for is not None:
            late = time.monotonic() - self._since > PATIENCE_SECONDS
            missed = None if late else self._session.ranks.store.get(_MISSED)
            if late or (missed is not None and seq_of(missed) >= self._waits_for):
                self._waits_for = None
        return self._waits_for is None

    def took(self, snapshot: str, parent: str | None) -> dict[str, Any]:
        """This rank takes part in a snapshot; what its job says of that. `parent`: what the run resumed from."""
        session, self._took = self._session, snapshot
        if session.replicates and session.coordinates:  # that one is to be mirrored by all ranks
            self._waits_for, self._since = seq_of(snapshot), time.monotonic()
        return {"snapshot": snapshot, "rank": session.ranks.rank, **self._on_all_nodes(parent)}

    def heard(self, message: object) -> None:
        if isinstance(message, JobDone) and message.snapshot_id is not None:
            self.committed(message.snapshot_id)
        elif isinstance(message, Mirrored):
            # Where partners are slow a newer one takes the place of one that waits.
            if self._waits_for is not None and seq_of(message.snapshot) >= self._waits_for:
                self._waits_for = None
        elif isinstance(message, SnapshotFailed) and message.snapshot:
            self.lacks(message.snapshot)
        elif isinstance(message, WriterLost) and self._took is not None:
            self._waits_for = None
            self._tell_missed(self._took)  # its share was lost with the writer, or what that kept for others

    def committed(self, snapshot: str) -> None:
        """This node has it."""
        session = self._session
        if not session.led_places:
            return
        self._unsure.append(snapshot)
        with suppress(RanksError):  # the ranks are gone: then nothing is removed any more
            session.ranks.store.add(_key(snapshot))
            if session.coordinates:
                self._leave(_key(snapshot))

    def lacks(self, snapshot: str) -> None:
        """This node does not have it, and never will: others need not keep it for its sake."""
        if self._session.led_places:
            with suppress(RanksError):
                self._session.ranks.store.set(_lack(snapshot), "")
                self._leave(_lack(snapshot))

    def lacking(self) -> str | None:
        if not self._session.coordinates:
            return None
        whole = self._on_all_nodes(None).get("common")
        with suppress(RanksError):
            if self._unsure and self._session.ranks.store.get(_lack(self._unsure[-1])) is not None:
                found = parse_id(whole) if whole is not None else None
                known = "none is known" if found is None else f"step {found.step} is the newest"
                return f"another node lacks its part of the last snapshot, {self._unsure[-1]}; on all nodes {known}"
        return None

    def _leave(self, key: str) -> None:
        self._left.append(key)
        while len(self._left) > _KEPT:
            self._session.ranks.store.remove(self._left.popleft())

    def _on_all_nodes(self, parent: str | None) -> dict[str, Any]:
        """What a job says of it, see `PersistJob`: what all ranks began with is on all nodes, too."""
        session, lacked = self._session, list[str]()
        if not session.led_places:
            return {}
        with suppress(RanksError):
            for snapshot in reversed(self._unsure):
                if session.ranks.store.get(_key(snapshot)) == str(session.led_places):
                    self._newest = snapshot
                    while self._unsure.popleft() != snapshot:
                        pass
                    break
            # The newest stays anyway, so that a healthy run asks for nothing more.
            lacked += [one for one in tuple(self._unsure)[:-1] if session.ranks.store.get(_lack(one)) is not None]
        for one in lacked:
            self._unsure.remove(one)
        return {"common": max(filter(None, (self._newest, parent)), key=seq_of, default=None), "lacked": tuple(lacked)}


def _key(snapshot: str) -> str:
    return f"committed/{snapshot}"


def _lack(snapshot: str) -> str:
    return f"lacked/{snapshot}"
