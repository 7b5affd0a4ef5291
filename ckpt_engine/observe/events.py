"""The events of a run, one frozen value per thing that happened.

Events cross the process boundary as JSON (`to_json`, `from_json`), so their fields are JSON values only.
Times are wall-clock seconds since the epoch for display; durations come from monotonic clocks.

`LogSink` writes one line for each event. `announce` shows a line once, also where a program has configured no logging.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ckpt_engine.observe.units import count as count_of
from ckpt_engine.observe.units import duration, paths, size

KINDS: dict[str, type[Event]] = {}
ENDS = CLOSED, FAILED, GONE = "closed", "failed", "gone"
"""How an attempt ends: normally or as it was asked to, by an error, or as a process that disappears."""
PROCESS, MACHINE, SITE = "process", "machine", "site"
"""Classes of failures: what is lost is the trainer; its machine too, with what is in memory; the nearest tier too."""
UNKNOWN = "unknown"
"""A failure of one of these classes."""
LOGGER_NAME = "ckpt_engine"
TENFOLD = 10
WORTH_SAYING = 0.005
"""Useful work that one more percent of budget would bring: with less, users need not hear of their first interval."""
TELL_SECONDS = 3.0
"""A longer wait is said."""


def is_failure(error: BaseException | None) -> bool:
    """Whether a training that ends with this exception has failed.

    `sys.exit(0)`, by which Ray Tune stops a trial, and Optuna's `TrialPruned` end it as they were asked to.
    """
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return "optuna.exceptions.TrialPruned" not in {f"{one.__module__}.{one.__name__}" for one in type(error).__mro__}


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

    `latency_seconds` runs from the snapshot instant to durability; `cpu_seconds` is the writer's CPU time for it;
    `metrics` are those that it was saved with.
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
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotFound(Event):
    """The newest snapshot that `tier` had when the writer took it over; only with a memory tier."""

    snapshot: str
    step: int
    tier: str


@dataclass(frozen=True, slots=True)
class AttemptsFound(Event):
    """How earlier attempts of the run went, as the nearest tier knows it when the writer opens; nothing if of none.

    Args:
        lasted: seconds that each earlier one was known to live, the oldest first.
        failures: the class of the failure that ended it, or `UNKNOWN`; "": none.
        seconds: that the current one has lasted already: its writer was replaced.
        reached: the last step that any of them has completed; -1: not known.
        spent: what went into their time, as `run_times.RunSpent`.
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
    """A tier failed and is left out until it works again; the others continue.

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

    Args:
        gain: what one more percent of budget would add to the share of useful work.
        binding: the constraint that has set it.
    """

    step: int
    interval_steps: int
    why: str
    gain: float = 0.0
    binding: str = ""


@dataclass(frozen=True, slots=True)
class WriterLost(Event):
    """The writer process died; a new one starts at once if it left a snapshot unwritten, else at the next one."""

    message: str


@dataclass(frozen=True, slots=True)
class StaleSnapshot(Event):
    """A durable snapshot has what the snapshot `since` had, although optimizer steps were made in between.

    Args:
        tier: where both are.
        group: of the parameters of an optimizer.
        what: `weights` or `moments` of the group.
        tensors: the first of them; there are `count`.
    """

    snapshot: str
    step: int
    since: str
    since_step: int
    tier: str
    group: str
    what: str
    tensors: tuple[str, ...]
    count: int


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
    """Takes events."""

    def emit(self, event: Event) -> None:
        """Called on the training thread only; must return at once and never raise."""


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON-able dict with its `event` name."""
    return {"event": event.name, **{one.name: getattr(event, one.name) for one in dataclasses.fields(event)}}


def from_json(data: Mapping[str, Any]) -> Event:
    """The inverse of `to_json`; lists become tuples again.

    Raises:
        KeyError: an event name this version does not know.
    """
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "event"}
    return KINDS[data["event"]](**fields)


@dataclass(eq=False)
class LogSink:
    """Logs every event: failures as errors, lost writers as warnings, the routine as info or debug.

    What fails again for the same reason gets a short line each time that the count has a digit more, and one when a
    snapshot is durable there again. Users see an interval that has changed tenfold, and the first one if the budget
    costs more than it saves.
    """

    _failing: dict[str, tuple[tuple[str, str], int]] = field(default_factory=dict, init=False)
    """By tier: why snapshots fail there, and how many have in a row."""
    _interval: int | None = field(default=None, init=False)
    """The one that users know of, or that there was at first."""

    def emit(self, event: Event) -> None:
        level, count = level_of(event), 1
        if isinstance(event, SnapshotFailed):
            count = self._count(event)
            level = level if str(count) == "1" + "0" * (len(str(count)) - 1) else logging.DEBUG
        elif isinstance(event, SnapshotCommitted) and event.tier in self._failing:
            _, failed = self._failing.pop(event.tier)
            LOG.warning("step %d: snapshots become durable on %s again, %d failed", event.step, event.tier, failed)
        elif isinstance(event, IntervalChanged) and self._matters(event):
            often = f"step {event.step:,}: snapshots every {event.interval_steps:,} steps"
            announce(LOG, line(event), line=f"{often} ({event.binding}) → ckpt explain interval")
            return
        if LOG.isEnabledFor(level):
            LOG.log(level, "%s", line(event, count=count))

    def _matters(self, event: IntervalChanged) -> bool:
        """Whether users see it by default."""
        now, known = event.interval_steps, self._interval
        if known is not None and known < TENFOLD * now and now < TENFOLD * known:
            return False
        self._interval = now
        return known is not None or event.gain >= WORTH_SAYING

    def _count(self, event: SnapshotFailed) -> int:
        """How often a snapshot has failed in a row for this reason."""
        # What follows the id in the name of a file is of this snapshot too.
        text = re.sub(re.escape(event.snapshot) + r"\S*", "", event.message) if event.snapshot else event.message
        why = event.code, text
        before, count = self._failing.get(event.tier, (why, 0))
        count = count + 1 if before == why else 1
        self._failing[event.tier] = why, count
        return count


def level_of(event: Event) -> int:
    """The `logging` level an event deserves."""
    match event:
        case SnapshotFailed() | TierDegraded(fatal=True):
            return logging.ERROR
        case (
            SnapshotCommitted()
            | SnapshotReplicated()
            | TierRecovered()
            | TierDegraded(known=True)
            | IntervalChanged()
            | Requested()
        ):
            return logging.INFO
        case WriterLost() | TierDegraded() | StaleSnapshot():
            return logging.WARNING
        case Notice(level=name):
            return logging.getLevelNamesMapping().get(name.upper(), logging.INFO)
        case _:
            return logging.DEBUG


def line(event: Event, *, count: int = 1) -> str:
    """The event in one line for people; `count`: of failures like this one in a row, which get a short line."""
    match event:
        case SnapshotStaged():
            return (
                f"step {event.step}: {size(event.nbytes)} staged, training blocked for {duration(event.stall_seconds)}"
            )
        case SnapshotCommitted():
            return (
                f"step {event.step}: snapshot {event.snapshot} durable on {event.tier} after "
                f"{duration(event.latency_seconds)}, {size(event.written_bytes)} written"
            )
        case SnapshotFound():
            return f"step {event.step}: snapshot {event.snapshot} is the newest on {event.tier}"
        case AttemptsFound():
            failed = sum(kind != "" for kind in event.failures)
            return f"of {count_of(len(event.lasted), 'earlier attempt')} {failed} failed"
        case MemoryFlushed():
            return f"step {event.step}: the newest in memory when that was to become durable; what could, is"
        case SnapshotFailed() if count > 1:
            return (
                f"step {event.step}: {count} snapshots in a row did not become durable, as before [{event.code}]"
                + _hint(event)
            )
        case SnapshotFailed():
            snapshot = f"snapshot {event.snapshot}" if event.snapshot else "its snapshot"  # the writer names it
            return (
                f"step {event.step}: {snapshot} did not become durable on {event.tier}: "
                f"[{event.code}] {event.message}; older snapshots are untouched" + _hint(event)
            )
        case SnapshotSkipped():
            return f"step {event.step}: snapshot postponed ({event.reason}), training continues"
        case SnapshotsForgotten():
            return f"{count_of(len(event.snapshots), 'older snapshot')} forgotten, {size(event.freed_bytes)} freed"
        case SnapshotReplicated():
            return (
                f"step {event.step}: snapshot {event.snapshot} durable on {event.tier} too, "
                f"{size(event.sent_bytes)} sent in {duration(event.copy_seconds)}"
                + (f"; {event.encoding}" if event.encoding else "")
            )
        case TierDegraded():
            return f"{event.tier} failed and is tried again later: [{event.code}] {event.message}"
        case TierRecovered():
            return f"{event.tier} works again after {duration(event.away_seconds)}"
        case IntervalChanged():
            return f"step {event.step}: snapshots {event.why}"
        case StaleSnapshot():
            named = ", ".join(event.tensors) + ("" if event.count == len(event.tensors) else ", …")
            return (
                f"step {event.step}: the snapshot has the {event.what} of step {event.since_step} for {event.group}: "
                f"the optimizer has stepped, and none of {count_of(event.count, 'tensor')} has changed ({named}) → "
                f"`ckpt diff '{event.tier}#{event.since}' '{event.tier}#{event.snapshot}'` shows what has. If these "
                f"change in training, old bytes were saved: resume from step {event.since_step} or earlier. Else look "
                "at the group's gradients, learning rate and dtype"
            )
        case Requested():
            return f"{event.who} asks to {'save now' if event.what == 'save' else event.what}"
        case WriterLost() | Notice():
            return event.message
        case _:
            return repr(event)


def _hint(event: SnapshotFailed) -> str:
    return f" → {event.hint}" if event.hint else ""


class FanOutSink:
    """Passes every event to every sink, in the order they were added.

    A sink that raises is disabled with one warning; training and the other sinks continue.
    """

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Passes later events to `sink` too."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.emit(event)
            except Exception:
                # Whatever a sink of a user raises must not reach the training loop.
                self._sinks = [one for one in self._sinks if one is not sink]
                LOG.warning("%s failed on %s and gets no more events", type(sink).__name__, event.name, exc_info=True)


def clear_bars(_: object = None) -> bool:
    """Clear the bars that tqdm draws on this terminal; each is drawn again below the line that is written now.

    A filter of our loggers: what handles a record writes it next. It waits for no lock of tqdm.
    """
    known = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    terminal = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    # Another thread may make a bar meanwhile, which has no `start_t` before it can be drawn.
    for bar in [reference() for reference in tuple(known._instances.data)] if known is not None else ():
        if hasattr(bar, "start_t") and bar.fp in terminal:
            bar.clear(nolock=True)
    return True


LOG = logging.getLogger(LOGGER_NAME)
"""What is not an adapter's is logged here."""
LOG.addFilter(clear_bars)


def is_heard(logger: logging.Logger) -> bool:
    """Whether a record of level INFO reaches some handler."""
    one: logging.Logger | None = logger
    while one is not None and logger.isEnabledFor(logging.INFO):
        if any(handler.level <= logging.INFO for handler in one.handlers):
            return True
        one = one.parent if one.propagate else None
    return False


def announce(logger: logging.Logger, text: str, *, line: str | None = None) -> None:
    """Log `text` at INFO; without any handler say it on standard error, where Python itself shows warnings then.

    A logger that somebody has given handlers, which do not want the line, stays silent. Standard error is that of the
    moment: rich puts its own in place while it draws a bar.

    Args:
        line: what is said there, if `text` is longer than a line.
    """
    if is_heard(logger):
        logger.info("%s", paths(text))
    elif logging.lastResort is not None and not logger.hasHandlers():
        clear_bars()
        said = paths(text if line is None else line)
        logging.lastResort.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, said, (), None))


@contextmanager
def said_if_slow(line: str | Callable[[], str | None]) -> Iterator[None]:
    """Announce what the block waits for if it takes some seconds.

    Args:
        line: or what makes it then, on another thread; None: there is nothing to say.
    """

    def say() -> None:
        text = line if isinstance(line, str) else line()
        if text is not None:
            announce(LOG, text)

    timer = threading.Timer(TELL_SECONDS, say)
    timer.name, timer.daemon = "ckpt-slow", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(TELL_SECONDS)  # our thread is not left behind
