"""A further tier as copies go there, without its lease."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckpt_engine.copy.codec_selector import CodecSelector, EncodeStats
from ckpt_engine.copy.encoded_copy import put_encoded
from ckpt_engine.copy.job import TierConfig
from ckpt_engine.copy.transfer import Copied, CopySourceError, RunText, copy_data, scratch_of
from ckpt_engine.copy.write_snapshot import Staged
from ckpt_engine.errors import CkptError, StorageStalledError, WaitTimeoutError
from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.store.manifest import Line, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.watchdog import ResponsivenessProbe, StuckCallRunner, WatchedSource
from ckpt_engine.writer.copy_schedule import CopySchedule


@dataclass(frozen=True, slots=True)
class TierPlace:
    """One tier as a writer reaches it: storages at the same place, and the lanes that calls to them run in.

    Args:
        plain: for its lease, which is renewed whatever hangs; watched for signs only, as all others are too.
        copies: for everything else that copying needs, at the tier's bandwidth; watched by `copy_lane`.
        direct: where snapshots are written that no nearer tier takes; watched by `direct_lane`.
        copy_lane, direct_lane: each runs one call at a time.
        signs: of life, from the place.
    """

    plain: Storage
    copies: Storage
    direct: Repository
    copy_lane: StuckCallRunner
    direct_lane: StuckCallRunner
    signs: ResponsivenessProbe


@dataclass(frozen=True, slots=True)
class CopySource:
    """A snapshot to copy, and the nearest place that has it."""

    info: SnapshotInfo
    source: Repository


@dataclass(eq=False)
class NearerTiers:
    """What one further tier is copied from.

    Args:
        sources: all nearer tiers, the nearest first.
    """

    sources: Sequence[WatchedSource]
    damaged: set[tuple[str, str]] = field(default_factory=set, init=False)
    """URLs of tiers, and snapshots that are not copied from there."""
    copied: dict[str, tuple[int, str]] = field(default_factory=dict, init=False)
    """What further records were copied, see `rows.copy_rows`."""

    @property
    def nearest(self) -> Repository:
        """The nearest tier."""
        return self.sources[0].repository

    def find(self, counts: Callable[[SnapshotInfo], bool]) -> tuple[dict[str, CopySource], bool]:
        """All snapshots that a nearer tier has, each from the nearest that can be read; whether all tiers could be.

        Args:
            counts: whether a snapshot is one to copy.

        Raises:
            CopySourceError: no tier can be read.
        """
        found: dict[str, CopySource] = {}
        error: CkptError | None = None
        readable = False
        for source in self.sources:
            repository = source.repository
            if not source.usable():
                error = error or StorageStalledError(f"{repository.storage.url} hangs")
                continue
            try:
                infos = repository.list()
            except CkptError as err:
                error = err
                continue
            readable = True
            for info in infos:
                if counts(info) and (repository.storage.url, info.id) not in self.damaged:
                    found.setdefault(info.id, CopySource(info, repository))
        if not readable and error is not None:
            raise CopySourceError(error)
        return found, error is None

    def scratch(self) -> str | None:
        """A local folder for temporary files, if there is one."""
        return next((path for one in self.sources if one.usable() and (path := scratch_of(one.storage))), None)


@dataclass(eq=False)
class CopyProgress:
    """How far the copies to one tier are.

    Attributes:
        copying: what is copied now.
        newest: the newest snapshot there.
        waiting: what is to be copied, newest first.
        sent_bytes: so far.
    """

    copying: SnapshotInfo | None = field(default=None, init=False)
    newest: SnapshotInfo | None = field(default=None, init=False)
    waiting: tuple[SnapshotInfo, ...] = field(default=(), init=False)
    sent_bytes: int = field(default=0, init=False)

    @contextmanager
    def under_way(self, info: SnapshotInfo) -> Iterator[None]:
        """The block copies this snapshot."""
        self.copying = info
        try:
            yield
        finally:
            if self.copying is info:  # else it was left behind in its source, and another copy is under way
                self.copying = None


class CopyTarget(abc.ABC):
    """A further tier as copies go there. `advance` and `release` run in the copy lane, the rest anywhere.

    Args:
        config: where and how.
        place: at `config.url`.
        nearer: what is copied from.

    `run` MUST be set before the first `advance`. `line` is that of the trainer, None until it has made a snapshot: so
    long nothing is removed.
    """

    run: RunText
    line: Line | None = None
    damaged: Sequence[str] = ()
    """Data files that are not referred to."""

    def __init__(self, config: TierConfig, place: TierPlace, nearer: NearerTiers) -> None:
        self.config = config
        self.place = place
        self.nearer = nearer
        self.encoding = CodecSelector(config.codec)
        self.schedule = CopySchedule(config.every_seconds, config.every_n_steps, policy_from(config.keep))
        self.progress = CopyProgress()

    @property
    def url(self) -> str:
        """How it is called in messages."""
        return self.place.plain.url

    @property
    def is_open(self) -> bool:
        """Whether its lease is ours."""
        return False

    @abc.abstractmethod
    def advance(self) -> float | None:
        """Copy the snapshot that is wanted most.

        Returns:
            Seconds until there may be more to do, 0.0 where one was copied. None: when there is something new.

        Raises:
            CkptError: of the tier. What was begun is not visible there; calling again continues.
            CopySourceError: no nearer tier can be read now.
        """

    def write(self, staged: Staged) -> SnapshotCommitted:  # noqa: ARG002 - it is not open
        """Make a snapshot durable here that no nearer tier takes, as this tier stores it. Runs in the direct lane.

        Raises:
            WaitTimeoutError: the tier is not open, or busy for too long.
            StorageFullError: it does not fit within the limits of the tier.
            CkptError: it is not durable.
        """
        raise WaitTimeoutError(f"{self.url} is not ready")

    def release(self) -> None:  # noqa: B027 - it may have none
        """Give back the lease; `advance` takes it again. Never raises: an unreachable tier does not receive it."""

    def leave_source(self) -> str | None:
        """If `advance` hangs in a nearer tier: make it end there, and go without that one; its URL."""
        for source in self.nearer.sources:
            if source.leave():
                self.progress.copying = None
                return source.storage.url
        return None

    def _of_line(self, infos: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """Those of the trainer's line, once that is known: what others have there is no reason to copy less."""
        return [info for info in infos if self.line is None or self.line.has(info)]

    def _wanted(self, near: Sequence[SnapshotInfo], there: Sequence[SnapshotInfo]) -> tuple[SnapshotInfo, ...]:
        """What is to be copied, newest first."""
        return tuple(self.schedule.wanted(self._of_line(near), self._of_line(there)))

    def _put(self, source: Repository, target: Repository, manifest: Manifest) -> tuple[Manifest, Copied]:
        """See `transfer.Put`; as the tier stores it."""
        tally, pick, began = EncodeStats(), self.encoding.pick(), time.monotonic()
        if pick is None:
            stored, copied = copy_data(source, target, manifest, scratch=self.nearer.scratch())
            tally.put_bytes, tally.put_seconds = copied.sent_bytes, time.monotonic() - began
        else:
            stored, copied = put_encoded(source, target, manifest, pick, tally)
        self.encoding.done(tally)
        return stored, copied
