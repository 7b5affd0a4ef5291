"""The repository of a run: its snapshots in one storage."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    ForeignError,
    FormatError,
    NewerFormatError,
    SealError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
)
from ckpt_engine.observe.number_types import Seconds
from ckpt_engine.observe.resume_report import FILE_NAME
from ckpt_engine.store import catalog, json_checks, manifest_codec, names
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.decode import require_decodable
from ckpt_engine.store.manifest import FORMAT, VERSION, DataFile, Manifest, SnapshotInfo
from ckpt_engine.store.quarantine import Damaged, KnownDamage
from ckpt_engine.store.sealed_json import seal, unseal
from ckpt_engine.store.storage.base import ObjectInfo, Storage

READS_AT_ONCE = 16
"""Manifests read at once where it is latency that counts: anywhere but on a disk."""
_KEY_LOOKS = 3
"""So many of the newest sealed manifests show whether the keys at hand open any."""

_Infos = list[SnapshotInfo]  # inside Repository, `list` is its method
Data = Sequence[tuple[ObjectInfo, names.ParsedId]]
"""Data files, each with the snapshot that it was written for."""
_T = TypeVar("_T")
_Of = TypeVar("_Of")
_FORK = {"url": str, "run": str, "snapshot": str, "step": int}
FORKED = "forked_from"
"""The note of all snapshots of a run that was forked: its `ForkPoint`."""
CHANGED = "resumed_with"
"""The note of a snapshot whose line has changes: the digest of the section `resume` that was applied last."""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a run was forked: the place and the id of the other run, its snapshot, and the step of that."""

    url: str
    run: str
    snapshot: str
    step: int

    def __str__(self) -> str:
        return f"{self.url}#{self.step} ({self.snapshot})"


def fork_of(notes: Mapping[str, Any]) -> ForkPoint | None:
    """Where the run was forked whose snapshot has these notes; None: it was not."""
    row: Any = notes.get(FORKED)
    is_fork = isinstance(row, dict) and {key: type(one) for key, one in row.items()} == _FORK
    return ForkPoint(**row) if is_fork else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `ckpt.json` says.

    Args:
        run: which run lives here, as 32 hex digits.
        created: since when, in wall-clock seconds.
        fork: where it is forked, while that may not be complete; None: it is not.
        protect_days: how long each snapshot stays, whatever retention says; see `protection`.
    """

    run: str
    created: Seconds
    fork: ForkPoint | None = None
    protect_days: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Listing:
    """All snapshots, oldest first, and the damaged ones: those of an unreadable manifest, and those in quarantine.

    Head reads only, so a listed body may still be damaged.
    """

    snapshots: tuple[SnapshotInfo, ...]
    damaged: tuple[Damaged, ...]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Data no manifest needs, and data that cannot be proven unneeded because of `damaged` manifests.

    Args:
        owners: snapshots that `unreferenced` was written for, and whose manifest another process may have removed.
    """

    unreferenced: tuple[ObjectInfo, ...]
    withheld: tuple[ObjectInfo, ...]
    damaged: tuple[Damaged, ...]
    owners: frozenset[str] = frozenset()


class Repository:
    """Snapshots in a storage. Reading needs no lease; every method that writes does.

    What has been read of a manifest is remembered: manifests never change. Where many are new to it the catalog is
    asked first (`catalog.json`), so that requests grow with the pages of the listing and not with the snapshots.

    Attributes:
        damage: what is known to be damaged. No plan refers to its files, and retention does not see its snapshots.
        recent: the manifests that were read or written last.
        alive: the snapshots of the last listing, and those committed since.
        copied: those of the last listing whose manifest is stored twice, as it is at a place with parity.
        is_refusing: whether it was reported that this user may remove nothing there.
    """

    is_refusing = False

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._infos: dict[str, SnapshotInfo] = {}
        self._files: dict[str, tuple[str, ...]] = {}
        self._record: RunRecord | None = None
        self._stored_record: bytes | None = None
        self._run_of_manifests: str | None = None
        self._last_look: Sequence[tuple[names.ParsedId, ObjectInfo]] = ()
        self.alive: set[str] = set()
        self.copied: set[str] = set()
        self._forgotten: set[str] = set()
        """Those whose manifests this object has removed durably since it last tried to put them."""
        self._unlisted: deque[str] = deque(maxlen=16)
        """Those that were known, are not forgotten, and are in the listing no more; the last ones, as any would do."""
        self.damage = KnownDamage(storage)
        self.recent: tuple[Manifest, ...] = ()
        self._catalogued: set[str] = set()
        """The snapshots that need no place in the catalog: they have one, or writing it was tried with them."""

    def record(self) -> RunRecord | None:
        """The run record; None where nothing has been written yet.

        One that is damaged, or was changed after it was sealed, or has no digest and disagrees with the snapshots, says
        what they say.

        Raises:
            ForeignError: there are files, and they are not ours.
            CorruptError, SealError: the record cannot be used, and there is no snapshot that says whose it is.
            NewerFormatError: a later version wrote it.
        """
        if self._record is None:
            try:
                self._stored_record = self.storage.get(names.RECORD)
                record = parse_record(self._stored_record, self.storage.url)
                is_certain = self._stored_record == encode_record(record)
                self._record = record if is_certain else self._agreeing(record)
            except StorageMissingError:
                self._refuse_foreign()
                return None
            except (CorruptError, SealError) as err:
                run = self.run_of_manifests(_KEY_LOOKS if isinstance(err, SealError) else None)
                if run is None:
                    raise
                self._record = RunRecord(run, time.time())
        return self._record

    def create_if_absent(self, protect_days: float | None = None) -> RunRecord:
        """The run record, written now if there is none, or if it is damaged, or if the snapshots are of another run.

        Call it holding the lease, before the first write.

        Args:
            protect_days: what the record has to say; None: what it says.

        Raises:
            ForeignError: a folder with other files; nothing is written to it.
            CorruptError, NewerFormatError, StorageError
        """
        record = self.record()
        if record is None:
            record = RunRecord(self.run_of_manifests() or os.urandom(16).hex(), time.time())
        else:
            record = self._agreeing(record)
        if protect_days is not None:
            record = replace(record, protect_days=protect_days)
        text = encode_record(record)
        if text != self._stored_record:
            self.storage.put(names.RECORD, [memoryview(text)], exclusive=False)
        self._record, self._stored_record = record, text
        return record

    def run_of_manifests(self, newest: int | None = None) -> str | None:
        """The run that the newest readable manifest names; None where there is none.

        Args:
            newest: no more than so many of the newest ones are read.
        """
        if self._run_of_manifests is None:
            for parsed in self.ids()[::-1][:newest]:
                with suppress(FormatError, StorageMissingError):
                    self._run_of_manifests = self.read(parsed.id).run
                    break
        return self._run_of_manifests

    def _agreeing(self, record: RunRecord) -> RunRecord:
        """The record, with the run that the snapshots name."""
        return replace(record, run=self.run_of_manifests() or record.run)

    @property
    def run_id(self) -> str:
        """The run's id.

        Raises:
            StorageMissingError: nothing has been written yet.
        """
        return self.require_record().run

    def require_record(self) -> RunRecord:
        """The run record. Raises as `run_id` and `record`."""
        record = self.record()
        if record is None:
            raise StorageMissingError(
                f"no run at {self.storage.url}", hint="check the path; a run starts with its first save"
            )
        return record

    def ids(self) -> tuple[names.ParsedId, ...]:
        """All snapshots by name, oldest first: one listing, no reads."""
        return tuple(map(itemgetter(0), self._manifests()))

    def scan(self) -> Listing:
        """All snapshots with what a listing shows, and the ones whose head cannot be read."""
        listed = self._manifests()
        self.learn([item for _, item in listed], self._infos)
        bad = {one.id: one for one in self._read_missing(listed, self._infos, self._read_info)} | self.damage.snapshots
        good = [self._infos[parsed.id] for parsed, _ in listed if parsed.id in self._infos and parsed.id not in bad]
        return Listing(tuple(good), tuple(bad.values()))

    def list(self) -> _Infos:
        """The snapshots, oldest first; `scan` also tells about damaged ones."""
        return list(self.scan().snapshots)

    def info(self, snapshot: str) -> SnapshotInfo:
        """What a listing shows of one snapshot. Raises as `read`, as far as the head of its manifest can tell."""
        return self._infos.get(snapshot) or self._read_info(snapshot)

    def read(self, snapshot: str) -> Manifest:
        """The verified manifest of a snapshot.

        Raises:
            StorageMissingError: no such snapshot.
            CorruptError, ForeignError, NewerFormatError
        """
        return self.read_text(snapshot)[0]

    def read_text(
        self, snapshot: str, known: Mapping[bytes, Manifest] = MappingProxyType({})
    ) -> tuple[Manifest, bytes]:
        """The same, and its bytes.

        Args:
            known: manifests by their bytes, which are not decoded again.
        """
        name, *more = self.manifest_objects(snapshot)
        with suppress(*(FormatError, StorageMissingError) if more else ()):
            return self.read_object(name, snapshot, known)
        return self.read_object(more[0], snapshot, known)

    def manifest_objects(self, snapshot: str) -> tuple[str, ...]:
        """The names of the objects that should have the manifest of a snapshot."""
        second = (names.copy_name(snapshot),) if snapshot in self.copied else ()
        return (names.manifest_name(snapshot), *second)

    def read_object(
        self, name: str, snapshot: str, known: Mapping[bytes, Manifest] = MappingProxyType({})
    ) -> tuple[Manifest, bytes]:
        """As `read_text`, from this object and no other."""
        try:
            if names.parse_id(snapshot) is None:
                raise StorageMissingError(f"not a snapshot id: {snapshot}")
            data = self.storage.get(name)
        except StorageMissingError as err:
            url = self.storage.url
            raise StorageMissingError(f"no snapshot {snapshot} at {url}", hint=f"ckpt ls {url}") from err
        with self._locating(name):
            manifest = known.get(data) or manifest_codec.decode(data)
            _require_id(manifest.info, snapshot)
        self.remember(manifest)
        return manifest, data

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
            CorruptError: it could never be read, as before.
        """
        if manifest.bases:
            require_decodable(manifest)
        self._put(manifest, manifest_codec.encode(manifest))

    def commit_copy(self, manifest: Manifest, text: bytes) -> None:
        """Make a snapshot exist that another place has; an earlier attempt may have done it. Raises as `commit`.

        Args:
            text: the bytes of its manifest.
        """
        try:
            self._put(manifest, text)
        except StorageExistsError:
            if self.storage.get(names.manifest_name(manifest.info.id)) != text:
                raise
            self.remember(manifest)

    def _put(self, manifest: Manifest, text: bytes) -> None:
        """The commit point: from here on the snapshot exists."""
        name = names.manifest_name(manifest.info.id)
        if names.manifest_id(name) is None:
            raise ValueError(f"not a snapshot id: {manifest.info.id!r}")
        if (retain := self.storage.capabilities.retain) is not None:
            files = {file.name for file in manifest.files}  # also what older snapshots have written
            if self.copied:
                files |= {item.name for item in self.storage.list(names.DATA) if names.data_file_of(item.name) in files}
            retain(sorted(files))
        self._forgotten.discard(manifest.info.id)
        self.storage.put(name, [memoryview(text)])
        self.remember(manifest)

    def still_has(self, snapshots: Collection[str], files: Sequence[DataFile]) -> bool:
        """Whether snapshots are there with these data files, which stay as long as nothing is forgotten.

        Raises:
            StorageError: that cannot be found out.
        """
        there = set(map(attrgetter("id"), self.ids()))  # and learns what is damaged
        is_sound = self.damage.files.isdisjoint(map(attrgetter("name"), files))
        return is_sound and there.issuperset(snapshots) and not lacking(self.storage, files)

    def next_seq(self) -> int:
        """A number higher than that of every snapshot, damaged ones included."""
        return max((parsed.seq for parsed in self.ids()), default=0) + 1

    def forget(self, ids: Iterable[str]) -> None:
        """Remove manifests, durably: the snapshots no longer exist, their data becomes garbage. Needs the lease."""
        gone = tuple(ids)
        if self.copied:  # first: a copy alone makes a snapshot exist
            self.storage.delete(*map(names.copy_name, gone))
        self.storage.delete(*map(names.manifest_name, gone))
        for snapshot in gone:
            self.alive.discard(snapshot)
            self._infos.pop(snapshot, None)
            self._files.pop(snapshot, None)
        self._forgotten.update(gone)

    def data(self, in_flight: Container[str] = ()) -> Data:
        """The data files that are there and their parity, except those of the snapshots `in_flight`."""
        found = [(item, names.owner_of(item.name)) for item in self.storage.list(names.DATA)]
        return [(item, owner) for item, owner in found if owner and owner.id not in in_flight]

    def unreferenced(self, in_flight: Container[str] = (), data: Data | None = None) -> Garbage:
        """The data files no snapshot needs, by reachability over all manifests.

        A manifest that cannot be read may refer to any data as old as itself or older: that is withheld. Files of a
        snapshot's own name that it does not need are left by a copy of it that was interrupted, and begun again with
        another codec. Nothing is unneeded on the word of one listing: a manifest that this object has not removed
        itself and that the listing lacks is asked for by its name, and has to be missing there, too.

        Args:
            in_flight: ids of snapshots being written now, whose manifests are still to come.
            data: what `data` has found before the manifests were listed last; None: both are listed now.

        Raises:
            StorageError: the listing lacks a manifest that is there.
        """
        # Data first, then manifests: data of a snapshot that is committed between the two is then seen as needed.
        found = self.data(in_flight) if data is None else data
        self._forgotten &= {owner.id for _, owner in found}
        listed = self._manifests() if data is None else [one for one in self._last_look if one[0].id in self.alive]
        own = {name for snapshot in self.alive for name in self._files.get(snapshot, ())}
        loose = [
            (item, owner) for item, owner in found if item.name not in own and names.data_file_of(item.name) not in own
        ]
        if not loose:
            return Garbage((), (), ())
        needed, damaged = self._references(listed)
        blocked_up_to = max((bad.seq for bad in damaged), default=-1)
        needed_by_damaged = {bad.id for bad in damaged}
        unneeded = [
            (item, owner.seq > blocked_up_to)
            for item, owner in loose
            if owner.id not in needed_by_damaged and needed.isdisjoint({item.name, names.data_file_of(item.name)})
        ]
        free = tuple(item for item, proven in unneeded if proven)
        owners = frozenset(owner.id for item in free if (owner := names.owner_of(item.name)))
        owners -= self.alive | self._forgotten
        if free:
            self._require_gone(owners | set(self._unlisted).difference(self.alive))
        return Garbage(free, tuple(item for item, proven in unneeded if not proven), damaged, owners)

    def _require_gone(self, snapshots: Collection[str]) -> None:
        def is_there(snapshot: str) -> bool:
            with suppress(StorageMissingError, CorruptError):  # none of our files has that name
                return bool(self.storage.get(names.manifest_name(snapshot), 0, 1))
            return False

        if any(self._at_once(is_there, sorted(snapshots))):
            problem = f"a listing of {self.storage.url} lacks snapshots that are there: nothing is removed"
            raise StorageError(problem, hint="look at the store, and what stands before it; it is tried again")
        self._unlisted.clear()

    def needed_by(self, snapshot: str) -> tuple[str, ...]:
        """The other snapshots that need data files of this one, oldest first, as far as manifests can be read."""
        listed = self._manifests()
        self._references(listed)
        return tuple(
            parsed.id
            for parsed, _ in listed
            if parsed.id != snapshot
            and any(names.data_owner(name) == names.parse_id(snapshot) for name in self._files.get(parsed.id, ()))
        )

    def remember(self, manifest: Manifest) -> None:
        """Note a verified manifest that is there now: it is not read again."""
        snapshot = manifest.info.id
        self._infos[snapshot] = manifest.info
        self._files[snapshot] = tuple([file.name for file in manifest.files])
        self.alive.add(snapshot)
        self.recent = (*self.recent[-1:], manifest)

    def learn(self, listed: Iterable[ObjectInfo], known: Collection[str] | None = None) -> None:
        """Take from the catalog what it has of manifests, if many are unknown.

        Args:
            listed: objects as the storage lists them now; those that are no manifests are ignored.
            known: ids about which nothing has to be learned; default: those whose data files are known.
        """
        known = self._files if known is None else known
        manifests = {parsed.id: item for item in listed if (parsed := names.manifest_id(item.name))}
        if len(manifests.keys() - known) <= catalog.FEW:
            return
        try:
            record = self.record()
            cards = catalog.decode(self.storage.get(names.CATALOG), record.run, manifests) if record else []
        except CkptError:
            return  # a cache: without it the manifests are read
        for card in cards:
            self._infos.setdefault(card.info.id, card.info)
            self._files.setdefault(card.info.id, card.files)
            self._catalogued.add(card.info.id)

    def write_catalog_if_due(self, require_room: Callable[[int], object] = lambda _: None) -> None:
        """Write the catalog if it lacks so many snapshots that listings would take long. Needs the lease.

        Cheap if it is not due. A catalog that cannot be written is tried again many snapshots later: listings take
        longer until then.

        Args:
            require_room: raises `StorageError` if so many bytes must not be written.
        """
        if len(self.alive - self._catalogued) < catalog.EVERY:
            return
        with suppress(CkptError):
            listed = self._manifests()
            self.learn([item for _, item in listed])
            if len(self.alive - self._catalogued) < catalog.EVERY:
                return
            self._catalogued = set(self.alive)
            self._read_missing(listed, self._files, self.files_of)
            cards = (
                catalog.CatalogEntry(item, self._infos[parsed.id], self._files[parsed.id])
                for parsed, item in listed
                if parsed.id in self._files
            )
            text = catalog.encode(self.run_id, cards)
            if len(text) > names.most_bytes(names.CATALOG):
                return  # no reader takes it
            require_room(len(text))
            self.storage.put(names.CATALOG, [memoryview(text)], exclusive=False)

    def _manifests(self) -> Sequence[tuple[names.ParsedId, ObjectInfo]]:
        """All manifests, oldest first: one listing, no reads."""
        listed = list(self.storage.list(names.MANIFESTS))
        found = {parsed: item for item in listed if (parsed := names.manifest_id(item.name))}
        if len(found) < len(listed):
            copies = {parsed: item for item in listed if (parsed := names.copy_id(item.name))}
            self.copied = {parsed.id for parsed in copies}
            found = copies | found
        if len(found) < len(listed) or self.damage.snapshots:
            self.damage.look(listed, found)
        self.alive = {parsed.id for parsed in found}
        for known in (self._infos, self._files):
            for gone in known.keys() - self.alive:
                del known[gone]
                self._unlisted.append(gone)
        self._last_look = [(parsed, found[parsed]) for parsed in sorted(found, key=attrgetter("seq", "id"))]
        return self._last_look

    def _read_missing(
        self,
        listed: Sequence[tuple[names.ParsedId, ObjectInfo]],
        known: Mapping[str, object],
        read: Callable[[str], object],
    ) -> tuple[Damaged, ...]:
        """`read` those that are not in `known`, which it fills; returns those that cannot be read."""

        def attempt(parsed: names.ParsedId) -> Damaged | None:
            try:
                read(parsed.id)
            except StorageMissingError:
                return None  # forgotten meanwhile
            except FormatError as err:
                return Damaged(parsed.id, parsed.seq, err)
            return None

        missing = [parsed for parsed, _ in listed if parsed.id not in known]
        return tuple([bad for bad in self._at_once(attempt, missing) if bad]) if missing else ()

    def _at_once(self, work: Callable[[_Of], _T], ids: Sequence[_Of]) -> Iterable[_T]:
        if len(ids) < 2 or self.storage.capabilities.cheap_reads:
            return map(work, ids)
        with ThreadPoolExecutor(min(READS_AT_ONCE, len(ids)), thread_name_prefix="ckpt-list") as pool:
            return list(pool.map(work, ids))

    def _references(self, listed: Sequence[tuple[names.ParsedId, ObjectInfo]]) -> tuple[set[str], tuple[Damaged, ...]]:
        self.learn([item for _, item in listed])
        damaged = self._read_missing(listed, self._files, self.files_of)
        return {name for parsed, _ in listed for name in self._files.get(parsed.id, ())}, damaged

    def _read_info(self, snapshot: str) -> SnapshotInfo:
        name, *more = self.manifest_objects(snapshot)
        info: SnapshotInfo | None = None
        with suppress(*(FormatError, StorageMissingError) if more else ()):
            head = self.storage.get(name, 0, manifest_codec.HEAD_BYTES)
            with self._locating(name):
                info = manifest_codec.decode_info(head)
                if info is not None:
                    _require_id(info, snapshot)
        return self._infos.setdefault(snapshot, info or self.read(snapshot).info)

    @contextmanager
    def _locating(self, name: str) -> Iterator[None]:
        """Adds to a format error of the block where it was found."""
        try:
            yield
        except FormatError as err:
            raise type(err)(f"{self.storage.url}/{name}: {err.message}", hint=err.hint) from err

    def _refuse_foreign(self) -> None:
        for item in self.storage.list(""):
            if not names.is_ours(item.name) and item.name != FILE_NAME:  # a run that begins from another has it first
                raise ForeignError(
                    f"{self.storage.url} has files that are not of ckpt-engine, such as {item.name}",
                    hint=f"give the run a folder of its own, such as {self.storage.url}/ckpt",
                )


def _require_id(info: SnapshotInfo, snapshot: str) -> None:
    if info.id != snapshot:
        raise CorruptError(f"this is the manifest of {info.id}")


def encode_record(record: RunRecord) -> bytes:
    """The bytes of a run's record."""
    fork = {} if record.fork is None else {"fork": asdict(record.fork)}
    more = {**fork, **({"protect_days": record.protect_days} if record.protect_days else {})}
    return seal({"format": FORMAT, "version": VERSION, "run": record.run, "created": record.created, **more}) + b"\n"


def parse_record(data: bytes, url: str) -> RunRecord:
    """A run's record from its bytes, which come from `url`.

    Raises:
        CorruptError, ForeignError, NewerFormatError: they are none.
    """
    where = f"{url}/{names.RECORD}"
    hint = "remove it: the next start writes it again"
    try:
        row = unseal(data, where)
    except CorruptError as err:
        names.refuse_sealed(data)
        raise CorruptError(err.message, hint=hint) from err
    with json_checks.reading(f"{where} is damaged", hint):
        json_checks.require(bool(row), "it says nothing")
        if row.get("format") != FORMAT:
            raise ForeignError(f"{where} is not of ckpt-engine", hint="choose an empty or new folder")
        if row["version"] > VERSION:
            raise NewerFormatError(
                f"{where} has format version {row['version']}, this program reads up to {VERSION}",
                hint="upgrade ckpt-engine",
            )
        return msgspec.convert({**row, "fork": fork_of({FORKED: row.get("fork")})}, RunRecord)
