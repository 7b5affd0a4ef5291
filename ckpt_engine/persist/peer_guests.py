"""The shares that a writer keeps in memory for a rank on another machine: the two newest complete ones."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_engine.errors import WriterError
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.peer import Line, Share, memory_file, verify

KEPT = 2
"""Complete ones; while a third one comes in there is memory for three. Ranks may be one snapshot apart."""


class Guests:
    """Keeps what comes in whole. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receiving = threading.Lock()
        self._ranks: tuple[int, ...] = ()
        self._kept: deque[Share] = deque()
        self._spare: Share | None = None

    def expect(self, ranks: Sequence[int]) -> None:
        """Keep the shares of these ranks, and of no other one."""
        with self._lock:
            self._ranks = tuple(ranks)

    def receive(self, said: Mapping[str, Any], line: Line) -> None:
        """Take in a share; raises what keeps it from being kept, whoever sends it.

        Raises:
            WriterError: it is of no rank that is expected.
            FormatError: its bytes are not what was sent.
            OSError: there is no memory, or the sender is gone.
        """
        with self._lock:
            if said["rank"] not in self._ranks:
                raise WriterError(f"the shares of rank {said['rank']} are not kept here")
        nbytes = int(said["nbytes"])
        if nbytes < 0:
            raise WriterError(f"a share of {nbytes} bytes is none")
        with self._receiving:
            fd = self._memory(nbytes)
            try:
                share = Share.told(said, fd)
                image = memoryview(map_shared(fd, max(1, nbytes), writable=True)).cast("B")[:nbytes]
                line.fill(image)
                verify(share, image)
            except BaseException:
                os.close(fd)
                raise
            with self._lock:
                self._kept.append(share)
                if len(self._kept) > KEPT:
                    # Memory that was touched once costs nothing the next time.
                    before, self._spare = self._spare, self._kept.popleft()
                    if before is not None:
                        os.close(before.fd)

    def ids(self) -> dict[int, list[str]]:
        """The snapshots whose share is kept, newest first, by rank."""
        with self._lock:
            found: dict[int, list[str]] = {}
            for share in reversed(self._kept):
                found.setdefault(share.rank, []).append(share.snapshot)
            return found

    def get(self, rank: int, snapshot: str) -> Share | None:
        """A share with a descriptor of its own, for reading only, which the caller closes."""
        with self._lock:
            for share in self._kept:
                if (share.rank, share.snapshot) == (rank, snapshot):
                    fd = os.open(f"/proc/self/fd/{share.fd}", os.O_RDONLY | os.O_CLOEXEC)
                    return replace(share, fd=fd)
        return None

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            found = [*self._kept, *([self._spare] if self._spare is not None else [])]
            self._kept.clear()
            self._spare = None
        for share in found:
            os.close(share.fd)

    def _memory(self, nbytes: int) -> int:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == nbytes:
            return spare.fd
        if spare is not None:
            os.close(spare.fd)
        return memory_file(nbytes)
