"""The writer's view of the arena: slots it holds by file descriptor, mapped for reading when first persisted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt_engine.errors import WriterError
from ckpt_engine.persist.mapping import map_shared


class ArenaSlot:
    """One shared buffer. It stays alive while it is retained, whatever becomes of the trainer. Thread safe.

    Args:
        fd: a descriptor of the buffer, owned by this object from now on.
        nbytes: its size.

    Whoever makes one has retained it once.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._memory: Any = None
        self._users = 1
        self._lock = threading.Lock()

    @contextmanager
    def image(self, nbytes: int) -> Iterator[memoryview]:
        """The first `nbytes` bytes, to read; valid inside the `with` only.

        Raises:
            WriterError: the slot is smaller, or the memory cannot be mapped.
        """
        if nbytes > self._nbytes:
            raise WriterError(f"an image of {nbytes} bytes does not fit an arena slot of {self._nbytes} bytes")
        with self._lock:
            if self._memory is None:
                self._memory = self._map()
            memory = self._memory
        with memoryview(memory) as whole, whole.cast("B") as data, data[:nbytes] as image:
            yield image

    def _map(self) -> Any:
        try:
            # Reading beyond the end of a shared file kills the process (SIGBUS), so trust the file, not the message.
            size = os.fstat(self._fd).st_size
            if size < self._nbytes:
                raise WriterError(f"an arena slot has {size} bytes instead of {self._nbytes}")
            # Mapped after the trainer has filled it: populating then costs no page faults and allocates nothing.
            return map_shared(self._fd, self._nbytes, writable=False)
        except (OSError, ValueError) as err:
            raise WriterError(f"cannot map an arena slot of {self._nbytes} bytes: {err}") from err

    def reading_fd(self) -> int:
        """A new descriptor of the buffer that can only be read; the caller closes it.

        Raises:
            OSError: the system refuses.
        """
        with self._lock:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def retain(self) -> None:
        """Keep the memory until one more `release`."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Let go of the memory, once for each time it was retained."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._memory = None
                os.close(self._fd)
                self._fd = -1
