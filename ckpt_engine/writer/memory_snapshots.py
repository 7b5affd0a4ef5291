"""The snapshots that the trainer has sent to its writer.

They are resolved as they arrive and numbered, and the newest complete ones are kept. A job keeps what was said of the
arena before it arrived. What is kept in memory is offered to the restarted trainer. Which slots abandoned calls still
read is counted here, too: the trainer gets those back later.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from ckpt_engine.copy.job import ALONE, ErrorRecord, KeySkeleton, Layout, PersistJob, RankConfig, job_from_json
from ckpt_engine.copy.transfer import RunText
from ckpt_engine.copy.write_snapshot import ArenaSlot, CutLayout, Digests, Staged
from ckpt_engine.errors import CkptError, WriterError
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.writer import part_records
from ckpt_engine.writer.channel import RecentEvents, close_all
from ckpt_engine.writer.messages import Body, Kind, Reply, nothing
from ckpt_engine.writer.pulse import Heartbeat, SpentTimes, read_fill, read_pulse, read_spent

SHARES = 3
"""Orders that the writer of one of several ranks keeps; see `MemorySnapshots`."""


def stays(_: StagedJob) -> bool:
    """The slot stays as it is until the trainer may fill it again."""
    return True


class StagedJob:
    """A job with what it refers to. The memory of its slot goes with the last job that refers to it.

    Attributes:
        snapshot: the id it has got, see `Ids`.
        durable: whether it has become durable under that id.
        failed: whether it has failed to do so.
        problem: why the job cannot be done at all; None: it can.
        unchanged: see `Staged`, asked with this job; to be set where the trainer lives and may use the slot.
    """

    def __init__(
        self,
        job: PersistJob,
        slot: ArenaSlot | None,
        layout: Callable[[], CutLayout] | None,
        skeletons: Mapping[str, Callable[[], KeySkeleton]],
        problem: str | None,
    ) -> None:
        self.job = job
        self.problem = problem
        self.snapshot: str | None = job.snapshot
        self.durable = False
        self.failed = False
        self.unchanged: Callable[[StagedJob], bool] = stays
        self._slot = slot
        self._layout = layout
        self._skeletons = skeletons
        self._digests = Digests()

    def staged(self, snapshot: str) -> Staged:
        """What is to be written as `snapshot`.

        Raises:
            WriterError: the job cannot be done, see `problem`.
            ValueError: it names a layout that is impossible.
        """
        if self._slot is None or self._layout is None or self.problem is not None:
            raise WriterError(f"job {self.job.job} cannot be done: {self.problem}")
        skeletons = {key: skeleton() for key, skeleton in self._skeletons.items()}
        unchanged = partial(self.unchanged, self)
        return Staged(self.job, snapshot, self._slot, self._layout(), skeletons, self._digests, unchanged)


@dataclass(eq=False)
class MessageDecoder:
    """Takes the messages of one trainer, in their order, by one thread at a time. Cheap: what is sent of layouts and
    skeletons is worked out by the thread that first needs it.
    """

    _slots: dict[int, ArenaSlot] = field(default_factory=dict, init=False)
    _layout: Callable[[], CutLayout] | None = field(default=None, init=False)
    _skeletons: dict[str, Callable[[], KeySkeleton]] = field(default_factory=dict, init=False)

    def take(self, body: Body, fds: Sequence[int] = ()) -> StagedJob | None:
        """Do what a message says. The order of a `persist` or a `hold`.

        Args:
            fds: what came with it; owned from now on.

        Raises:
            WriterError: a message that is not of the protocol.
        """
        kind = body["kind"]
        if kind in (Kind.PERSIST, Kind.HOLD):
            return self._resolve(job_from_json(body["job"]))
        if kind != Kind.ARENA:
            close_all(fds)
            raise WriterError(f"the writer does not know the message {kind!r}")
        if body["slot"] is not None:
            number, nbytes = body["slot"]
            self._slots[number] = ArenaSlot(fds[0], nbytes)
        for number in body["gone"]:
            self._slots.pop(number, None)
        if (layout := body["layout"]) is not None:
            self._layout = cache(lambda: CutLayout.of(msgspec.convert(layout, Layout)))
        if keys := body["keys"]:
            new = {key: cache(partial(KeySkeleton, tree)) for key, tree in body["trees"].items()}
            self._skeletons = {key: new.get(key) or self._skeletons[key] for key in keys}
        return None

    def close(self) -> None:
        """Let go of all slots. Idempotent."""
        self._slots.clear()

    def _resolve(self, job: PersistJob) -> StagedJob:
        problem: str | None = None
        if job.slot not in self._slots:
            problem = f"slot {job.slot} was never sent"
        elif self._layout is None:
            problem = "no layout was sent"
        elif type(job.step) is not int or job.step < 0:
            problem = f"{job.step!r:.40} is no step"
        return StagedJob(job, self._slots.get(job.slot), self._layout, self._skeletons, problem)


@dataclass(eq=False)
class Ids:
    """Numbers orders. Thread safe.

    `begin` MUST come before the first id: until then further tiers may still say that they have higher numbers.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _seq: int | None = field(default=None, init=False)
    """The number of the next snapshot; None: `begin` was not called yet."""

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._seq is not None

    def begin(self, seq: int) -> None:
        """Snapshots get `seq` and higher numbers."""
        with self._lock:
            self._seq = max(self._seq or 0, seq)

    def of(self, order: StagedJob) -> str:
        """The id of `order`: the one it has, or a new one, higher than all before."""
        with self._lock:
            if order.snapshot is None:
                assert self._seq is not None
                # The parent may come from a tier that did not answer at the start.
                self._seq = max(self._seq, names.seq_of(order.job.parent) + 1)
                order.snapshot = names.snapshot_id(self._seq, order.job.step)
                self._seq += 1
            return order.snapshot

    def renew(self, order: StagedJob) -> str:
        """A new id for an order that failed: something may be left of the attempt, or even still be at work."""
        with self._lock:
            order.snapshot = None
        return self.of(order)


class MemorySnapshots:
    """Keeps the newest orders. Thread safe.

    One is what a trainer alone loses nothing with. All ranks die with a snapshot in common, though they are at
    different ones: a rank that begins snapshot m has met all ranks in the step before it, so that each has snapshot
    m - 2 complete; m - 1 may still be copied there. So the writer of a rank keeps m - 2, and m - 1, and perhaps m.

    While the trainer lives its memory changes whenever a newer order has been sent, which may not have arrived here:
    nothing is offered before `seal`.

    Args:
        changed: called, on any thread, when `offer` may have another answer.
        ranks: whose writer this is.
    """

    def __init__(self, ids: Ids, changed: Callable[[], object], ranks: RankConfig = ALONE) -> None:
        self._ids = ids
        self.changed = changed
        self._ranks = ranks
        self._keep = SHARES if ranks.several else 1
        self._lock = threading.Lock()
        self._orders: list[StagedJob] = []
        self.pace: Mapping[str, Any] = {}
        """See `PersistJob`; of the newest job."""
        self.recent = RecentEvents()
        """What the writer has said last."""
        self._pulse = -1
        self._run: RunText | None = None
        self.sealed = threading.Event()
        """The digests are known, or cannot be."""
        self._digested = WeakKeyDictionary[StagedJob, ErrorRecord | None]()
        """Those whose digests are, or are being, worked out, and what that has failed with."""
        self._unwanted = self._settled = False

    @property
    def newest(self) -> StagedJob | None:
        """The newest order; only to look at."""
        with self._lock:
            return self._orders[-1] if self._orders else None

    @property
    def beat(self) -> Heartbeat | None:
        """How far the trainer said it was."""
        with self._lock:
            return read_pulse(self._pulse) if self._pulse >= 0 else None

    def spent(self) -> SpentTimes | None:
        """What the trainer said of its time last."""
        with self._lock:
            return read_spent(self._pulse) if self._pulse >= 0 else None

    @property
    def unwanted(self) -> bool:
        """Whether what is in memory is not wanted any more, see `let_go`. Of several ranks none knows that alone."""
        return self._unwanted and self._keep == 1

    def hold(self, order: StagedJob) -> None:
        """Keep `order`, and let go of what is too much, or was in its slot."""

        def newest(orders: list[StagedJob]) -> list[StagedJob]:
            return [*(one for one in orders if one.job.slot != order.job.slot), order][-self._keep :]

        self._replace(newest)

    def take_pulse(self, fd: int) -> None:
        """Read the trainer's pulse there, -1: nowhere; the descriptor is owned from now on."""
        with self._lock:
            before, self._pulse = self._pulse, fd
        if before >= 0:
            os.close(before)

    def all_held(self) -> list[StagedJob]:
        """All orders, newest first."""
        with self._lock:
            return list(reversed(self._orders))

    def seal(self, run: RunText) -> None:
        """The trainer is gone and everything it sent has arrived: what is in memory is final.

        The digests of the newest are worked out now, on another thread; whatever changed it afterwards would be noticed
        by them.
        """
        self._run = run
        self.drop_torn()
        newest = self.newest
        if newest is None:
            self.sealed.set()
            self.changed()
            return
        self._digest_soon(newest)

    def intact(self, order: StagedJob) -> bool:
        """Whether the trainer cannot have filled the slot of `order` again, as far as what it sent has arrived here."""
        with self._lock:
            return order in self._orders[-max(1, self._keep - 1) :]

    def keeps(self, order: StagedJob) -> bool:
        """Whether the trainer has not begun to fill the slot of `order` again."""
        self.drop_torn()
        with self._lock:
            return order in self._orders

    def drop_torn(self) -> None:
        """Let go of what was in the slot that the trainer filled last. The newest is never in it."""

        def whole(orders: list[StagedJob]) -> list[StagedJob]:
            fill = read_fill(self._pulse) if self._keep > 1 and self._pulse >= 0 else None
            return [one for one in orders if not (fill and one.job.slot == fill[0] and one.job.job < fill[1])]

        self._replace(whole)

    def ids(self) -> list[str] | None:
        """The ids of what is in memory, newest first; None: not known yet."""
        if not self.sealed.is_set() or not self._ids.begun:
            return None
        return [self._ids.of(order) for order in self.all_held()]

    def offer(self, wanted: str | None = None) -> Reply | None:
        """What there is to restore from, as a reply to `control.Question.SNAPSHOT`; None: not known yet.

        Args:
            wanted: the snapshot; None: the newest, which must be a whole one.

        Raises:
            OSError: the system gives no descriptor.
        """
        if wanted is None and self._keep > 1:
            return nothing("it is the share of one of several ranks")
        if not self.sealed.is_set() or not self._ids.begun:
            return None
        with self._lock:
            run = self._run
            order = next((one for one in reversed(self._orders) if wanted in (None, one.snapshot)), None)
            if order is None or run is None:
                return nothing("no snapshot is in memory" if wanted is None else f"{wanted} is not kept in memory")
            error = self._digested.get(order)
            if error is not None:
                return nothing(f"the snapshot in memory cannot be used: {error.message}")
        staged = order.staged(self._ids.of(order))
        if staged.digests.known is None:
            self._digest_soon(order)
            return None
        body = {
            "snapshot": staged.snapshot,
            "step": order.job.step,
            "manifest": self._described(staged, run.run).decode(),
            "run": run.run,
            "record": run.text.decode(),
            "file": staged.data.name,
            "nbytes": staged.nbytes,
            "durable": order.durable,
            "beat": (beat := self.beat) and asdict(beat),
        }
        return Reply(body, (staged.slot.reading_fd(),))

    def _described(self, staged: Staged, run: str) -> bytes:
        """The manifest, or the part record of a rank's share, of which the digests are known."""
        manifest = staged.manifest(run, staged.digests.known)
        if not self._ranks.several:
            return manifest_codec.encode(manifest)
        return part_records.encode(part_records.part_of(manifest, staged.cut_layout.layout, self._ranks))

    def let_go(self) -> None:
        """It is not wanted any more: give the memory back as soon as it is durable."""
        self._unwanted = True
        self._drop_unwanted()

    def settle(self) -> None:
        """What is in memory has become durable, or cannot."""
        self._settled = True
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        newest = self.newest
        # Of several ranks none knows alone which one becomes durable.
        over = self._settled or (self._keep == 1 and newest is not None and newest.durable)
        if self._unwanted and over:
            self._replace(lambda _: [])

    def close(self) -> None:
        """Let go of everything."""
        self._replace(lambda _: [])
        self.take_pulse(-1)

    def _replace(self, kept: Callable[[list[StagedJob]], list[StagedJob]]) -> None:
        """Keep these of the orders, and let go of the others."""
        with self._lock:
            self._orders = kept(self._orders)

    def _digest_soon(self, order: StagedJob) -> None:
        with self._lock:
            if order in self._digested:
                return
            self._digested[order] = None
        threading.Thread(target=self._digest, args=(order,), name="ckpt-seal", daemon=True).start()

    def _digest(self, order: StagedJob) -> None:
        try:
            order.staged("").timed_digest()
        except (CkptError, ValueError, OSError) as err:
            self._digested[order] = ErrorRecord.of(err)
        finally:
            self.sealed.set()
            self.changed()


@dataclass(eq=False)
class SlotReaders:
    """Counts the readers of each slot. Any thread.

    Args:
        freed: called with a slot whose last reader has ended after its job was settled as still read.
    """

    _freed: Callable[[int], object]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _readers: Counter[int] = field(default_factory=Counter, init=False)
    _promised: set[int] = field(default_factory=set, init=False)

    @contextmanager
    def reading(self, slot: int) -> Iterator[None]:
        """The block reads the slot."""
        with self._lock:
            self._readers[slot] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[slot] -= 1
                if not self._readers[slot] and slot in self._promised:
                    self._promised.discard(slot)
                    self._freed(slot)

    def settle(self, slot: int, tell: Callable[[bool], object]) -> None:
        """Call `tell` with whether the slot is still read; `freed` for it comes later than that."""
        with self._lock:
            is_read = self._readers[slot] > 0
            if is_read:
                self._promised.add(slot)
            tell(is_read)
