"""What asks a run to stop, as values: a notice of it, and the stop that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

EXIT_CODE_OF_NOTICES = 143
"""As if SIGTERM had come: schedulers take it for a job that was stopped and is not complete."""


@dataclass(frozen=True, slots=True)
class StopNotice:
    """Somebody wants the run to stop.

    Args:
        who: for people, e.g. `SIGTERM` or `the file /run/STOP`.
        instant: monotonic seconds at which it was noticed.
        grace_seconds: until the process is killed; None: as configured.
        exit_code: with which the process ends.
        interrupts: it is a Ctrl-C: training ends with `KeyboardInterrupt`.
    """

    who: str
    instant: float
    grace_seconds: float | None = None
    exit_code: int = EXIT_CODE_OF_NOTICES
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """The run stops: everything must be over at `deadline` (monotonic seconds)."""

    notice: StopNotice
    deadline: float


class PreemptionSource(Protocol):
    """Something that may know that the process is about to be stopped. Used by one thread.

    Args:
        every_seconds: how often it is asked.
    """

    @property
    def every_seconds(self) -> float: ...

    def poll(self) -> StopNotice | None:
        """A notice, if there is one now. Returns within some seconds.

        Raises:
            SourceError: the source does not answer; it is asked again later.
        """
        ...


class SourceError(Exception):
    """A preemption source did not answer. Reported once, and never to the user's code."""
