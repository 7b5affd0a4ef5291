"""Asks a run that trains on this machine, through its writer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import psutil

from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.observe import units
from ckpt_engine.writer import control

LIVE_SECONDS = 5.0
"""How long a writer may take to answer a command that has more to show."""
ANSWER_SECONDS = 10.0
"""The same where the answer is all that is wanted."""
LOOK_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LiveWriter:
    """What the writer of the run on this machine says of itself; `error`: that it does not answer, and how.

    Args:
        trainer: whether its trainer lives.
        held_step, held_age_seconds, held_durable: of the snapshot that it keeps in memory.
        training_step: that the trainer has begun, where it says so.
        interval_steps, why: how often it takes snapshots, and what decides that.
        spent: what the trainer says of its time, as `pulse.SpentTimes`.
        events: the newest of the writer, each with its wall-clock time.
        rates: bytes per second of the newest snapshots, by place; None: not known.
    """

    pid: int | None
    trainer: bool = False
    held_step: int | None = None
    held_age_seconds: float | None = None
    held_durable: bool = False
    training_step: int | None = None
    interval_steps: int | None = None
    why: str | None = None
    error: str | None = None
    spent: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[tuple[float, str]] = ()
    rates: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str) -> Self | None:
        """That of the run at a root's URL; None: there is none."""
        try:
            body = ask_writer(url, LIVE_SECONDS)
        except (CkptError, OSError) as err:
            return cls(None, error=str(err))
        if not body:
            return None
        held, created = body.get("held") or {}, body.get("held_created")
        pace = body.get("pace") or {}
        return cls(
            pid=body.get("pid"),
            trainer=bool(body.get("trainer")),
            held_step=held.get("step"),
            held_age_seconds=None if created is None else max(0.0, time.time() - created),
            held_durable=bool(held.get("durable")),
            training_step=(body.get("beat") or {}).get("step"),
            interval_steps=pace.get("interval_steps"),
            why=pace.get("why"),
            spent=body.get("spent") or {},
            events=body.get("events", ()),
            rates=body.get("rates", {}),
        )

    def lines(self) -> list[str]:
        """For people."""
        if self.error is not None:
            return [f"its writer does not answer: {self.error}"]
        parts = [f"its writer is process {self.pid}", "its trainer lives" if self.trainer else "its trainer is gone"]
        if self.training_step is not None:
            parts.append(f"step {self.training_step} has begun")
        if self.held_step is not None:
            taken = units.duration(self.held_age_seconds or 0.0)
            durable = "durable" if self.held_durable else "not durable yet"
            parts.append(f"step {self.held_step} is in memory, {durable}, taken {taken} ago")
        return ["; ".join(parts)] + ([f"snapshots {self.why}"] if self.why else [])


def ask_writer(url: str, seconds: float) -> Mapping[str, Any]:
    """What the writer of the run at a root's URL says of itself; nothing: there is none on this machine.

    Raises:
        CkptError, OSError: it does not answer within so many seconds.
    """
    reply = control.ask(url, {"what": control.Question.STATUS}, seconds)
    return {} if reply is None else reply.body


def ask_trainer(url: str, what: str) -> None:
    """Tell the trainer of the run at a root's URL to `save` or to `stop`.

    Raises:
        WriterError: no process trains that run on this machine as this user.
    """
    reply = control.ask(url, {"what": what, "who": _who()}, ANSWER_SECONDS)
    if reply is None:
        raise WriterError(
            f"no run at {url} is being trained on this machine by this user",
            hint=f"`ckpt status {url}` says who writes it; ask on that machine, with the root that the run was given",
        )
    if not reply.body.get("trainer"):
        why = reply.body.get("error", "its trainer has died, and its writer is about to end")
        raise WriterError(f"the run at {url} cannot be asked: {why}")


def is_trained(url: str) -> bool:
    """Whether the run still has a writer with a trainer."""
    return bool(ask_writer(url, ANSWER_SECONDS).get("trainer"))


def wait_for(look: Callable[[], T], seconds: float, what: str) -> T:
    """Look again and again until something is found.

    Raises:
        WaitTimeoutError: `what` did not happen within `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (found := look()):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"{what} within {seconds:g} s; the run has the request, and carries it out later")
        pause.wait(LOOK_SECONDS)
    return found


def _who() -> str:
    return f"{psutil.Process().username()} (pid {os.getpid()})"  # the number of a user without a name, as in containers
