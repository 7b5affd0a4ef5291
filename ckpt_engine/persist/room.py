"""Room for the next snapshot: made before it is written, and foreseen before the first one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from ckpt_engine.store import layout, manifest_codec
from ckpt_engine.store.collect import Pruned, make_room
from ckpt_engine.store.lease import Lease
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.preflight import preflight
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import Limits, Retention, RetentionPolicy

ROOMY_BYTES = 256 << 20
"""With so much left beside the data nobody asks how big the manifest will be."""

Warn = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Also(Container[str]):
    """One more snapshot that is being written."""

    snapshot: str
    others: Container[str]

    def __contains__(self, snapshot: object) -> bool:
        return snapshot == self.snapshot or snapshot in self.others


class Room:
    """Makes room for the snapshots of one writer, one after another.

    Args:
        warn: told once, before the first snapshot, if what the policy keeps will not fit.
        in_flight: snapshots that others may be writing.
        protected: snapshots that nothing may remove now, and why.
    """

    def __init__(
        self,
        repository: Repository,
        lease: Lease,
        policy: RetentionPolicy,
        warn: Warn,
        in_flight: Container[str] = (),
        protected: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._repository = repository
        self._lease = lease
        self._policy = policy
        self._warn = warn
        self._in_flight = in_flight
        self._protected = protected
        self._warned = False
        self._whole: tuple[str, ...] = ()

    def before(self, data_bytes: int, foresee: Callable[[], Manifest]) -> Pruned | None:
        """Forget what has to go before a snapshot is written. None: there was room.

        Args:
            data_bytes: its data files.
            foresee: its manifest as it will be, except that the digests may be any of the same length. Only asked for
                where it matters.

        Raises:
            StorageFullError: it does not fit within the limits; nothing was forgotten. Do not write.
            LeaseHeldError, StorageError
        """
        self._warn_once(data_bytes)
        free_bytes = self._repository.storage.free_bytes()
        plenty = free_bytes is None or free_bytes >= data_bytes + ROOMY_BYTES
        if plenty and Retention.of(self._policy).limits == Limits():
            return None
        coming = foresee()
        return make_room(
            self._repository,
            self._lease,
            self._policy,
            data_bytes + len(manifest_codec.encode(coming)),
            line=coming.info.line,
            incoming=coming.info,
            protected=self._protected(),
            verified=self._whole,
            in_flight=Also(coming.info.id, self._in_flight),
        )

    def committed(self, snapshot: str) -> None:
        """Note that a snapshot was committed: it is known to be whole."""
        self._whole = (snapshot,)

    def _warn_once(self, data_bytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        used_bytes = sum(item.nbytes for item in self._repository.storage.list(layout.DATA))
        free_bytes = self._repository.storage.free_bytes()
        found = preflight(self._policy, data_bytes, used_bytes=used_bytes, free_bytes=free_bytes)
        if not found.fits:
            self._warn(f"{self._repository.storage.url}: {found.text}")
