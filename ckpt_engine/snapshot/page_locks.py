"""Page-locks host memory for the copy engines of GPUs, piece by piece.

The driver holds locks while it page-locks memory, and every process on the machine that needs them waits: with one
call for all of an arena that can take seconds. A copy must stay within one piece (`split`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ckpt_engine.errors import WaitTimeoutError
from ckpt_engine.observe.events import Event, Notice


class PageLocks(Protocol):
    """Host memory that devices copy to and from at their full rate."""

    def register(self, device: torch.device, address: int, nbytes: int, *, read_only: bool = False) -> str | None:
        """Page-lock host memory, by the driver of a device; what is wrong, or None. Lets go of the GIL.

        Args:
            read_only: devices only read it.
        """
        ...

    def unregister(self, device: torch.device, address: int) -> str | None:
        """Give page-locked memory back to the system's paging; what is wrong, or None."""
        ...


PIECE_BYTES = 64 << 20
DRIVER_TIMEOUT_SECONDS = 600.0


class Pinned:
    """A range of host memory, page-locked or not.

    Args:
        address: of its first byte, at the start of a page.
        nbytes: its length; all of it must be present (touched).
        locks: of the devices.
    """

    def __init__(self, address: int, nbytes: int, locks: PageLocks) -> None:
        self._address = address
        self._nbytes = nbytes
        self._locks = locks
        self._pieces: list[tuple[torch.device, int]] = []
        self._problem: str | None = None
        self._done = False

    def pin(self, device: torch.device, go_on: Callable[[], bool] = lambda: True) -> str | None:
        """Page-lock all of it, unless that was tried before; what is wrong, or None. Any thread; releases the GIL.

        Args:
            device: one of those that will copy.
            go_on: asked between pieces; False ends it early, and the next call goes on there.

        Raises:
            WaitTimeoutError: the driver does not return.
        """
        if not self._done:
            # CUDA keeps the error of a refused call for the next launch of the thread that made it: let it be no
            # thread that launches anything.
            thread = threading.Thread(target=self._run, args=(device, go_on), name="ckpt-pin", daemon=True)
            thread.start()
            thread.join(DRIVER_TIMEOUT_SECONDS)
            if thread.is_alive():
                raise WaitTimeoutError("page-locking the arena does not get on")
        return self._problem

    def unpin(self) -> None:
        """Give the memory back to the system's paging. No copy may be under way."""
        pieces, self._pieces, self._done = self._pieces, [], False
        for device, address in pieces:
            # Refused only where the process's CUDA context is gone, and everything with it.
            self._locks.unregister(device, address)

    def _run(self, device: torch.device, go_on: Callable[[], bool]) -> None:
        for start, stop in split(len(self._pieces) * PIECE_BYTES, self._nbytes):
            if not go_on():
                return
            try:
                self._problem = self._locks.register(device, self._address + start, stop - start)
            except RuntimeError as err:
                self._problem = str(err)
            if self._problem is not None:
                self.unpin()
                break
            self._pieces.append((device, self._address + start))
        self._done = True


def split(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes from `start` to `stop`, counted from the start of the range, cut where one piece ends."""
    while start < stop:
        end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        yield start, end
        start = end


def teller(emit: Callable[[Event], object]) -> Callable[[str | None], None]:
    """Tells the user once what is wrong with page-locking, if something is."""
    told = False

    def tell(problem: str | None) -> None:
        nonlocal told
        if problem is None or told:
            return
        told = True
        message = (
            f"host memory for snapshots cannot be page-locked ({problem}): `save` waits for the copies from the GPU. "
            "Give the job more memory that can be locked (ulimit -l), or set fewer `slots`"
        )
        emit(Notice("WARNING", message))

    return tell
