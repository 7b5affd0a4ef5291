"""Tells when snapshots go on while the weights do not: none of what trains has changed since the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Event, SnapshotCommitted, StaleSnapshot
from ckpt_engine.store.manifest import Manifest

EVERY_SECONDS = 60.0
MOST_SECONDS = 3600.0
"""Time between comparisons: while all is well it doubles, because a large manifest takes processor time to read."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the trainable entries of a snapshot hold: of each piece the digest, and its bytes.

    It is made while the snapshot is the newest one: retention may remove it, or take components out of it, as soon as
    the next one is there.
    """

    step: int
    pieces: Mapping[str, tuple[tuple[str | None, int], ...]]

    @classmethod
    def of(cls, manifest: Manifest, trainable: Collection[str]) -> Content:
        """That of a snapshot's entries among `trainable`."""
        entries = {name: manifest.entries[name] for name in trainable if name in manifest.entries}
        pieces = {
            name: tuple((piece.content_digest, piece.raw_nbytes) for piece in entry.pieces)
            for name, entry in entries.items()
        }
        return cls(manifest.info.step, pieces)


def unchanged(before: Content, after: Content) -> bool:
    """Whether all entries that both snapshots have are the same, digest by digest.

    False where nothing can be said: none in common, of unknown content, cut into other pieces, or no step in between.
    """
    common = before.pieces.keys() & after.pieces.keys()
    if not common or after.step <= before.step:
        return False
    return all(
        before.pieces[name] == after.pieces[name] and all(digest is not None for digest, _ in after.pieces[name])
        for name in common
    )


class StaleWatch:
    """An event sink that compares committed snapshots with one before, on a thread that lives that long.

    Reading a manifest may take as long as the storage likes; what was found is handed out by `take`. A comparison is of
    two snapshots that follow each other, unless reading the older one takes longer.

    Args:
        trainable: entries of what an optimizer changes.
        read: the manifest of a snapshot; called on the thread.
    """

    def __init__(self, trainable: Collection[str], read: Callable[[str], Manifest]) -> None:
        self._trainable = frozenset(trainable)
        self._read = read
        self._before: Content | None = None
        self._again = 0.0
        self._pause = EVERY_SECONDS
        self._thread: threading.Thread | None = None
        self._newest: str | None = None
        self._lock = threading.Lock()
        self._found: StaleSnapshot | None = None

    def emit(self, event: Event) -> None:
        if not isinstance(event, SnapshotCommitted) or time.monotonic() < self._again:
            return
        with self._lock:
            self._newest = event.snapshot
            if self._thread is not None:
                return  # it looks at the newest one next
            self._thread = threading.Thread(target=self._look, name="ckpt-stale", daemon=True)
            self._thread.start()

    def take(self) -> StaleSnapshot | None:
        """What was found since the last call. Training thread; an attribute is read."""
        found = self._found
        if found is not None:
            self._found = None
        return found

    def _look(self) -> None:
        while (snapshot := self._next()) is not None:
            try:
                content = Content.of(self._read(snapshot), self._trainable)
            except CkptError:
                continue  # a newer one has taken its place already, and is looked at in its place
            before, self._before = self._before, content
            if before is not None:
                self._compare(before, content)

    def _next(self) -> str | None:
        with self._lock:
            snapshot, self._newest = self._newest, None
            if snapshot is None or time.monotonic() < self._again:
                self._thread = None
                return None
            return snapshot

    def _compare(self, before: Content, after: Content) -> None:
        """Then nothing is read for a while; the older one of the next comparison comes after that."""
        self._before = None
        if unchanged(before, after):
            self._found = StaleSnapshot(after.step, before.step, len(after.pieces))
        else:
            self._pause = min(2.0 * self._pause, MOST_SECONDS)
        self._again = time.monotonic() + self._pause
