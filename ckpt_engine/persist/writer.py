"""The writer: makes staged snapshots durable one after another, and then applies retention.

It knows nothing of processes, threads or sockets: messages come in through `handle`, messages go out through `emit`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from ckpt_engine.errors import CkptError, LeaseHeldError, StorageError, StorageFullError, WriterError
from ckpt_engine.observe.events import Event, Notice, SnapshotCommitted, SnapshotFailed, SnapshotsForgotten
from ckpt_engine.persist import job as values
from ckpt_engine.persist import protocol
from ckpt_engine.persist.fleet import Fleet
from ckpt_engine.persist.job import ErrorRecord, JobDone, PersistJob, WriterConfig
from ckpt_engine.persist.pieces import CutLayout, Digesting
from ckpt_engine.persist.room import Room
from ckpt_engine.persist.skeleton import Skeleton
from ckpt_engine.persist.slots import ArenaSlot
from ckpt_engine.persist.wire import Body
from ckpt_engine.store import layout as names
from ckpt_engine.store.collect import Collected, Pruned, collect, prune
from ckpt_engine.store.lease import Holder, Lease, acquire
from ckpt_engine.store.manifest import DataFile, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import KeepAll, RetentionPolicy, policy_from
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.store.transfer import adopt_run

Emit = Callable[[Body], object]


class Writer:
    """Persists the jobs of one trainer into one run, holding the run's lease meanwhile.

    Args:
        emit: takes the messages to the trainer (see `protocol`); called on the thread that calls `handle`.

    Every method is called by one thread, the same one, in the order of the protocol.
    """

    def __init__(self, config: WriterConfig, emit: Emit) -> None:
        self._config = config
        self._emit = emit
        self._repository: Repository
        self._lease: Lease
        self._policy: RetentionPolicy
        self._room: Room
        self._seq = 0
        self._swept = False
        self._slots: dict[int, ArenaSlot] = {}
        self._layouts: dict[int, CutLayout] = {}
        self._skeletons: dict[int, Skeleton] = {}
        self._fleet: Fleet | None = None
        self._held_back: str | None = None
        """The newest snapshot when retention had to spare one that was being copied."""
        self._closing = ExitStack()

    def open(self) -> None:
        """Take the lease and make the run's folder ready.

        Raises:
            LeaseHeldError: another writer holds it, naming it.
            ForeignError, CorruptError, NewerFormatError: the folder is not one of ours to write.
            StorageError: it cannot be written.
            WriterError: the configuration is impossible.
        """
        config = self._config
        try:
            self._policy = policy_from(config.keep)
        except (ValueError, TypeError) as err:
            raise WriterError(f"cannot apply the retention {dict(config.keep)}: {err}") from err
        storage = open_storage(config.url, config.storage_options)
        fleet = Fleet(config, storage, _holder(config), self._emit_event) if config.tiers else None
        self._lease = acquire(storage, _holder(config), config.lease_wait_seconds)
        with ExitStack() as undo:
            undo.callback(lambda: self._lease.release())
            self._repository = Repository(storage)
            if fleet is None:
                self._repository.create_if_absent()
            else:
                self._repository = fleet.join_run(self._repository)
                fleet.start()
                self._fleet = fleet
            self._seq = self._repository.next_seq()
            self._room = Room(self._repository, self._lease, self._policy, self._notice)
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Give back the lease and the arena. Idempotent."""
        if self._held_back is not None:
            self._prune(self._held_back)
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._closing.close()

    def drain(self) -> None:
        """After `close`: finish what further tiers still want, for at most `drain_seconds`.

        Nearer places are free for another writer meanwhile: only the leases of further tiers are still held.
        """
        if self._fleet is not None:
            self._fleet.drain(self._config.drain_seconds, self._emit_closed)

    def stop_draining(self) -> None:
        """Leave further tiers as they are. The one method that any thread may call."""
        if self._fleet is not None:
            self._fleet.stop()

    def handle(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Do what one message says. A job that fails is reported, never raised.

        Raises:
            WriterError: a message that is not of the protocol.
        """
        match body["kind"]:
            case protocol.PERSIST:
                self._persist(values.job_from_json(body["job"]))
            case protocol.SLOT:
                self._forget_slots([body["slot"]])
                self._slots[body["slot"]] = ArenaSlot(fds[0], body["nbytes"])
            case protocol.LAYOUT:
                layout = values.layout_from_json(body["layout"])
                self._layouts[layout.id] = CutLayout.of(layout)
            case protocol.SKELETON:
                self._skeletons[body["id"]] = Skeleton(body["tree"])
            case protocol.FORGET:
                self._forget_slots(body["slots"])
                for layout_id in body["layouts"]:
                    self._layouts.pop(layout_id, None)
                for skeleton_id in body["skeletons"]:
                    self._skeletons.pop(skeleton_id, None)
            case kind:
                raise WriterError(f"the writer does not know the message {kind!r}")

    def prepare(self) -> None:
        """Once after `open`, before any message: what takes time and needs no answer. Never raises."""
        if self._fleet is not None:
            self._seq = max(self._seq, self._fleet.next_seq())
        self.sweep()

    def sweep(self) -> None:
        """Remove what writers that died have left behind; once, and again only after a full disk. Never raises."""
        if self._swept:
            return
        self._swept = True
        try:
            self._report(collect(self._repository, self._lease))
        except Exception as err:  # noqa: BLE001 - reported; garbage harms nobody
            self._notice(f"cannot remove what earlier writers left behind: {err}")

    def _forget_slots(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            slot = self._slots.pop(number, None)
            if slot is not None:
                slot.close()

    def _persist(self, job: PersistJob) -> None:
        if job.parent is not None and (parent := names.parse_id(job.parent)) is not None:
            self._seq = max(self._seq, parent.seq + 1)  # it may come from a tier that did not answer at the start
        snapshot = names.snapshot_id(self._seq, job.step)
        self._seq += 1
        try:
            committed = self._make_durable(job, snapshot)
        except Exception as err:  # noqa: BLE001 - reported; whatever it is, the next job gets its own chance
            if isinstance(err, StorageFullError):
                self._swept = False
            elsewhere = self._make_durable_elsewhere(job, snapshot, err)
            if elsewhere is None:
                record = ErrorRecord.of(err)
                self._emit_event(SnapshotFailed(snapshot, job.step, self._config.url, record.code, record.message))
                self._emit_done(JobDone(job.job, None, record))
            else:
                self._emit_event(elsewhere)
                self._emit_done(JobDone(job.job, snapshot))
        else:
            self._emit_event(committed)
            self._emit_done(JobDone(job.job, snapshot))
            if self._fleet is not None:
                self._fleet.committed(snapshot)
            self._prune(snapshot)
        self._emit({"kind": protocol.SETTLED, "job": job.job})

    def _make_durable(self, job: PersistJob, snapshot: str) -> SnapshotCommitted:
        """Write the snapshot to the nearest tier, making room before."""
        cut_layout, skeletons = self._resolve(job)
        self.sweep()
        self._check_lease()
        data = DataFile(names.data_name(snapshot), cut_layout.layout.nbytes)
        # Digests are not known yet; any will do to see how much will be written.
        blank = cut_layout.blank_digests
        room = self._room.before(
            data.nbytes, lambda: self._manifest(job, snapshot, cut_layout, skeletons, blank(), data)
        )
        if room is not None and self._fleet is not None:
            self._fleet.gone(room.plan.remove)
        self._told(room)
        committed = self._write(job, snapshot, self._repository, self._config.url)
        self._room.committed(snapshot)
        return committed

    def _check_lease(self) -> None:
        """Raises `LeaseHeldError` if the nearest tier is not ours. One of several is taken again if it is free."""
        try:
            self._lease.check()
        except LeaseHeldError:
            if self._fleet is None:
                raise
            storage = self._repository.storage
            with suppress(CkptError, OSError):  # whatever it was, it is lost
                self._lease.release()
            self._lease = acquire(storage, _holder(self._config))
            self._repository = adopt_run(self._fleet.run, storage)
            self._room = Room(self._repository, self._lease, self._policy, self._notice)

    def _make_durable_elsewhere(self, job: PersistJob, snapshot: str, error: Exception) -> SnapshotCommitted | None:
        """The nearest tier has failed: write the snapshot to the next one that works. None: none does."""
        if self._fleet is None or not isinstance(error, StorageError | LeaseHeldError):
            return None
        self._fleet.primary_failed(error)
        if self._config.fatal:
            return None
        for replicator in self._fleet.working():
            tier = replicator.tier
            try:
                with tier.writing(self._layouts[job.layout].layout.nbytes) as repository:
                    committed = self._write(job, snapshot, repository, tier.storage.url)
            except Exception as err:  # noqa: BLE001 - told as the failure of that tier; the next one may do
                replicator.failed(err)
                continue
            self._fleet.committed(None)
            return committed
        return None

    def _write(self, job: PersistJob, snapshot: str, repository: Repository, tier: str) -> SnapshotCommitted:
        cpu_before = time.thread_time()
        cut_layout, skeletons = self._resolve(job)
        data = DataFile(names.data_name(snapshot), cut_layout.layout.nbytes)
        with self._slots[job.slot].image(data.nbytes) as image:
            digesting = Digesting(image, cut_layout)
            began = time.monotonic()
            try:
                repository.storage.put(data.name, [image])
            except BaseException:
                digesting.abandon()
                raise
            write_seconds = time.monotonic() - began
            digests = digesting.result()
        try:
            repository.commit(self._manifest(job, snapshot, cut_layout, skeletons, digests, data))
        except BaseException:
            self._undo(snapshot, repository)
            raise
        return SnapshotCommitted(
            snapshot=snapshot,
            step=job.step,
            tier=tier,
            nbytes=cut_layout.nbytes,
            written_bytes=data.nbytes,
            latency_seconds=time.monotonic() - job.instant_monotonic,
            write_seconds=write_seconds,
            cpu_seconds=time.thread_time() - cpu_before + digesting.cpu_seconds,
            time=time.time(),
        )

    def _resolve(self, job: PersistJob) -> tuple[CutLayout, dict[str, Skeleton]]:
        """What the job's numbers stand for."""
        try:
            self._slots[job.slot]
            return self._layouts[job.layout], {key: self._skeletons[number] for key, number in job.tree}
        except KeyError as err:
            raise WriterError(
                f"job {job.job} names slot {job.slot}, layout {job.layout} or a skeleton that was never sent: {err}"
            ) from err

    def _manifest(
        self,
        job: PersistJob,
        snapshot: str,
        cut_layout: CutLayout,
        skeletons: dict[str, Skeleton],
        digests: list[str],
        data: DataFile,
    ) -> Manifest:
        parsed = names.parse_id(snapshot)
        assert parsed is not None
        sizes = cut_layout.entry_bytes
        info = SnapshotInfo(
            id=snapshot,
            seq=parsed.seq,
            step=job.step,
            epoch=job.epoch,
            reason=job.reason,
            created=job.created,
            nbytes=cut_layout.nbytes,
            metrics=job.metrics,
            parent=job.parent,
            components={key: sum(sizes[name] for name in skeleton.entries) for key, skeleton in skeletons.items()},
        )
        return Manifest(
            info=info,
            run=self._repository.run_id,
            world={"size": 1},
            software=job.software,
            files=(data,),
            entries=cut_layout.entries(digests),
            tree={key: skeleton.fill(job.values.get(key, [])) for key, skeleton in skeletons.items()},
            notes=job.notes,
        )

    def _undo(self, snapshot: str, repository: Repository) -> None:
        """Free the data of a snapshot that could not be committed.

        The manifest goes first: a commit may have landed although it reported an error.
        """
        try:
            repository.forget([snapshot])
            repository.storage.delete(names.data_name(snapshot))
        except CkptError as err:
            self._swept = False
            self._notice(f"cannot remove the data of the failed snapshot {snapshot} yet: {err}")

    def _prune(self, newest: str) -> None:
        """Retention after a commit. The snapshot is durable: nothing that goes wrong here is its failure."""
        if isinstance(self._policy, KeepAll):
            return
        try:
            protected = self._fleet.protected() if self._fleet is not None else {}
            self._held_back = newest if protected else None
            pruned = prune(self._repository, self._lease, self._policy, protected=protected, verified=(newest,))
        except Exception as err:  # noqa: BLE001 - reported; tried again after the next snapshot
            self._notice(f"retention failed, older snapshots stay: {ErrorRecord.of(err).message}")
            return
        self._told(pruned)

    def _told(self, pruned: Pruned | None) -> None:
        """Tell the trainer what retention did."""
        if pruned is None:
            return
        if pruned.forgotten:
            self._emit_event(SnapshotsForgotten(pruned.forgotten, pruned.collected.freed_bytes))
        for snapshot, why in pruned.not_slimmed.items():
            self._notice(f"snapshot {snapshot} keeps all its components: {why}")
        self._report(pruned.collected)

    def _report(self, collected: Collected) -> None:
        if collected.withheld_bytes:
            damaged = ", ".join(bad.id for bad in collected.damaged)
            self._notice(
                f"{collected.withheld_bytes} bytes of old data stay because damaged manifests may need them: {damaged}"
            )

    def _emit_event(self, event: Event) -> None:
        self._emit(protocol.event(event))

    def _emit_done(self, done: JobDone) -> None:
        self._emit({"kind": protocol.DONE, "done": values.done_to_json(done)})

    def _emit_closed(self, unfinished: Sequence[str]) -> None:
        self._emit({"kind": protocol.CLOSED, "unfinished": list(unfinished)})

    def _notice(self, message: str) -> None:
        self._emit_event(Notice("WARNING", message))


def _holder(config: WriterConfig) -> Holder:
    """The holder as the lease names it: what the trainer said about itself, completed with this process."""
    told = config.holder
    return Holder(
        pid=int(told.get("pid", os.getpid())),
        host=str(told.get("host", socket.gethostname())),
        started=float(told.get("started", time.time())),
        command=str(told.get("command", " ".join([sys.executable, *sys.argv]))),
    )
