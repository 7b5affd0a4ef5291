"""What a snapshot is asked for with, the id that all ranks give it, and the promise (`SaveHandle`) that the user gets.

Every rank counts the snapshots of all ranks alike, also those that it has no part in. With replication the next
snapshot into memory waits until partners have the one before (`Mirroring`). Where each node has a root of its own, no
node removes a snapshot before all have a newer one (`Common`): each leader counts up a number in the ranks' store when
its node has committed a snapshot, and rank 0 looks once per snapshot, without a wait.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, Self

import torch

from ckpt_engine.copy.job import PersistJob
from ckpt_engine.errors import CkptError, RanksError, SnapshotFailedError, SnapshotSkippedError, WaitTimeoutError
from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot import arguments
from ckpt_engine.snapshot.arguments import seconds
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.state.layout import CapturedState
from ckpt_engine.store.manifest import Line
from ckpt_engine.store.names import parse_id


@dataclass(frozen=True, slots=True)
class Instant:
    """When a snapshot is of, in wall-clock and monotonic seconds, the id that all ranks gave it, and its parent."""

    created: float
    monotonic: float
    snapshot: str | None
    parent: str | None


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

    def job(
        self, capture: CapturedState, number: int, slot: int, when: Instant, rank: int, common: str | None, line: Line
    ) -> PersistJob:
        """The writer's job; see there."""
        return PersistJob(
            job=number,
            slot=slot,
            values=capture.values,
            step=self.step,
            epoch=self.epoch,
            reason=self.reason,
            metrics=dict(self.metrics),
            created=when.created,
            instant_monotonic=when.monotonic,
            parent=when.parent,
            notes=self.notes,
            software=software(),
            snapshot=when.snapshot,
            rank=rank,
            common=common,
            line=line,
        )


WAIT_SECONDS = 3600.0
"""Of waits without a timeout of their own: forever, but for a fault of ours."""


class SaveOutcomes(Protocol):
    """Where a handle learns what became of its snapshot; see `Pipeline`."""

    def poll(self) -> None: ...

    def wait_for(self, handle: SaveHandle, timeout: float | None) -> bool: ...


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

    Example:
        >>> handle = ckpt.save(state, step=step)
        >>> if handle.skipped is None:
        ...     print(handle.wait(timeout=60))  # its id
    """

    def __init__(self, pipeline: SaveOutcomes, step: int, *, durable: bool = True, skipped: str | None = None) -> None:
        self._pipeline = pipeline
        self.step = step
        self.stall_seconds = 0.0
        self.skipped = skipped
        self.durable = durable
        self.held = False
        self.snapshot: str | None = None
        self.error: CkptError | None = None

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
        most = seconds("timeout", timeout)
        if self.skipped is not None:
            raise SnapshotSkippedError(f"the snapshot of step {self.step} was skipped ({self.skipped})")
        if not self._pipeline.wait_for(self, most):
            raise WaitTimeoutError(
                f"the snapshot of step {self.step} is not {'durable' if self.durable else 'with the writer'} yet"
            )
        if self.error is not None:
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


def wait_seconds(timeout: float | None) -> float:
    """How long a wait may take for which the user has given `timeout`."""
    return WAIT_SECONDS if timeout is None else timeout


@cache
def software() -> Mapping[str, str]:
    """Versions that bear on whether a resumed run can be bitwise the same."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("ckpt-engine", "numpy", "lightning", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Numbering:
    """Gives ids to the snapshots of one rank. Training thread only.

    Args:
        session: of the ranks; None: this one is alone, and its writer numbers the snapshots.
        cancel: tells the others that this rank has no part in a snapshot, and why.
    """

    def __init__(self, session: Session | None, cancel: Callable[[str, str], None]) -> None:
        self._session = session
        self._cancel = cancel
        self.common = Common(session)

    @property
    def lacks_session(self) -> bool:
        """Whether the ranks have still to agree on their numbers: a writer has to start first."""
        return self._session is not None and not self._session.is_open

    @property
    def rank(self) -> int:
        return 0 if self._session is None else self._session.ranks.rank

    def take(self, wanted: Request, parent: str | None, save: Callable[[str | None], SaveHandle]) -> SaveHandle:
        """Let `save` take the snapshot of that id. Whatever fails in it: all ranks go on counting alike."""
        if self._session is None:
            return save(None)
        snapshot = self._session.number(wanted.step, parent)
        why = "it failed there"
        try:
            handle = save(snapshot)
            why = handle.skipped or ""
        finally:
            if why:
                self._tell(snapshot, why, durable=wanted.durable)
        return handle

    def miss(self, step: int, parent: str | None, why: str, *, durable: bool = True) -> None:
        """This rank takes no snapshot of `step` though all ranks do: it is counted, and no rank waits for this one."""
        if self._session is not None and self._session.is_open:
            snapshot = self._session.number(step, parent)
            self._tell(snapshot, why, durable=durable)

    def _tell(self, snapshot: str, why: str, *, durable: bool) -> None:
        if durable:
            self._cancel(snapshot, why)
        elif self._session is not None:
            miss(self._session, snapshot)


PATIENCE_SECONDS = 30.0
"""How long a partner that is gone keeps snapshots from being taken; that is known by then."""
_MISSED = "missed"


class Mirroring:
    """What rank 0 knows of the partners of all ranks; other ranks, and runs without replication, know nothing.

    So each snapshot in memory is with the partners before the next one is taken, and all ranks mirror the same ones.
    Nothing is waited for: training goes on without snapshots in memory meanwhile. Training thread only.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session if session is not None and session.replicates and session.coordinates else None
        self._waits_for: int | None = None
        self._since = 0.0

    @property
    def keeps_up(self) -> bool:
        """Whether another snapshot may be taken into memory."""
        if self._waits_for is not None and (time.monotonic() - self._since > PATIENCE_SECONDS or self._is_missed()):
            self._waits_for = None
        return self._waits_for is None

    def _is_missed(self) -> bool:
        """Whether a rank has said that it did not take what is waited for."""
        missed = self._session.ranks.store.get(_MISSED) if self._session is not None else None
        return missed is not None and self._waits_for is not None and _number(missed) >= self._waits_for

    def took(self, snapshot: str | None) -> None:
        """That one is to be mirrored by all ranks."""
        if self._session is not None and snapshot is not None:
            self._waits_for, self._since = _number(snapshot), time.monotonic()

    def mirrored(self, snapshot: str) -> None:
        """All partners have it. Where they are slow a newer one takes the place of one that waits."""
        if self._waits_for is not None and _number(snapshot) >= self._waits_for:
            self._waits_for = None


def miss(session: Session, snapshot: str) -> None:
    """This rank has not taken a snapshot into memory that others may have: rank 0 need not wait for its keepers."""
    if session.replicates and not session.coordinates:
        with suppress(RanksError):  # rank 0 is gone: it does not wait
            session.ranks.store.set(_MISSED, snapshot)


def _number(snapshot: str) -> int:
    parsed = parse_id(snapshot)
    assert parsed is not None
    return parsed.seq


_ASKED = 8
"""The newest snapshots of this node that are asked for; all older ones failed somewhere."""
_KEPT = 64
"""Numbers in the store that rank 0 leaves: more than leaders can be behind it."""


class Common:
    """What a leader of one of several places knows; others, and runs with one place, know nothing.

    Training thread only.

    Args:
        session: of the ranks; None: this one is alone.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._newest: str | None = None
        self._unsure: deque[str] = deque(maxlen=_ASKED)
        self._counted: deque[str] = deque()

    def committed(self, snapshot: str | None) -> str | None:
        """This node has it; returns it. None: it has come to nothing."""
        session = self._session
        if session is None or not session.led_places or snapshot is None:
            return snapshot
        self._unsure.append(snapshot)
        with suppress(RanksError):  # the ranks are gone: then nothing is removed any more
            session.ranks.store.add(_key(snapshot))
            if session.coordinates:
                self._tidy(snapshot)
        return snapshot

    def newest(self, parent: str | None) -> str | None:
        """The newest snapshot that all nodes have, or that all ranks began with; None: not known, or of no use.

        Args:
            parent: what the run resumed from.
        """
        session = self._session
        if session is None or not session.led_places:
            return None
        with suppress(RanksError):
            for snapshot in reversed(self._unsure):
                if session.ranks.store.get(_key(snapshot)) == str(session.led_places):
                    self._newest = snapshot
                    while self._unsure.popleft() != snapshot:
                        pass
                    break
        return max(filter(None, (self._newest, parent)), key=_age, default=None)

    def _tidy(self, snapshot: str) -> None:
        assert self._session is not None
        self._counted.append(snapshot)
        while len(self._counted) > _KEPT:
            self._session.ranks.store.remove(_key(self._counted.popleft()))


def _key(snapshot: str) -> str:
    return f"committed/{snapshot}"


def _age(snapshot: str) -> int:
    parsed = parse_id(snapshot)
    return parsed.seq if parsed is not None else -1
