"""The copies of host memory that make a snapshot, cut so that several threads can do them side by side."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.snapshot.flatten import show_path
from ckpt_engine.snapshot.unchanged import Claim

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 32 << 10  # torch copies up to 32,768 elements without its thread team
_GROUP = 512
_GLANCE_BYTES = 4 << 10
FENCE_TIMEOUT_SECONDS = 600.0

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class _Move:
    """Bytes of one contiguous CPU tensor; the tensors are held so that the addresses stay valid."""

    dst: torch.Tensor
    src: torch.Tensor
    start: int
    nbytes: int

    def run(self) -> None:
        # ctypes drops the GIL and starts no thread team, so a thread takes one core at most from training.
        ctypes.memmove(self.dst.data_ptr() + self.start, self.src.data_ptr() + self.start, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Several small or oddly laid out tensors in one call, so that the GIL is taken once for all of them."""

    dst: list[torch.Tensor]
    src: list[torch.Tensor]

    def run(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.dst, self.src)


@dataclass(frozen=True, slots=True)
class Compare:
    """Bytes that the slot is claimed to hold already; if it does not, and the claim is not hinted, they are copied."""

    move: _Move
    claim: Claim

    def run(self) -> None:
        move = self.move
        if _memcmp(move.dst.data_ptr() + move.start, move.src.data_ptr() + move.start, move.nbytes) == 0:
            return
        self.claim.differs = True
        if not self.claim.hinted:
            move.run()
        elif move.src._version == self.claim.version:
            # Nobody can say any more whether it has changed before or after the instant.
            raise StateError(
                f"{show_path(self.claim.path)} had not changed for several snapshots, and has now without torch "
                "noticing",
                hint="the next snapshot copies it as all that changes; call before_update() before changing it by hand",
            )
        # Else training went on and changed it since the instant, whose bytes the slot has: nothing had changed by then.

    def seems_right(self) -> bool:
        """Whether both ends are the same: most changes that torch does not count are of whole tensors."""
        move = self.move
        dst, src = move.dst.data_ptr() + move.start, move.src.data_ptr() + move.start
        end = max(0, move.nbytes - _GLANCE_BYTES)
        nbytes = min(_GLANCE_BYTES, move.nbytes)
        return all(_memcmp(dst + at, src + at, nbytes) == 0 for at in (0, end))


Task = _Move | _Copy | Compare


class Part:
    """Copy tasks that are complete together. Any thread may take some."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._work = deque(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
        self.complete = threading.Event()
        self.error: BaseException | None = None
        if not tasks:
            self.complete.set()

    def run_some(self) -> bool:
        """Run one task; False when none is left to take. Errors are kept in `error`. True once more after the last."""
        try:
            task = self._work.popleft()
        except IndexError:
            return False
        try:
            task.run()
        except Exception as err:  # noqa: BLE001 - raised by the fence on the training thread
            self.error = err
        except BaseException as err:
            self.error = err  # a Ctrl-C: nobody knows what was copied
            raise
        finally:
            self._count(1)
        return True

    def stop(self, error: BaseException) -> None:
        """Run no more tasks, for this reason; complete when those that run now have."""
        self.error = self.error or error
        dropped = 0
        with suppress(IndexError):
            while True:
                self._work.popleft()
                dropped += 1
        self._count(dropped)

    def _count(self, tasks: int) -> None:
        with self._lock:
            self._left -= tasks
            last = self._left == 0
        if last:
            self.complete.set()

    def finish(self) -> None:
        """Help until all tasks have run.

        Raises:
            WaitTimeoutError: another thread did not finish its task.
        """
        while self.run_some():
            pass
        if not self.complete.wait(FENCE_TIMEOUT_SECONDS):
            raise WaitTimeoutError(f"staging did not finish within {FENCE_TIMEOUT_SECONDS:.0f} s")


def tasks_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Task]:
    """The copies of these pairs of destination and source: small ones in groups, large ones in chunks."""
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    tasks: list[Task] = []
    for view, tensor in pairs:
        nbytes = view.numel() * view.element_size()
        if nbytes >= SMALL_BYTES and _movable(tensor):
            tasks += _moves(view, tensor)
        else:
            small.append((view, tensor))
    for at in range(0, len(small), _GROUP):
        group = small[at : at + _GROUP]
        tasks.append(_Copy([view for view, _ in group], [tensor for _, tensor in group]))
    return tasks


def _moves(view: torch.Tensor, tensor: torch.Tensor) -> list[_Move]:
    nbytes = view.numel() * view.element_size()
    return [_Move(view, tensor, at, min(CHUNK_BYTES, nbytes - at)) for at in range(0, nbytes, CHUNK_BYTES)]


def compares(view: torch.Tensor, tensor: torch.Tensor, claim: Claim) -> list[Compare]:
    """Comparisons of a claim, chunk by chunk."""
    return [Compare(move, claim) for move in _moves(view, tensor)]


def _movable(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
