"""Asks all places of a run at once what they have; one that does not answer in time is left out, and that is said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckpt_engine.errors import CkptError, ForeignError, StorageError
from ckpt_engine.observe.aloud import announce
from ckpt_engine.observe.log import LOGGER_NAME
from ckpt_engine.restore.memory import MemoryStorage
from ckpt_engine.store.layout import ParsedId
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.retries import asking

ANSWER_SECONDS = 20.0
"""How long a place may take to answer, if another one has what is needed."""
LONGER_SECONDS = 120.0
"""The same where no other place has it."""
TELL_SECONDS = 3.0
"""A longer wait is said."""

T = TypeVar("T")


@dataclass(slots=True)
class Answer(Generic[T]):
    """What one place answered: `value`, or `error`. Neither: nothing yet."""

    place: Repository
    value: T | None = None
    error: CkptError | None = None


Patience = Callable[[Sequence[Answer[T]]], float]
"""How many seconds are waited for those that have not answered yet, given all answers so far."""


def until_one_answers(answers: Sequence[Answer[T]]) -> float:
    """Longer until one place has answered."""
    return ANSWER_SECONDS if any(answer.value is not None for answer in answers) else LONGER_SECONDS


def until_one_has_some(answers: Sequence[Answer[T]]) -> float:
    """Longer until one place has snapshots: a run must not begin anew because of a place that is slow."""
    return ANSWER_SECONDS if any(answer.value for answer in answers) else LONGER_SECONDS


def at_most(_: Sequence[Answer[T]]) -> float:
    """Not longer, whoever has answered."""
    return ANSWER_SECONDS


def _say(line: str) -> None:
    announce(logging.getLogger(LOGGER_NAME), line)


_left: dict[str, threading.Thread] = {}
"""By URL the question that a place has left unanswered: it gets no other one before it has answered that."""


def ask(
    places: Sequence[Repository],
    question: Callable[[Repository], T],
    patience: Patience[T] = until_one_answers,
    say: Callable[[str], object] = _say,
) -> list[Answer[T]]:
    """The answers of all places, in their order, asked side by side. A place where nobody listens is away at once.

    Args:
        say: takes the line about a wait of some seconds.

    Raises:
        CkptError: no place answered; the error of the nearest.
    """
    answers: list[Answer[T]] = [Answer(place) for place in places]
    _Round(answers, question, patience, say).wait()
    if all(answer.error is not None for answer in answers):
        assert answers[0].error is not None
        raise answers[0].error
    return answers


class _Round(Generic[T]):
    """One question to several places, each asked on a thread of its own, a daemon: it may hang for ever."""

    def __init__(
        self,
        answers: Sequence[Answer[T]],
        question: Callable[[Repository], T],
        patience: Patience[T],
        say: Callable[[str], object],
    ) -> None:
        self._answers = answers
        self._question = question
        self._patience = patience
        self._say = say
        self._changed = threading.Condition()
        self._open: dict[int, threading.Thread] = {}
        self._broken: BaseException | None = None

    def wait(self) -> None:
        """Ask, and wait for as long as it makes sense. Afterwards each answer has a value or an error.

        Raises:
            BaseException: of the question, if it is none of ours.
        """
        began = time.monotonic()
        for number, answer in enumerate(self._answers):
            url = answer.place.storage.url
            before = _left.get(url)
            if before is not None and before.is_alive():
                answer.error = StorageError(f"{url} has not yet answered what it was asked before")
                continue
            _left.pop(url, None)
            self._open[number] = threading.Thread(target=self._ask, args=(number,), name="ckpt-places", daemon=True)
        for thread in list(self._open.values()):
            thread.start()
        limit = self._wait_since(began)
        with self._changed:
            for number, thread in self._open.items():
                url = self._answers[number].place.storage.url
                self._answers[number].error = StorageError(f"{url} did not answer within {limit:.0f} s")
                _left[url] = thread
            self._open = {}
            if self._broken is not None:
                raise self._broken

    def _wait_since(self, began: float) -> float:
        """Seconds after which the rest was left out."""
        said = 0.0
        while True:
            waited = time.monotonic() - began
            with self._changed:
                limit = self._patience(self._answers)
                if not self._open or waited >= limit:
                    return limit
                if waited < TELL_SECONDS or said == limit:
                    self._changed.wait((limit if said == limit else TELL_SECONDS) - waited)
                    continue
                urls = ", ".join(self._answers[number].place.storage.url for number in sorted(self._open))
                others = any(answer.value is not None for answer in self._answers)
            said = limit
            why = ": no other place has a snapshot" if others and limit > ANSWER_SECONDS else ""
            self._say(f"waiting for {urls}, up to {limit:.0f} s{why}")

    def _ask(self, number: int) -> None:
        value, error, broken = None, None, None
        try:
            with asking():
                value = self._question(self._answers[number].place)
        except CkptError as err:
            error = err
        except BaseException as err:  # noqa: BLE001 - raised where it was asked
            broken = err
        with self._changed:
            if self._open.pop(number, None) is not None:  # else it comes too late
                self._answers[number].value, self._answers[number].error = value, error
                self._broken = self._broken or broken
            self._changed.notify_all()


def of_one_run(answers: Sequence[Answer[T]]) -> Sequence[Answer[T]]:
    """The same answers, in which a place with snapshots of another run than the nearest one's counts as an error.

    A snapshot in memory is left out, as if it was not there, if it is of a run that no other place knows and all of
    them answer: it outlives a folder that was removed to start anew.

    Args:
        answers: to a question that has `look_up_run` among it: nothing is asked here any more.
    """
    answers = _without_memory_of_other_runs(answers)
    ours: str | None = None
    for answer in answers if len(answers) > 1 else ():
        if not answer.value:
            continue  # away, or a record that was never used: such a place joins the run
        found = _run_of(answer.place)
        if found is not None and ours is not None and found != ours:
            answer.value = None
            answer.error = ForeignError(
                f"{answer.place.storage.url} holds another run ({found[:8]}…, this one is {ours[:8]}…)",
                hint="give this run a place of its own",
            )
        ours = ours or found
    return answers


def _without_memory_of_other_runs(answers: Sequence[Answer[T]]) -> Sequence[Answer[T]]:
    others = [answer for answer in answers if not _in_memory(answer)]
    known = {_run_of(answer.place) for answer in others if answer.error is None}
    if known <= {None} and any(answer.error is not None for answer in others):
        return answers  # whoever is away may know it
    return [answer for answer in answers if not _in_memory(answer) or not others or _run_of(answer.place) in known]


def _in_memory(answer: Answer[T]) -> bool:
    return isinstance(answer.place.storage, MemoryStorage)


def look_up_run(place: Repository) -> None:
    """Have the run's record read. Where it is missing or damaged the snapshots may be good all the same."""
    with suppress(CkptError):
        place.record()


def _run_of(place: Repository) -> str | None:
    try:
        record = place.record()
    except CkptError:
        return None
    return record.run if record is not None else None


def ids(place: Repository) -> tuple[ParsedId, ...]:
    """All snapshots of a place by name."""
    look_up_run(place)
    return place.ids()


def infos(place: Repository) -> list[SnapshotInfo]:
    """All snapshots of a place."""
    look_up_run(place)
    return place.list()


def snapshots(places: Sequence[Repository]) -> list[SnapshotInfo]:
    """The snapshots that any place has, oldest first.

    Raises:
        CkptError: no place answers.
    """
    found: dict[str, SnapshotInfo] = {}
    for answer in of_one_run(ask(places, infos)):
        for info in answer.value or ():
            found.setdefault(info.id, info)
    return sorted(found.values(), key=lambda info: (info.seq, info.id))
