"""Reaches the places of a run for its trainer: the memory of the writer of one that died, and all tiers.

It knows the line of history that a load goes on with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_engine.config import Config, Tier
from ckpt_engine.errors import CkptError, FormatError, StorageMissingError, WaitTimeoutError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.ranks.session import START_SECONDS, Session
from ckpt_engine.restore import load, memory_shares, places
from ckpt_engine.restore.choose import Candidate, Check
from ckpt_engine.restore.load import Loaded
from ckpt_engine.restore.memory import MemoryPlace, answers, attach, is_held
from ckpt_engine.restore.places import FarStorage, ListedOnce, place_of
from ckpt_engine.snapshot.ownership import Tenure
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import continued
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.writer.primary_tier import let_finish

ATTACH_SECONDS = FINISH_SECONDS = 60.0


class Reach:
    """What one checkpointer restores from. Training thread only.

    Args:
        session: of several ranks; None: this process is alone.
        pipeline: takes the snapshots: it hears what it goes on from.
        emit: takes events.
        owner: says whether another one of this process writes the run.
    """

    def __init__(
        self, config: Config, session: Session | None, pipeline: Pipeline, emit: Callable[[Event], None], owner: Tenure
    ) -> None:
        self._config = config
        self._session = session
        self._pipeline = pipeline
        self._emit = emit
        self._owner = owner
        self._attached: MemoryPlace | None = None
        self._mute = False
        self._far: dict[str, FarStorage] = {}
        self._listed: dict[str, ListedOnce] = {}
        """The further tiers since a snapshot was chosen, by URL: what loads it goes by the same listings."""
        self.away: set[str] = set()
        """Places that the last load has gone without, which it says."""

    def choose(self, step: int | None, check: Check | None) -> Candidate | None:
        """See `Engine.choose`."""
        self._listed.clear()
        if self._session is not None:
            self.attach()
            return load.choose_together(self._session, self._listed_once, step, check)
        return load.choose(self._listed_once(), step, check)

    def load(self, step: int | None, *, back: bool, **how: Any) -> Loaded | None:
        """See `Checkpointer.load`; `how`: as of `load.load`. What is saved from here on comes after it."""
        try:
            if self._session is not None:
                self.attach()
                found = load.load_together(self._session, self._listed_once, step, **how)
            else:
                self._let_finish()
                found = load.load(self._listed_once(), step, **how)
            self._pipeline.lineage.looked(0 if found is None else found.newest_seq)
            if found is not None:
                self.away = {one.url for one in found.away}
                self._go_on(found, newest=step is None, back=back)
        finally:
            self.detach()
        return found

    def _let_finish(self) -> None:
        """Before this process has the lease: the writer of a dead trainer may be about to make something newer."""
        nearest = self._config.tiers[0]
        if self._config.memory is None and nearest.is_folder and not self._pipeline.started:
            folder = open_storage(nearest.url, nearest.for_storage()).capabilities.folder
            if folder is not None:
                let_finish(folder, FINISH_SECONDS, self._emit)

    def go_on_after(self, info: SnapshotInfo) -> None:
        """See `Engine.go_on_after`."""
        self._agree(info, lambda: continued(info, (), ()))

    def _go_on(self, found: Loaded, *, newest: bool, back: bool) -> None:
        self._agree(found.info, lambda: before_of(found, self._listed_once, newest=newest, back=back))

    def _agree(self, info: SnapshotInfo, look: Callable[[], tuple[tuple[str, int], ...]]) -> None:
        """All ranks go on from a snapshot in the line that rank 0 sees."""

        def rows() -> list[list[Any]]:
            return [list(one) for one in look()]

        before = rows() if self._session is None else self._session.agree(rows, START_SECONDS)
        self._pipeline.lineage.go_on(info, tuple((str(attempt), int(last)) for attempt, last in before))

    def nearest(self) -> Repository:
        """The nearest tier. Others are not even opened: that may be slow, too."""
        self._owner.settle_older()
        return place_of(self._config.tiers[0])

    def open_ahead(self) -> None:
        """Have the libraries of object stores imported while something else is waited for; nothing is asked."""
        for tier in self._config.tiers:
            if not tier.is_folder and tier.url not in self._far:
                self._far[tier.url] = storage = FarStorage(tier.url, tier.for_storage())
                threading.Thread(target=storage.open_ahead, name="ckpt-open", daemon=True).start()

    def is_further(self, url: str) -> bool:
        """Whether that is how a further tier is called in events."""
        return any(self._place(tier).storage.url == url for tier in self._config.tiers[1:])

    def _place(self, tier: Tier) -> Repository:
        far = self._far.get(tier.url)
        return place_of(tier) if far is None else Repository(far)

    def places(self) -> list[Repository]:
        """All of them, nearest first."""
        self._owner.settle_older()
        if self._session is None:  # of several ranks all attach at once, and one may look alone
            self.attach()
        memory = [self._attached.repository] if self._attached is not None else []
        return memory + [self._place(tier) for tier in self._config.tiers]

    def _listed_once(self) -> list[Repository]:
        """The same. The nearest tier is listed each time: a writer that ends may still leave a snapshot there."""
        found = self.places()
        further = len(self._config.tiers) - 1
        near, far = found[: len(found) - further], found[len(found) - further :]
        return near + [self._listed.setdefault(one.storage.url, ListedOnce(one.storage)) for one in far]

    def attach(self) -> None:
        """Reach for the snapshot that the writer of a dead trainer offers, before a new writer takes its place."""
        url = self._config.root_url
        if self._attached is not None or self._config.memory is None or self._pipeline.started or self._owner.closed:
            return
        if self._session is not None:
            self._attached, held = memory_shares.attach(self._session, url, ATTACH_SECONDS, self._emit)
        elif not self._answers(url):
            return
        else:
            self._attached = attach(url, ATTACH_SECONDS)
            self._pipeline.behind |= self._attached is not None
            held = self._attached is None and is_held(url, ATTACH_SECONDS)
        if held and self._attached is None:
            self._owner.claim()
            self._pipeline.start()  # with the lease: what is there, and cannot be had from memory, is durable by then

    def _answers(self, url: str) -> bool:
        """Whether a writer can be asked. One that hangs is asked once."""
        try:
            return not self._mute and answers(url)
        except WaitTimeoutError as err:
            self._mute = True
            told = f"{err.message}: what it may have in memory is not waited for; `ckpt status {url}` says how it is"
            self._emit(Notice("WARNING", told))
            return False

    def detach(self) -> None:
        """Give the memory back. The writer that offered it ends when a new one starts, or when it has lingered."""
        self._listed.clear()
        if self._attached is not None:
            self._attached.release(bye=False)
            self._attached = None


TIDY_FROM = 16
"""A line that names so many attempts is looked through for those that have left nothing."""


def before_of(
    found: Loaded, where: Callable[[], Sequence[Repository]], *, newest: bool, back: bool = False
) -> tuple[tuple[str, int], ...]:
    """What is `before` in the line of a process that has loaded `found`; see `retention_rules.continued`.

    Args:
        where: all places; asked for only if it matters what else there is.
        newest: it was asked for the newest usable one: what is newer cannot be used.
        back: what is newer is to be left: the run has diverged in it.
    """
    is_newest = found.newest_seq <= found.info.seq
    if is_newest and len(found.info.line.before) < TIDY_FROM:
        return continued(found.info, (), ())
    try:
        there = places.snapshots(where())
    except CkptError:
        return continued(found.info, (), ()) if is_newest else ()  # who knows what there is
    newer = [info for info in there if info.seq > found.info.seq]
    superseded = {info.id for info in newer} if back else _damaged(found) if newest else set()
    before = continued(found.info, newer, superseded)
    left = {info.line.attempt for info in there}
    return before if found.away else tuple(one for one in before if one[0] in left)


def _damaged(found: Loaded) -> set[str]:
    """What a load has passed over for good. A place that is away may still have it whole."""
    useless = FormatError.code[:-2], StorageMissingError.code
    return set() if found.away else {one.snapshot for one in found.rejected if one.code.startswith(useless)}
