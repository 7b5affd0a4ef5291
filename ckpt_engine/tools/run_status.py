"""How a run is at one moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt_engine.config import Config
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.resume_report import Replay, replay_of
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.observe.units import age, first
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.tools.live_run import LiveWriter
from ckpt_engine.tools.recorded_attempts import history_of
from ckpt_engine.tools.stored_run import find_run, repository_of
from ckpt_engine.writer.run_records import WORKING, TierStatus, WriterStatus, read_status

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TierReading:
    """One tier.

    Args:
        snapshots: that it has, as asked now; None: it was not asked, or does not answer.
        damaged: those that are known to be damaged, which are not among them.
        newest: of them.
        error: why it does not answer.
        writer: what its writer said last.
    """

    url: str
    snapshots: int | None
    newest: SnapshotInfo | None
    error: str | None
    writer: TierStatus | None
    damaged: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """What its writer says of it, or that it says nothing; empty: there is nothing to say."""
        if self.error is not None:
            return "no answer"
        return "not asked" if self.snapshots is None else self.writer.state if self.writer is not None else ""

    def troubles(self, number: int) -> list[str]:
        """What is wrong with it, for people."""
        found = [f"tier {number} does not answer: {self.error}"] if self.error is not None else []
        if (said := self.writer) is not None and said.state != WORKING:
            found.append(f"tier {number} failed {age(said.since)}: [{said.code}] {said.message}")
        if self.damaged:
            found.append(f"tier {number}: {first(self.damaged, 1)} damaged; `ckpt ls {self.url}` says why")
        return found


@dataclass(frozen=True, slots=True)
class RunReading:
    """A run.

    Args:
        tiers: nearest first; of a folder those that its writer names, too.
        holder: the process that writes the run; None: there is none, or it is not known.
        status: what its writer said last; None: nothing, or it cannot be read.
        unread: what is wrong with records of the run.
        live: the writer on this machine.
        spent: what the time of the run went into; None: not known.
        replay: whether the last resume is exact; None: not known.
    """

    tiers: tuple[TierReading, ...]
    holder: LeaseHolder | None
    status: WriterStatus | None
    unread: tuple[str, ...]
    live: LiveWriter | None
    spent: RunSpent | None
    replay: Replay | None


def read_run(config: Config, say: Callable[[str], object]) -> RunReading:
    """How the run is now. All tiers of a ckpt.yaml are asked; of a folder or URL, that one.

    Args:
        say: takes the line about a wait of some seconds.

    Raises:
        StorageMissingError: there is no run.
        SealError: it is sealed, and there is no key.
        CkptError: no tier answers.
    """
    repositories = list(map(repository_of, config.tiers))
    answers = ask_tiers.ask(repositories, Repository.scan, ask_tiers.at_most, say)
    # A nearest tier that does not answer is not asked once more: it may hang.
    near = repositories[0] if answers[0].error is None else None
    unread: list[str] = []
    status = known(lambda: read_status(near.storage), unread) if near else None
    history = known(lambda: history_of(config, near.storage), unread) if near else None
    live = LiveWriter.of(config.root_url)
    statuses = {tier.url: tier for tier in status.tiers} if status else {}
    tiers = [
        TierReading(
            answer.place.storage.url,
            None if answer.value is None else len(answer.value.snapshots),
            answer.value.snapshots[-1] if answer.value is not None and answer.value.snapshots else None,
            f"[{answer.error.code}] {answer.error.message}" if answer.error else None,
            statuses.pop(answer.place.storage.url, None),
            () if answer.value is None else tuple(one.id for one in answer.value.damaged),
        )
        for answer in answers
    ]
    tiers += [TierReading(tier.url, None, None, None, tier) for tier in statuses.values()]
    if status is None and live is None and not any(tier.newest or tier.error for tier in tiers):
        find_run(config.root_url, config, say)  # says what is wrong, where something is
    holder = read_holder(near.storage) if near else None
    spent = history.spent if history is not None and history.attempts else None
    return RunReading(tuple(tiers), holder, status, tuple(unread), live, spent, replay_of(config.root_url))


def known(read: Callable[[], T], problems: list[str]) -> T | None:
    """What is read; None: it cannot be, and the problems say why."""
    try:
        return read()
    except CkptError as err:
        problems.append(str(err))
        return None
