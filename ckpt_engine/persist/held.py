"""The newest complete snapshot that the trainer told of: kept in memory, and offered to who restarts the training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.errors import CkptError
from ckpt_engine.persist.ids import Ids
from ckpt_engine.persist.intake import Order
from ckpt_engine.persist.job import ErrorRecord
from ckpt_engine.persist.pulse import Beat, read_pulse
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.transfer import RunText


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot in memory.

    Args:
        manifest: its bytes, the same as on every other tier.
        fd: a descriptor of the memory of `file`, for reading; the receiver of the offer closes it.
        durable: whether a tier has it too.
    """

    snapshot: str
    step: int
    manifest: bytes
    run: RunText
    file: DataFile
    fd: int
    durable: bool


class Held:
    """Keeps the newest order. Thread safe.

    While the trainer lives its memory changes whenever a newer order has been sent, which may not have arrived here:
    nothing is offered before `seal`.

    Args:
        changed: called, on any thread, when `offer` may have another answer.
    """

    def __init__(self, ids: Ids, changed: Callable[[], object]) -> None:
        self._ids = ids
        self._tell = changed
        self._lock = threading.Lock()
        self._newest: Order | None = None
        self._pulse = -1
        self._run: RunText | None = None
        self._sealed = threading.Event()
        self._error: ErrorRecord | None = None
        self._unwanted = self._settled = False

    @property
    def newest(self) -> Order | None:
        """The newest order; only to look at."""
        return self._newest

    @property
    def beat(self) -> Beat | None:
        """How far the trainer said it was."""
        with self._lock:
            return read_pulse(self._pulse) if self._pulse >= 0 else None

    @property
    def unwanted(self) -> bool:
        """Whether nobody wants what is held any more, see `let_go`."""
        return self._unwanted

    def hold(self, order: Order) -> None:
        """Keep `order` instead of what was kept."""
        order.retain()
        with self._lock:
            before, self._newest = self._newest, order
        if before is not None:
            before.release()

    def take_pulse(self, fd: int) -> None:
        """Read the trainer's pulse there; the descriptor is owned from now on."""
        with self._lock:
            before, self._pulse = self._pulse, fd
        if before >= 0:
            os.close(before)

    def at_risk(self) -> Order | None:
        """The newest order if it is not durable; the caller releases it."""
        with self._lock:
            order = self._newest
            if order is None or order.durable:
                return None
            order.retain()
            return order

    def seal(self, run: RunText) -> None:
        """The trainer is gone and everything it sent has arrived: what is held is final.

        Its digests are worked out now, on another thread; whatever changed it afterwards would be noticed by them.
        """
        with self._lock:
            self._run = run
            order = self._newest
            if order is not None:
                order.retain()
        if order is None:
            self._sealed.set()
            self._tell()
            return
        threading.Thread(target=self._digest, args=(order,), name="ckpt-seal", daemon=True).start()

    def wait_sealed(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the digests are known, or cannot be; whether that is so."""
        return self._sealed.wait(timeout)

    def offer(self) -> Offer | str | None:
        """What there is to restore from; a text: nothing, and why; None: not known yet.

        Raises:
            OSError: the system gives no descriptor.
        """
        if not self._sealed.is_set() or not self._ids.begun:
            return None
        with self._lock:
            order, run, error = self._newest, self._run, self._error
            if order is None or run is None:
                return "no snapshot is held in memory"
            if error is not None:
                return f"the snapshot in memory cannot be used: {error.message}"
            order.retain()
        try:
            staged = order.staged(self._ids.of(order))
            manifest = manifest_codec.encode(staged.manifest(run.run, staged.whole(staged.digest())))
            fd = staged.slot.reading_fd()
            return Offer(staged.snapshot, order.job.step, manifest, run, staged.data, fd, order.durable)
        finally:
            order.release()

    def let_go(self) -> None:
        """Nobody wants it any more: give the memory back as soon as it is durable."""
        self._unwanted = True
        self._drop_unwanted()

    def settle(self) -> None:
        """What is held has become durable, or cannot."""
        self._settled = True
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        with self._lock:
            order = self._newest
            if not self._unwanted or order is None or not (order.durable or self._settled):
                return
            self._newest = None
        order.release()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            order, self._newest = self._newest, None
            pulse, self._pulse = self._pulse, -1
        if order is not None:
            order.release()
        if pulse >= 0:
            os.close(pulse)

    def _digest(self, order: Order) -> None:
        try:
            order.staged("").digest()
        except (CkptError, ValueError, OSError) as err:
            self._error = ErrorRecord.of(err)
        finally:
            order.release()
            self._sealed.set()
            self._tell()
