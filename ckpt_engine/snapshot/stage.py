"""Stage one snapshot into an arena slot: eagerly before training goes on, or lazily behind a fence.

Lazy staging (CheckFreq's two-phase snapshot, FAST'21 section 4.1) copies what does not change before the next update
on a background thread while forward and backward run. `fence` waits for the rest and helps with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.snapshot.flatten import show_path
from ckpt_engine.snapshot.plan import Capture

_CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 64 << 10
_GROUP = 512
_IDLE_SECONDS = 5.0
FENCE_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Move:
    """Bytes of one contiguous CPU tensor; the tensors are held so that the addresses stay valid."""

    dst: torch.Tensor
    src: torch.Tensor
    start: int
    nbytes: int

    def run(self) -> None:
        # ctypes drops the GIL and starts no thread team, so the copy takes one core at most from training.
        ctypes.memmove(self.dst.data_ptr() + self.start, self.src.data_ptr() + self.start, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Several small or oddly laid out tensors in one call, so that the GIL is taken once for all of them."""

    dst: list[torch.Tensor]
    src: list[torch.Tensor]

    def run(self) -> None:
        copy_all(self.dst, self.src)


def copy_all(dst: list[torch.Tensor], src: list[torch.Tensor]) -> None:
    """Copy tensors pairwise in one call."""
    if dst:
        with torch.no_grad():
            torch._foreach_copy_(dst, src)


class Staging:
    """The copy of one captured state into arena views.

    The constructor copies everything that is not lazy. Then `run_some` may be called by a background thread, and
    `fence` by the training thread. `on_staged` is called exactly once, by whichever thread copies the last byte.

    Args:
        capture: what to copy.
        views: destinations, one per `capture.plan.sources`.
        on_staged: takes the error that stopped the background copy, or None.
        check: keep an eager copy of the lazy part and compare at the fence (debug mode).
    """

    def __init__(
        self,
        capture: Capture,
        views: Sequence[torch.Tensor],
        on_staged: Callable[[BaseException | None], None],
        *,
        check: bool = False,
    ) -> None:
        sources = capture.plan.sources
        self._on_staged = on_staged
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._error: BaseException | None = None
        arrays = capture.arrays
        tensors = [source.tensor(arrays) for source in sources]
        lazy = [(s, v, t.detach()) for s, v, t in zip(sources, views, tensors, strict=True) if s.lazy]
        if lazy:
            eager = [(v, t) for s, v, t in zip(sources, views, tensors, strict=True) if not s.lazy]
            copy_all([v for v, _ in eager], [t for _, t in eager])
        else:
            copy_all(list(views), tensors)
        self._check = [(s, v, t.clone()) for s, v, t in lazy] if check else []
        self._work: deque[_Move | _Copy] = deque(_tasks([(v, t) for _, v, t in lazy]))
        self._left = len(self._work)
        self.lazy = bool(lazy)
        if not self._work:
            self._finish()

    def run_some(self) -> bool:
        """Copy one chunk; False when no chunk is left to take. Any thread."""
        try:
            task = self._work.popleft()
        except IndexError:
            return False
        try:
            task.run()
        except BaseException as err:
            with self._lock:
                self._error = self._error or err
            raise
        finally:
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._finish()
        return True

    def fence(self) -> float:
        """Return when every byte is in the arena; seconds waited. Training thread only.

        Raises:
            WaitTimeoutError: the background thread did not finish its last chunk.
            StateError: a copy failed, or (debug mode) lazily staged bytes changed before they were copied.
        """
        began = time.perf_counter()
        while self.run_some():
            pass
        if not self._complete.wait(FENCE_TIMEOUT_SECONDS):
            raise WaitTimeoutError(f"staging did not finish within {FENCE_TIMEOUT_SECONDS:.0f} s")
        if self._error is not None:
            raise StateError(f"staging failed: {self._error}") from self._error
        waited = time.perf_counter() - began
        for source, view, expected in self._check:
            if not _same_bytes(view, expected):
                raise StateError(
                    f"{show_path(source.path)} changed between the snapshot instant and the fence",
                    hint="it must not be declared lazy, or the fence comes too late",
                )
        self._check = []
        return waited

    @property
    def complete(self) -> bool:
        """Whether every byte is in the arena."""
        return self._complete.is_set()

    def _finish(self) -> None:
        try:
            self._on_staged(self._error)
        finally:
            self._complete.set()


def _tasks(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[_Move | _Copy]:
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    tasks: list[_Move | _Copy] = []
    for view, tensor in pairs:
        nbytes = view.numel() * view.element_size()
        if nbytes >= _SMALL_BYTES and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            tasks += [_Move(view, tensor, at, min(_CHUNK_BYTES, nbytes - at)) for at in range(0, nbytes, _CHUNK_BYTES)]
        else:
            small.append((view, tensor))
    for at in range(0, len(small), _GROUP):
        group = small[at : at + _GROUP]
        tasks.append(_Copy([view for view, _ in group], [tensor for _, tensor in group]))
    return tasks


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0:
        return True
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


class LazyCopier:
    """The background thread that copies lazy parts; one per Checkpointer, started at the first lazy snapshot."""

    def __init__(self) -> None:
        self._queue: deque[Staging] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, staging: Staging) -> None:
        """Start copying; returns at once."""
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-stage", daemon=True)
                self._thread.start()
            self._queue.append(staging)
            self._wake.notify()

    def close(self, timeout: float) -> None:
        """Stop after the chunk being copied.

        Raises:
            WaitTimeoutError: the thread did not stop.
        """
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise WaitTimeoutError(f"the staging thread did not stop within {timeout:.0f} s")

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait(_IDLE_SECONDS)
                if self._closed:
                    return
                staging = self._queue.popleft()
            try:
                while not self._closed and staging.run_some():
                    pass
            except Exception:  # noqa: BLE001 - kept in the staging, raised by its fence
                continue
