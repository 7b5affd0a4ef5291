"""Reads every stored byte of a run again.

What is damaged is named with the tensor that it hits. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_engine.copy.file_parity import FileParity, restored
from ckpt_engine.errors import CkptError, CorruptError, FormatError, SealError, StorageError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.preempt.divergence import parse_rollback
from ckpt_engine.restore.choose import UnreachableTier
from ckpt_engine.store import catalog, container, names, pins
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.decode import joined, require_decodable, stored_pieces
from ckpt_engine.store.lease_holder import parse_holder
from ckpt_engine.store.manifest import Entry, Manifest, Partial, Piece
from ckpt_engine.store.quarantine import parse_quarantine
from ckpt_engine.store.repository import Repository, parse_record
from ckpt_engine.tools.stored_run import Run
from ckpt_engine.tools.verified_files import PieceKey, VerifiedFiles, key_of, parse_verified
from ckpt_engine.writer import part_records
from ckpt_engine.writer.attempts import parse_attempts
from ckpt_engine.writer.run_records import parse_status

READERS = 2
_LOOKS = 3
_NEXT = {
    names.RECORD: "the next start writes it again",
    names.LEASE: "the next start writes it again",
    names.CATALOG: "it is a cache, and not used",
    names.PINS: "the snapshot stays pinned; `ckpt pin` writes it again",
    names.PARTS: "its snapshot is not completed; those before are not hit",
}
"""What happens or is to be done where a file of this kind is damaged."""
_PENDING_PER_READER = 2
Counting = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Takes how many bytes there are, and gives what takes those that were read since."""


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """Something wrong with a snapshot.

    Args:
        code: of the error.
        entry: the entry that is hit; None where it is the manifest or a whole file.
        mendable: what the place itself has can mend it: the parity of a file, the second copy of a manifest.
    """

    code: str
    message: str
    file: str | None = None
    entry: str | None = None
    mendable: bool = False

    @property
    def is_damage(self) -> bool:
        """Whether the place answers, and does not have what was written."""
        return self.code.startswith((FormatError.code[:-2], StorageMissingError.code))

    def __str__(self) -> str:
        text = f"[{self.code}] {': '.join(filter(None, (self.entry, self.file, self.message)))}"
        return f"{text}; `ckpt repair` can mend it here" if self.mendable else text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one snapshot. `forgotten`: retention removed it while it was read, which is no damage.

    `partial`: only the shares of some ranks are here, and were checked.
    """

    snapshot: str
    problems: tuple[SnapshotProblem, ...]
    read_bytes: int
    forgotten: bool = False
    partial: Partial | None = None

    @property
    def ok(self) -> bool:
        """Whether every byte is what was written."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class CheckedCopies:
    """The verdicts on the copies of one place, and what is wrong with its other files."""

    url: str
    verdicts: tuple[Verdict, ...]
    others: tuple[SnapshotProblem, ...]

    @property
    def problems(self) -> list[SnapshotProblem]:
        """All that is wrong here."""
        return [problem for verdict in self.verdicts for problem in verdict.problems] + list(self.others)


def check_run(
    run: Run,
    snapshots: Sequence[str],
    counting: Counting,
    since: float = math.inf,
    *,
    is_remembered: bool = False,
) -> tuple[list[CheckedCopies], list[UnreachableTier]]:
    """Read every byte of snapshots (none: of all, and all other files) at each place of a run.

    Args:
        counting: follows the bytes.
        since, is_remembered: as `since` and `is_kept` of `VerifiedFiles`, at each place.

    Returns:
        What each place has, and the tiers that do not answer.
    """
    wanted = list(dict.fromkeys(run.find(name)[0] for name in snapshots)) or [parsed.id for parsed in run.holders]
    checked: list[CheckedCopies] = []
    away = list(run.away)
    sizes = [(place, _sizes(run, place, wanted)) for place in run.places]
    with counting(sum(sum(ids.values()) for _, ids in sizes)) as advance:
        for place, ids in sizes:
            try:
                verified = VerifiedFiles(place.storage, since, is_kept=is_remembered)
                checker = Checker(place, advance, verified)
                verdicts = tuple(checker.check(snapshot) for snapshot in ids)
                verified.put()  # its record is one of the others
                others = () if snapshots else checker.check_others()
                verified.put()
            except CkptError as err:
                if not run.is_tiered:
                    raise
                away.append(UnreachableTier(place.storage.url, err.code, err.message))
            else:
                checked.append(CheckedCopies(place.storage.url, verdicts, others))
    return checked, away


def _sizes(run: Run, place: Repository, wanted: Sequence[str]) -> dict[str, int]:
    """The wanted snapshots that a place has a copy of, and their bytes as far as they are known."""
    there = {parsed.id for parsed, holders in run.holders.items() if place in holders}
    nbytes: dict[str, int] = {}
    with suppress(CkptError):  # only the bar needs it
        nbytes = {info.id: info.nbytes for info in place.list()}
    return {snapshot: nbytes.get(snapshot, 0) for snapshot in wanted if snapshot in there}


def all_ok(checked: Sequence[CheckedCopies]) -> bool:
    """Whether nothing is damaged."""
    return not any(copies.problems for copies in checked)


class _Stored(NamedTuple):
    """A piece of an entry."""

    entry: str
    piece: Piece


class Checker:
    """Checks snapshots of one repository; bytes that several of them share are read once.

    Args:
        advance: called with the bytes just read, on this thread.
        verified: what need not be read; takes what is whole. None: all is read.
    """

    def __init__(
        self, repository: Repository, advance: Callable[[int], object], verified: VerifiedFiles | None = None
    ) -> None:
        self._repository = repository
        self._advance = advance
        self._verified = verified or VerifiedFiles(repository.storage)
        self._good: set[tuple[str, int, int, str]] = set()

    def check(self, snapshot: str) -> Verdict:
        """Read and digest everything the snapshot needs."""
        manifest: Manifest | None = None
        unusable: list[SnapshotProblem] = []
        for name in self._repository.manifest_objects(snapshot):
            try:
                manifest = self._repository.read_object(name, snapshot)[0]
            except (FormatError, StorageMissingError) as err:
                unusable.append(SnapshotProblem(err.code, err.message, name))
        if manifest is None:
            return self._verdict(snapshot, unusable, 0)
        problems, read_bytes = self._data(manifest, names.manifest_name(snapshot))
        unusable = [replace(one, mendable=True) for one in unusable]
        return self._verdict(snapshot, unusable + problems, read_bytes, manifest.info.partial)

    def check_others(self) -> tuple[SnapshotProblem, ...]:
        """What is wrong with the files that are of no snapshot: `SnapshotProblem.file` names them."""
        listed = [item.name for item in self._repository.storage.list("")]
        checks = ((name, self._other(name)) for name in listed)
        found = [one for name, check in checks if check is not None for one in self._found(name, check)]
        parity = [one for one in map(names.parity_of, listed) if one and str(one) not in self._verified.times]
        for name in parity:
            try:
                damaged = FileParity(self._repository.storage, name).damaged_parts(self._advance)
            except StorageError as err:
                found.append(SnapshotProblem(err.code, err.message, str(name)))
                continue
            if damaged:
                text = f"{damaged:,} parts of it are not what was written → `ckpt repair` makes it again"
                found.append(SnapshotProblem(CorruptError.code, text, str(name)))
            else:
                self._verified.add(str(name))
        return tuple(found)

    def _other(self, name: str) -> Callable[[bytes, str], object] | None:
        """What reads all of the file of this name and raises if that is not possible; None: it is not to be checked."""
        if (pinned := names.pin_id(name)) is not None:
            return lambda text, where: pins.check(text, pinned.id, where)
        if names.part_owner(name) is not None:
            return lambda text, where: self._part(text, name, where)
        readers: dict[str, Callable[[bytes, str], object]] = {
            names.RECORD: lambda text, _: self._record(text),
            names.LEASE: parse_holder,
            names.STATUS: parse_status,
            names.ROLLBACK: parse_rollback,
            names.ATTEMPTS: parse_attempts,
            names.SCRUB: parse_verified,
            **dict.fromkeys(map(names.quarantine_name, self._repository.damage.snapshots), parse_quarantine),
            names.CATALOG: lambda text, _: catalog.decode(text, self._repository.run_id, {}),
        }
        return readers.get(name)

    def _found(self, name: str, check: Callable[[bytes, str], object]) -> list[SnapshotProblem]:
        problems: list[SnapshotProblem] = []
        for _ in range(_LOOKS):  # a running writer may be writing it
            try:
                check(self._repository.storage.get(name), f"{self._repository.storage.url}/{name}")
            except StorageMissingError:
                return []  # removed meanwhile
            except FormatError as err:
                kind = name if "/" not in name else name[: name.rindex("/") + 1]
                known = _NEXT.get(kind, "remove it")
                next_step = f"{err.hint}; {known}" if isinstance(err, SealError) else err.hint or known
                problems = [SnapshotProblem(err.code, f"{err.message} → {next_step}", name)]
            else:
                return []
        return problems

    def _record(self, text: bytes) -> None:
        run, snapshots = parse_record(text, self._repository.storage.url).run, self._repository.run_of_manifests()
        if snapshots not in (None, run):
            raise CorruptError(f"it is of run {run}, the snapshots are of {snapshots}")

    def _part(self, text: bytes, name: str, where: str) -> None:
        part, owner = part_records.decode(text, where), names.part_owner(name)
        if owner is None or (part.manifest.info.id, part.rank) != (owner[0].id, owner[1]):
            raise CorruptError(f"{where} is of rank {part.rank} and of {part.manifest.info.id}")
        for problem in self._data(part.manifest, name)[0]:
            raise CorruptError(f"{problem.file}: {problem.entry or ''}: {problem.message}")

    def _data(self, manifest: Manifest, name: str) -> tuple[list[SnapshotProblem], int]:
        """What is wrong with the data that the manifest in the file `name` needs, and how many bytes were read."""
        problems: list[SnapshotProblem] = []
        try:
            require_decodable(manifest)
        except FormatError as err:
            problems.append(SnapshotProblem(err.code, err.message, name))
        read_bytes = 0
        sizes = {item.name: item.nbytes for item in self._repository.storage.list(names.DATA)}
        stored, whole = _by_file(manifest)
        for file, nbytes in {one.name: one.nbytes for one in manifest.files}.items():
            pieces = stored.get(file, {})
            before = len(problems)
            if file not in sizes:
                held = units.first(list(dict.fromkeys(one.entry for one in pieces.values())), 3)
                problems.append(SnapshotProblem(StorageMissingError.code, f"missing; it holds {held}", file))
                continue
            if sizes[file] != nbytes:
                problems.append(
                    SnapshotProblem(CorruptError.code, f"has {sizes[file]:,} bytes instead of {nbytes:,}", file)
                )
            key = key_of(file, pieces)
            if key in self._verified.times:
                self._good.update((file, *one) for one in pieces)
                continue
            problems += self._header(file, whole.get(file, {}))
            for found, done in self._pieces(file, pieces):
                problems += found
                read_bytes += done
                self._advance(done)
            if len(problems) == before:
                self._verified.add(key)
            elif restored(self._repository.storage, file) is not None:
                problems[before:] = [replace(one, mendable=True) for one in problems[before:]]
        return problems, read_bytes

    def _verdict(
        self, snapshot: str, problems: Sequence[SnapshotProblem], read_bytes: int, partial: Partial | None = None
    ) -> Verdict:
        # Data goes after its manifest: what was missing may have been forgotten since the listing.
        if problems and all(parsed.id != snapshot for parsed in self._repository.ids()):
            return Verdict(snapshot, (), read_bytes, forgotten=True)
        return Verdict(snapshot, tuple(problems), read_bytes, partial=partial)

    def _header(self, name: str, entries: Mapping[str, Entry]) -> Iterator[SnapshotProblem]:
        """The container's own header, which the digests do not cover and other programs read."""
        try:
            nbytes = container.header_nbytes(self._repository.storage.get(name, 0, 8))
            header = container.parse_header(self._repository.storage.get(name, 0, nbytes))
        except CkptError as err:
            yield SnapshotProblem(err.code, f"header: {err.message}", name)
            return
        arrays = {array.name: array for array in header.entries}
        for entry_name, entry in entries.items():
            if not _says_the_same(arrays.get(entry_name), entry):
                yield SnapshotProblem(
                    CorruptError.code, "the file's header does not say what the manifest says", name, entry_name
                )

    def _pieces(self, name: str, stored: Mapping[PieceKey, _Stored]) -> Iterator[tuple[list[SnapshotProblem], int]]:
        pieces = [one for key, one in stored.items() if (name, *key) not in self._good]
        pending: deque[Future[tuple[list[SnapshotProblem], int]]] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-verify") as pool:
            for span in joined(pieces, PIECE_BYTES):
                if len(pending) == READERS * _PENDING_PER_READER:
                    yield pending.popleft().result()
                pending.append(pool.submit(self._read, name, span))
            while pending:
                yield pending.popleft().result()

    def _read(self, name: str, span: Sequence[_Stored]) -> tuple[list[SnapshotProblem], int]:
        """Digest neighbouring pieces with one read; piece by piece where that fails, to say which ones are hit."""
        start, stop = span[0].piece.offset, span[-1].piece.offset + span[-1].piece.nbytes
        buffer = memoryview(bytearray(stop - start))
        try:
            self._repository.storage.get_into(name, start, buffer)
        except CkptError as err:
            if len(span) == 1:
                return [SnapshotProblem(err.code, err.message, name, span[0].entry)], stop - start
            return [problem for one in span for problem in self._read(name, [one])[0]], stop - start
        problems = []
        for entry_name, piece in span:
            at = piece.offset - start
            if digest(buffer[at : at + piece.nbytes]) == piece.digest:
                self._good.add((name, piece.offset, piece.nbytes, piece.digest))
            else:
                where = f"bytes {piece.offset:,} to {piece.offset + piece.nbytes:,}"
                problems.append(
                    SnapshotProblem(CorruptError.code, f"{where} are not what was written", name, entry_name)
                )
        return problems, stop - start


def _by_file(
    manifest: Manifest,
) -> tuple[Mapping[str, Mapping[PieceKey, _Stored]], Mapping[str, Mapping[str, Entry]]]:
    """By the name of a file, the pieces in it by their keys, and the entries that are arrays of it as they are."""
    stored: dict[str, dict[PieceKey, _Stored]] = {}
    for name, one in stored_pieces(manifest):
        pieces = stored.setdefault(manifest.files[one.file].name, {})
        pieces[one.offset, one.nbytes, one.digest] = _Stored(name, one)
    whole: dict[str, dict[str, Entry]] = {}
    # The header of a file that an older snapshot has written names empty arrays of that one.
    own = [one.name for one in manifest.files if names.data_owner(one.name) == names.parse_id(manifest.info.id)]
    for entry_name, entry in manifest.entries.items():
        if entry.is_plain and (entry.pieces or len(own) == len(manifest.files) == 1):
            file = manifest.files[entry.pieces[0].file if entry.pieces else 0]
            whole.setdefault(file.name, {})[entry_name] = entry
    return stored, whole


def _says_the_same(array: container.ContainerEntry | None, entry: Entry) -> bool:
    """Whether the header has the entry where and as what the manifest has it."""
    shape = entry.shape if entry.dtype in container.DTYPES else (entry.nbytes,)
    if array is None or (array.container_dtype, array.shape) != (entry.container_dtype, shape):
        return False
    start = entry.pieces[0].offset if entry.pieces else array.start
    return (array.start, array.end) == (start, start + entry.nbytes)
