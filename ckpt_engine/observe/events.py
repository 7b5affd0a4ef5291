"""The events of a run: one frozen value per thing that happened, and the sink that takes them.

Events cross the process boundary as JSON (`to_json`, `from_json`), so their fields are JSON values only.
Times are wall-clock seconds since the epoch for display; durations come from monotonic clocks.

The clock everything that measures time is given, so that tests can own time.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `name` identifies the kind on the wire and in logs: that of the class, in small letters."""

    name: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.name] = cls


@dataclass(frozen=True, slots=True)
class SnapshotStaged(Event):
    """The state left the training thread; `stall_seconds` is what training paid so far (capture, staging, fence).

    `durable`: it is on its way to a tier that keeps it; else it stays in memory only.
    """

    snapshot: str
    step: int
    stall_seconds: float
    nbytes: int
    durable: bool = True


@dataclass(frozen=True, slots=True)
class SnapshotCommitted(Event):
    """The snapshot is durable on `tier`.

    `latency_seconds` runs from the snapshot instant to durability; `cpu_seconds` is the writer's CPU time for it.
    """

    snapshot: str
    step: int
    tier: str
    nbytes: int
    written_bytes: int
    latency_seconds: float
    write_seconds: float
    cpu_seconds: float
    time: float


@dataclass(frozen=True, slots=True)
class SnapshotFound(Event):
    """The newest snapshot that `tier` had when the writer took it over; only with a memory tier."""

    snapshot: str
    step: int
    tier: str


ENDS = CLOSED, FAILED, GONE = "closed", "failed", "gone"
"""How an attempt ends: by itself or as it was asked to, by an error, or as a process that disappears."""
PROCESS, MACHINE, SITE = "process", "machine", "site"
"""Classes of failures: what is lost is the trainer; its machine too, with what is in memory; the nearest tier too."""
UNKNOWN = "unknown"
"""A failure of one of these classes."""


@dataclass(frozen=True, slots=True)
class AttemptsFound(Event):
    """How earlier attempts of the run went, as the nearest tier knows it when the writer opens; nothing if of none.

    Args:
        lasted: seconds that each earlier one was known to live, the oldest first.
        failures: the class of the failure that ended it, or `UNKNOWN`; "": none.
        seconds: that the current one has lasted already: its writer was replaced.
        reached: the last step that any of them has completed; -1: not known.
        spent: what went into their time, as `metrics.RunSpent`.
        until: wall-clock seconds at which the last of them was known to live; 0.0: there is none.
    """

    lasted: tuple[float, ...]
    failures: tuple[str, ...]
    seconds: float = 0.0
    reached: int = -1
    spent: Mapping[str, float] = field(default_factory=dict)
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotFailed(Event):
    """The snapshot did not become durable; everything older is untouched. `code` and `hint` are those of the error."""

    snapshot: str
    step: int
    tier: str
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class MemoryFlushed(Event):
    """The writer was asked to make durable what was only in memory, `step` the newest of it, and is done with that.

    Of several ranks that is what all of them had, which may be older, or nothing. `instant_monotonic`: when it was.
    """

    step: int
    instant_monotonic: float


@dataclass(frozen=True, slots=True)
class SnapshotSkipped(Event):
    """A due snapshot was not taken (`reason`: busy, accumulating, ...); training was not blocked."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotsForgotten(Event):
    """Retention removed these snapshots; `freed_bytes` counts the data collected with them."""

    snapshots: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotReplicated(Event):
    """A further tier has the snapshot too, durably.

    `latency_seconds` runs from the snapshot's creation, `copy_seconds` is the copy itself; `sent_bytes` leaves out what
    an interrupted copy had sent before; `encoding` says in one line how the tier's codec did, if it has one.
    """

    snapshot: str
    step: int
    tier: str
    sent_bytes: int
    copy_seconds: float
    latency_seconds: float
    time: float
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class TierDegraded(Event):
    """A tier failed and is left out until it works again; the others go on.

    Args:
        fatal: training is to stop for it.
        known: the resume has said already that it does not answer.
    """

    tier: str
    code: str
    message: str
    fatal: bool = False
    known: bool = False


@dataclass(frozen=True, slots=True)
class TierRecovered(Event):
    """A tier that had failed works again, after `away_seconds`."""

    tier: str
    away_seconds: float


@dataclass(frozen=True, slots=True)
class IntervalChanged(Event):
    """The frequency policy changed its interval; `why` is the one-line explanation for people.

    `gain`: what one more percent of budget would add to the share of useful work.
    """

    step: int
    interval_steps: int
    why: str
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class WriterLost(Event):
    """The writer process died; a new one is started at the next snapshot."""

    message: str


@dataclass(frozen=True, slots=True)
class StaleSnapshot(Event):
    """None of the `tensors` that train has changed since the snapshot of `since_step`."""

    step: int
    since_step: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Requested(Event):
    """Somebody on this machine asked the run to `save` or to `stop`; `who` is for people."""

    what: str
    who: str


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """Something worth a log line that changes nothing else. `level` is a `logging` level name."""

    level: str
    message: str


class EventSink(Protocol):
    """Takes events. Called on the training thread only; must return at once and never raise."""

    def emit(self, event: Event) -> None: ...


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON-able dict with its `event` name."""
    return {"event": event.name, **dataclasses.asdict(event)}


def from_json(data: Mapping[str, Any]) -> Event:
    """The inverse of `to_json`; lists become tuples again.

    Raises:
        KeyError: an event name this version does not know.
    """
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "event"}
    return KINDS[data["event"]](**fields)


class Clock(Protocol):
    """Two readings: one for durations, one for people. Both in seconds."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back; the only source of durations."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for display and ordering by people only: it may jump."""
        ...


class SystemClock:
    """The machine's clocks. `monotonic` is comparable between processes of one boot."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
