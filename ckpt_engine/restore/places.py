"""Asks all places of a run at once what they have; one that does not answer is left out, and that is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckpt_engine.errors import CkptError, ForeignError, StorageError
from ckpt_engine.restore.memory import MemoryStorage
from ckpt_engine.store.layout import ParsedId
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository

ANSWER_SECONDS = 120.0
"""How long a place may take to list its snapshots, if there are others."""

T = TypeVar("T")


@dataclass(slots=True)
class Answer(Generic[T]):
    """What one place answered: `value`, or `error`."""

    place: Repository
    value: T | None = None
    error: CkptError | None = None


def ask(
    places: Sequence[Repository], question: Callable[[Repository], T], timeout: float = ANSWER_SECONDS
) -> list[Answer[T]]:
    """The answers of all places, in their order. Asked one place alone: no thread, no limit.

    Raises:
        CkptError: no place answered; the error of the nearest.
    """
    answers: list[Answer[T]] = [Answer(place) for place in places]
    if len(answers) == 1:
        _ask(answers[0], question)
    else:
        _ask_all(answers, question, timeout)
    if all(answer.error is not None for answer in answers):
        assert answers[0].error is not None
        raise answers[0].error
    return answers


def _ask_all(answers: Sequence[Answer[T]], question: Callable[[Repository], T], timeout: float) -> None:
    # Daemons: a place that hangs must not hold up the end of the process.
    threads = [
        threading.Thread(target=_ask, args=(answer, question), name="ckpt-places", daemon=True) for answer in answers
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread, answer in zip(threads, answers, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            answer.error = StorageError(f"{answer.place.storage.url} did not answer within {timeout:.0f} s")


def _ask(answer: Answer[T], question: Callable[[Repository], T]) -> None:
    try:
        value = question(answer.place)
    except CkptError as err:
        answer.error = err
    else:
        if answer.error is None:
            answer.value = value


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
