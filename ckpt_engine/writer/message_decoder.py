"""What the trainer's messages say, resolved at once: a job keeps what its numbers stood for when it arrived.

The ids that the snapshots of one writer get, in the order in which they are asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ckpt_engine.copy import job as values
from ckpt_engine.copy.job import PersistJob
from ckpt_engine.copy.staged import ArenaSlot, CutLayout
from ckpt_engine.copy.write_snapshot import Digests, Staged
from ckpt_engine.errors import WriterError
from ckpt_engine.store import names
from ckpt_engine.store.tree import KeySkeleton
from ckpt_engine.writer import channel
from ckpt_engine.writer.channel import Body

T = TypeVar("T")


class Lazy(Generic[T]):
    """Something worked out when it is first needed, by the thread that needs it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._found: list[T] = []
        self._lock = threading.Lock()

    def get(self) -> T:
        """What it is; raises what making it raises."""
        with self._lock:
            if self._make is not None:
                self._found.append(self._make())
                self._make = None
            return self._found[0]


def stays() -> bool:
    """The slot stays as it is until the trainer may fill it again."""
    return True


class StagedJob:
    """A job with what its numbers stand for. It keeps its slot until it is released as often as it was retained.

    It is made with one reference.

    Attributes:
        snapshot: the id it has got, see `message_decoder.Ids`.
        durable: whether it has become durable under that id.
        failed: whether it has failed to do so.
        problem: why the job cannot be done at all; None: it can.
        unchanged: see `Staged`; to be set where the trainer lives and may use the slot.
    """

    def __init__(
        self,
        job: PersistJob,
        slot: ArenaSlot | None,
        layout: Lazy[CutLayout] | None,
        skeletons: Mapping[str, Lazy[KeySkeleton]],
        problem: str | None,
    ) -> None:
        self.job = job
        self.problem = problem
        self.snapshot: str | None = job.snapshot
        self.durable = False
        self.failed = False
        self.unchanged: Callable[[], bool] = stays
        self._slot = slot
        self._layout = layout
        self._skeletons = skeletons
        self._digests = Digests()
        if slot is not None:
            slot.retain()

    @property
    def known(self) -> bool:
        """Whether the job can be done: everything that it names was sent, and its step is one."""
        return self.problem is None

    @property
    def digested(self) -> bool:
        """Whether the digests of its bytes are known."""
        return self._digests.known is not None

    def staged(self, snapshot: str) -> Staged:
        """What is to be written as `snapshot`.

        Raises:
            WriterError: the job cannot be done, see `problem`.
            ValueError: it names a layout that is impossible.
        """
        if self._slot is None or self._layout is None or self.problem is not None:
            raise WriterError(f"job {self.job.job} cannot be done: {self.problem}")
        skeletons = {key: lazy.get() for key, lazy in self._skeletons.items()}
        return Staged(self.job, snapshot, self._slot, self._layout.get(), skeletons, self._digests, self.unchanged)

    def retain(self) -> None:
        """Keep the slot until one more `release`."""
        if self._slot is not None:
            self._slot.retain()

    def release(self) -> None:
        """Let go of the slot."""
        if self._slot is not None:
            self._slot.release()


class MessageDecoder:
    """Takes the messages of one trainer, in their order, by one thread at a time. Cheap: nothing is read or written."""

    def __init__(self) -> None:
        self._slots: dict[int, ArenaSlot] = {}
        self._layouts: dict[int, Lazy[CutLayout]] = {}
        self._skeletons: dict[int, Lazy[KeySkeleton]] = {}

    def take(self, body: Body, fds: Sequence[int] = ()) -> StagedJob | None:
        """Do what a message says. The order of a `persist` or a `hold`; the caller owns it.

        Args:
            fds: what came with it; owned from now on.

        Raises:
            WriterError: a message that is not of the protocol.
        """
        match body["kind"]:
            case channel.PERSIST | channel.HOLD:
                return self._resolve(values.job_from_json(body["job"]))
            case channel.SLOT:
                self._forget_slots([body["slot"]])
                self._slots[body["slot"]] = ArenaSlot(fds[0], body["nbytes"])
            case channel.LAYOUT:
                layout = body["layout"]
                self._layouts[layout["id"]] = Lazy(lambda: CutLayout.of(values.layout_from_json(layout)))
            case channel.SKELETON:
                tree = body["tree"]
                self._skeletons[body["id"]] = Lazy(lambda: KeySkeleton(tree))
            case channel.FORGET:
                self._forget_slots(body["slots"])
                for layout_id in body["layouts"]:
                    self._layouts.pop(layout_id, None)
                for skeleton_id in body["skeletons"]:
                    self._skeletons.pop(skeleton_id, None)
            case kind:
                for fd in fds:
                    os.close(fd)
                raise WriterError(f"the writer does not know the message {kind!r}")
        return None

    def close(self) -> None:
        """Let go of all slots that no order keeps. Idempotent."""
        self._forget_slots(list(self._slots))

    def _resolve(self, job: PersistJob) -> StagedJob:
        problem: str | None = None
        skeletons: dict[str, Lazy[KeySkeleton]] = {}
        try:
            skeletons = {key: self._skeletons[number] for key, number in job.tree}
        except KeyError as err:
            problem = f"skeleton {err} was never sent"
        if job.slot not in self._slots:
            problem = f"slot {job.slot} was never sent"
        elif job.layout not in self._layouts:
            problem = f"layout {job.layout} was never sent"
        elif type(job.step) is not int or job.step < 0:
            problem = f"{job.step!r:.40} is no step"
        return StagedJob(job, self._slots.get(job.slot), self._layouts.get(job.layout), skeletons, problem)

    def _forget_slots(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            slot = self._slots.pop(number, None)
            if slot is not None:
                slot.release()


class Ids:
    """Numbers orders. Thread safe.

    `begin` MUST come before the first id: until then further tiers may still say that they have higher numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._begun = threading.Event()

    def begin(self, seq: int) -> None:
        """Snapshots get `seq` and higher numbers."""
        with self._lock:
            self._seq = max(self._seq, seq)
        self._begun.set()

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._begun.is_set()

    def of(self, order: StagedJob) -> str:
        """The id of `order`: the one it has, or a new one, higher than all before."""
        with self._lock:
            if order.snapshot is None:
                parent = names.parse_id(order.job.parent) if order.job.parent is not None else None
                if parent is not None:
                    # It may come from a tier that did not answer at the start.
                    self._seq = max(self._seq, parent.seq + 1)
                order.snapshot = names.snapshot_id(self._seq, order.job.step)
                self._seq += 1
            return order.snapshot

    def renew(self, order: StagedJob) -> str:
        """A new id for an order that failed: something may be left of the attempt, or even still be at work."""
        with self._lock:
            order.snapshot = None
        return self.of(order)
