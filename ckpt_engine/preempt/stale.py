"""Tells when snapshots go on while the weights do not: none of what trains has changed since the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Event, SnapshotCommitted, StaleSnapshot
from ckpt_engine.store.manifest import Entry, Manifest

EVERY_SECONDS = 60.0
MOST_SECONDS = 3600.0
"""Time between comparisons: while all is well it doubles, because a large manifest takes processor time to read."""


def unchanged(before: Manifest, after: Manifest, trainable: Collection[str]) -> bool:
    """Whether all entries of `trainable` that both snapshots have are the same, digest by digest.

    False where nothing can be said: none in common, of unknown content, cut into other pieces, or no step in between.
    """
    common = [name for name in trainable if name in before.entries and name in after.entries]
    if not common or after.info.step <= before.info.step:
        return False
    return all(_same(before.entries[name], after.entries[name]) for name in common)


def _same(one: Entry, other: Entry) -> bool:
    pieces = zip(one.pieces, other.pieces, strict=False)
    return len(one.pieces) == len(other.pieces) and all(
        a.content_digest is not None and (a.content_digest, a.raw_nbytes) == (b.content_digest, b.raw_nbytes)
        for a, b in pieces
    )


class StaleWatch:
    """An event sink that compares each committed snapshot with the one before, on a thread that lives that long.

    Reading a manifest may take as long as the storage likes; what was found is handed out by `take`.

    Args:
        trainable: entries of what an optimizer changes.
        read: the manifest of a snapshot; called on the thread.
    """

    def __init__(self, trainable: Collection[str], read: Callable[[str], Manifest]) -> None:
        self._trainable = frozenset(trainable)
        self._read = read
        self._before: str | None = None
        self._again = 0.0
        self._pause = EVERY_SECONDS
        self._thread: threading.Thread | None = None
        self._found: StaleSnapshot | None = None

    def emit(self, event: Event) -> None:
        if not isinstance(event, SnapshotCommitted):
            return
        before, self._before = self._before, event.snapshot
        now = time.monotonic()
        busy = self._thread is not None and self._thread.is_alive()
        if before is None or busy or now < self._again:
            return
        self._again = now + self._pause
        self._thread = threading.Thread(
            target=self._compare, args=(before, event.snapshot), name="ckpt-stale", daemon=True
        )
        self._thread.start()

    def take(self) -> StaleSnapshot | None:
        """What was found since the last call. Training thread; an attribute is read."""
        found = self._found
        if found is not None:
            self._found = None
        return found

    def _compare(self, before: str, after: str) -> None:
        try:
            old, new = self._read(before), self._read(after)
        except CkptError:
            return  # retention may have removed the older one; the next two are compared instead
        if unchanged(old, new, self._trainable):
            count = sum(name in new.entries for name in self._trainable)
            self._found = StaleSnapshot(new.info.step, old.info.step, count)
        else:
            self._pause = min(2.0 * self._pause, MOST_SECONDS)
