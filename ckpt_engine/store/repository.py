"""A run's repository: its record, its snapshots, and which data they need."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_engine.errors import CorruptError, ForeignError, FormatError, NewerFormatError, StorageMissingError
from ckpt_engine.store import layout, manifest_codec
from ckpt_engine.store.manifest import FORMAT, VERSION, Manifest, SnapshotInfo
from ckpt_engine.store.storage.base import ObjectInfo, Storage

_Infos = list[SnapshotInfo]  # inside Repository, `list` is its method


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `ckpt.json` says: which run lives here (`run`, 32 hex digits) and since when (wall-clock seconds)."""

    run: str
    created: float


@dataclass(frozen=True, slots=True)
class Damaged:
    """A snapshot whose manifest cannot be used, and why."""

    id: str
    seq: int
    error: FormatError


@dataclass(frozen=True, slots=True)
class Listing:
    """All snapshots, oldest first, and the damaged ones; head reads only, so a listed body may still be damaged."""

    snapshots: tuple[SnapshotInfo, ...]
    damaged: tuple[Damaged, ...]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Data no manifest needs, and data that cannot be proven unneeded because of `damaged` manifests."""

    unreferenced: tuple[ObjectInfo, ...]
    withheld: tuple[ObjectInfo, ...]
    damaged: tuple[Damaged, ...]


class Repository:
    """Snapshots in a storage. Reading needs no lease; every method that writes does.

    What has been read of a manifest is remembered: manifests never change.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._infos: dict[str, SnapshotInfo] = {}
        self._files: dict[str, tuple[str, ...]] = {}
        self._record: RunRecord | None = None

    def record(self) -> RunRecord | None:
        """The run record; None where nothing has been written yet.

        Raises:
            ForeignError: there are files, and they are not ours.
            CorruptError, NewerFormatError: there is a record and it cannot be used.
        """
        if self._record is None:
            try:
                self._record = _parse_record(self.storage.get(layout.RECORD), self.storage.url)
            except StorageMissingError:
                self._refuse_foreign()
        return self._record

    def create_if_absent(self) -> RunRecord:
        """The run record, written now if there is none. Call it holding the lease, before the first write.

        Raises:
            ForeignError: a folder with other files; nothing is written to it.
            CorruptError, NewerFormatError, StorageError
        """
        record = self.record()
        if record is None:
            record = RunRecord(self._run_of_manifests() or os.urandom(16).hex(), time.time())
            text = {"format": FORMAT, "version": VERSION, "run": record.run, "created": record.created}
            self.storage.put(layout.RECORD, [memoryview(json.dumps(text).encode() + b"\n")])
            self._record = record
        return record

    @property
    def run_id(self) -> str:
        """The run's id.

        Raises:
            StorageMissingError: nothing has been written yet.
        """
        record = self.record()
        if record is None:
            raise StorageMissingError(
                f"no run at {self.storage.url}", hint="check the path; a run starts with its first save"
            )
        return record.run

    def ids(self) -> tuple[layout.ParsedId, ...]:
        """All snapshots by name, oldest first: one listing, no reads."""
        found = (layout.manifest_id(item.name) for item in self.storage.list(layout.MANIFESTS))
        return tuple(sorted((parsed for parsed in found if parsed), key=lambda parsed: (parsed.seq, parsed.id)))

    def scan(self) -> Listing:
        """All snapshots with what a listing shows, and the ones whose head cannot be read."""
        infos, damaged = [], []
        for parsed in self.ids():
            try:
                info = self._infos.get(parsed.id) or self._read_info(parsed.id)
            except StorageMissingError:
                continue  # forgotten meanwhile
            except FormatError as err:
                damaged.append(Damaged(parsed.id, parsed.seq, err))
                continue
            self._infos[parsed.id] = info
            infos.append(info)
        return Listing(tuple(infos), tuple(damaged))

    def list(self) -> _Infos:
        """The snapshots, oldest first; `scan` also tells about damaged ones."""
        return list(self.scan().snapshots)

    def read(self, snapshot: str) -> Manifest:
        """The verified manifest of a snapshot.

        Raises:
            StorageMissingError: no such snapshot.
            CorruptError, ForeignError, NewerFormatError
        """
        name = layout.manifest_name(snapshot)
        try:
            if layout.parse_id(snapshot) is None:
                raise StorageMissingError(f"not a snapshot id: {snapshot}")
            data = self.storage.get(name)
        except StorageMissingError as err:
            hint = f"ckpt ls {self.storage.url}"
            raise StorageMissingError(f"no snapshot {snapshot} at {self.storage.url}", hint=hint) from err
        with self._locating(name):
            manifest = manifest_codec.decode(data)
            _require_id(manifest.info, snapshot)
        self._remember(manifest)
        return manifest

    def files_of(self, snapshot: str) -> tuple[str, ...]:
        """The names of the data files a snapshot needs. Raises as `read`."""
        if snapshot not in self._files:
            self.read(snapshot)
        return self._files[snapshot]

    def commit(self, manifest: Manifest) -> None:
        """Make a snapshot exist. Every data file it names MUST be durable already.

        Raises:
            StorageExistsError: it was committed before.
            StorageError: it does not exist, as before.
        """
        name = layout.manifest_name(manifest.info.id)
        if layout.manifest_id(name) is None:
            raise ValueError(f"not a snapshot id: {manifest.info.id!r}")
        self.storage.put(name, [memoryview(manifest_codec.encode(manifest))])
        self._remember(manifest)

    def next_seq(self) -> int:
        """A number higher than that of every snapshot, damaged ones included."""
        return max((parsed.seq for parsed in self.ids()), default=0) + 1

    def forget(self, ids: Iterable[str]) -> None:
        """Remove manifests, durably: the snapshots no longer exist, their data becomes garbage. Needs the lease."""
        gone = tuple(ids)
        for snapshot in gone:
            self._infos.pop(snapshot, None)
            self._files.pop(snapshot, None)
        self.storage.delete(*(layout.manifest_name(snapshot) for snapshot in gone))

    def unreferenced(self, in_flight: Iterable[str] = ()) -> Garbage:
        """The data files no snapshot needs, by reachability over all manifests.

        A file is kept while a snapshot of its own name exists in whatever condition. A manifest that cannot be read may
        refer to any data as old as itself or older: that is withheld.

        Args:
            in_flight: ids of snapshots being written now, whose manifests are still to come.
        """
        busy = set(in_flight)
        # Data first, then manifests: data of a snapshot that is committed between the two is then seen as needed.
        found = [(item, layout.data_owner(item.name)) for item in self.storage.list(layout.DATA)]
        alive = {parsed.id for parsed in self.ids()}
        loose = [(item, owner) for item, owner in found if owner and owner.id not in alive and owner.id not in busy]
        if not loose:
            return Garbage((), (), ())
        needed, damaged = self._references(alive)
        blocked_up_to = max((bad.seq for bad in damaged), default=-1)
        unneeded = [(item, owner.seq > blocked_up_to) for item, owner in loose if item.name not in needed]
        free = tuple(item for item, proven in unneeded if proven)
        return Garbage(free, tuple(item for item, proven in unneeded if not proven), damaged)

    def _references(self, alive: Iterable[str]) -> tuple[set[str], tuple[Damaged, ...]]:
        needed: set[str] = set()
        damaged = []
        for snapshot in alive:
            try:
                if snapshot not in self._files:
                    self.read(snapshot)
            except StorageMissingError:
                continue
            except FormatError as err:
                parsed = layout.parse_id(snapshot)
                damaged.append(Damaged(snapshot, parsed.seq if parsed else 0, err))
                continue
            needed.update(self._files[snapshot])
        return needed, tuple(damaged)

    def _remember(self, manifest: Manifest) -> None:
        self._infos[manifest.info.id] = manifest.info
        self._files[manifest.info.id] = tuple(file.name for file in manifest.files)

    def _read_info(self, snapshot: str) -> SnapshotInfo:
        name = layout.manifest_name(snapshot)
        head = self.storage.get(name, 0, manifest_codec.HEAD_BYTES)
        with self._locating(name):
            info = manifest_codec.decode_info(head)
            if info is not None:
                _require_id(info, snapshot)
        return info or self.read(snapshot).info

    @contextmanager
    def _locating(self, name: str) -> Iterator[None]:
        """Adds to a format error of the block where it was found."""
        try:
            yield
        except FormatError as err:
            raise type(err)(f"{self.storage.url}/{name}: {err.message}", hint=err.hint) from err

    def _refuse_foreign(self) -> None:
        for item in self.storage.list(""):
            if not layout.is_ours(item.name):
                raise ForeignError(
                    f"{self.storage.url} has files that are not of ckpt-engine, such as {item.name}",
                    hint="choose an empty or new folder",
                )

    def _run_of_manifests(self) -> str | None:
        for parsed in reversed(self.ids()):
            try:
                return self.read(parsed.id).run
            except FormatError:
                continue
        return None


def _require_id(info: SnapshotInfo, snapshot: str) -> None:
    if info.id != snapshot:
        raise CorruptError(f"this is the manifest of {info.id}")


def _parse_record(data: bytes, url: str) -> RunRecord:
    where = f"{url}/{layout.RECORD}"
    try:
        row = json.loads(data)
        if not isinstance(row, dict) or row.get("format") != FORMAT:
            raise ForeignError(f"{where} is not of ckpt-engine", hint="choose an empty or new folder")
        if row["version"] > VERSION:
            raise NewerFormatError(
                f"{where} has format version {row['version']}, this program reads up to {VERSION}",
                hint="upgrade ckpt-engine",
            )
        return RunRecord(str(row["run"]), float(row["created"]))
    except (ValueError, LookupError, TypeError, RecursionError) as err:
        raise CorruptError(
            f"{where} is damaged: {err}", hint="remove it: it is rebuilt from the newest snapshot"
        ) from err
