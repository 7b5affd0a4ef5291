"""Decodes the stored pieces of a snapshot into the bytes of its entries.

It finds the bases of the pieces that need one. What was encoded together is decoded together.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol, TypeVar

from ckpt_engine.errors import CorruptError, FormatError, NewerFormatError, StorageError
from ckpt_engine.store.codecs.codec import get_codec, get_group_codec
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import RAW, Manifest, Piece

KEPT_BYTES = 192 << 20
"""Decoded pieces that wait for somebody to ask for them, at most."""
SPARE_BYTES = 512 << 20
"""Memory that was used and is kept for the next piece, at most."""
MOST_DECODED = 8
"""Times that what a manifest names is decoded at most. Once is enough, but what is not asked for soon is made again."""
TURN_SECONDS = 600.0
"""Each request of a storage has a limit of its own, and few are in front."""
FillBase = Callable[[str, int, Piece, memoryview], object]
"""`fill_base(entry, start, piece, out)` fills `out` with what a piece was encoded against."""
_Key = tuple[str | None, tuple[str, ...], int]
MAX_CHAIN = 64
"""Bases behind each other that a reader follows. A snapshot with a longer chain is damaged."""
_IN_PLACE = frozenset({"rows", "delta-byteplane-zstd"})
"""Codecs that decode over their base where it lies: of a chain nothing is copied but what changed."""
ReadInto = Callable[[str, int, memoryview], object]
"""As `Storage.get_into`."""
FetchPiece = Callable[[str, Piece, memoryview], object]
"""`fetch(entry, piece, out)` fills `out` with the stored bytes of a piece of the entry, verified."""
OpenStored = Callable[[str, Piece], AbstractContextManager[memoryview]]
"""`stored(entry, piece)`: the stored bytes of a piece of the entry, to be looked at meanwhile."""
KnownBytes = Mapping[str | None, memoryview]
"""Decoded bytes of pieces, by `Piece.content_digest`."""
_placement = attrgetter("piece.file", "piece.offset")


def members_of(manifest: Manifest, level: str | None, start: int, piece: Piece) -> Iterator[tuple[str, Piece]]:
    """The pieces that a piece was encoded together with, itself included, by entry; none if it was encoded alone.

    Args:
        level: the snapshot among the manifest's bases that it is of; None: it is one of an entry.
        start: the byte of its entry at which it begins, as do the others of theirs.

    Raises:
        CorruptError: the manifest does not have them; names the entry.
    """
    for name in piece.group:
        found = _at(manifest, level, name, start)
        alike = ("codec", "base", "raw_nbytes", "group")
        if found is None or any(getattr(found, what) != getattr(piece, what) for what in alike):
            raise CorruptError(f"{name!r}: a piece that is encoded together with others is missing among them")
        yield name, found


def _at(manifest: Manifest, level: str | None, name: str, start: int) -> Piece | None:
    if level is not None:
        return manifest.bases.get(level, {}).get(name, {}).get(start)
    return manifest.entries[name].piece_at.get(start) if name in manifest.entries else None


class ReadLimiter:
    """At most so many at once.

    Args:
        what: what they wait for, in words.
    """

    def __init__(self, most: int, what: str) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._what = what

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for a turn, and have it.

        Raises:
            StorageError: there was none for a long time.
        """
        if not self._free.acquire(timeout=TURN_SECONDS):
            raise StorageError(f"{self._what}: no thread has finished within {TURN_SECONDS:.0f} s")
        try:
            yield
        finally:
            self._free.release()


class BufferPool:
    """Memory that is used again: the first touch of new memory takes as long as decoding. Thread safe.

    `turns` are for what takes much of it: one more than there are cores, so that one can read.
    """

    def __init__(self) -> None:
        self.turns = ReadLimiter(len(os.sched_getaffinity(0)) + 1, "decoding")
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []

    def take(self, nbytes: int) -> memoryview:
        """So many bytes, of any content."""
        with self._lock:
            for number, spare in enumerate(self._spare):
                if len(spare) >= nbytes:
                    return memoryview(self._spare.pop(number))[:nbytes]
        room = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(room)[:nbytes]

    def give(self, *rooms: memoryview) -> None:
        """Those of them that were taken here are not used any more."""
        with self._lock:
            for room in rooms:
                if isinstance(room.obj, mmap.mmap):
                    self._spare.append(room.obj)
            self._spare.sort(key=len)
            while sum(map(len, self._spare)) > SPARE_BYTES:
                del self._spare[0]

    @contextmanager
    def lend(self, *sizes: int) -> Iterator[list[memoryview]]:
        """Memory of these sizes, of any content, inside the `with`."""
        rooms = list(map(self.take, sizes))
        try:
            yield rooms
        finally:
            self.give(*rooms)


@dataclass(eq=False)
class GroupDecoder:
    """Decodes the groups of one snapshot; what was not asked for yet is kept for a while. Thread safe.

    Args:
        stored: the stored bytes of a piece.
        fill_base: decodes what a piece was encoded against.
        rooms: for what is decoded on the way.
    """

    _manifest: Manifest
    _stored: OpenStored
    _fill_base: FillBase
    _rooms: BufferPool
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _busy: dict[_Key, threading.Lock] = field(default_factory=dict, init=False)
    _kept: OrderedDict[_Key, dict[str, memoryview]] = field(default_factory=OrderedDict, init=False)
    _left_bytes: int | None = field(default=None, init=False)

    def fill(self, level: str | None, start: int, piece: Piece, outs: Mapping[str, memoryview]) -> None:
        """Fill `outs`, by entry, with a piece that has a group, and others of it.

        Raises:
            CorruptError: it is damaged; names the entry.
            NewerFormatError: an encoding that this version does not know.
            CkptError: whatever reading raises.
        """
        key = (level, piece.group, start)
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:  # those who ask for the others wait: they will be there
            with self._lock:
                kept = self._kept.pop(key, {})
            if set(outs) <= set(kept):
                for name, out in outs.items():
                    out[:] = kept[name]
                    self._rooms.give(kept.pop(name))
            else:
                self._rooms.give(*kept.values())
                kept = {one: self._rooms.take(piece.raw_nbytes) for one in piece.group if one not in outs}
                self._decode(level, start, piece, {**kept, **outs})
            with self._lock:
                if kept:
                    self._kept[key] = kept
                while sum(one.nbytes for there in self._kept.values() for one in there.values()) > KEPT_BYTES:
                    self._kept.popitem(last=False)

    def _decode(self, level: str | None, start: int, piece: Piece, outs: dict[str, memoryview]) -> None:
        """What a group was encoded against is often one as well: the oldest comes first, and two rooms are enough."""
        if piece.base is None or set(outs) != set(piece.group):
            raise CorruptError(f"{piece.group[0]!r}: pieces encoded together with {piece.codec!r} do not fit together")
        chain = [(level, piece)]
        while (under := self._under(start, chain[-1][1])) is not None:
            chain.append((chain[-1][1].base, under))
            self._count(0 if len(chain) <= MAX_CHAIN else MOST_DECODED * under.raw_nbytes)
        with self._rooms.lend(*[piece.raw_nbytes] * len(piece.group)) as lent:
            rooms = (outs, dict(zip(piece.group, lent, strict=True)))
            for name, member in members_of(self._manifest, chain[-1][0], start, chain[-1][1]):
                self._fill_base(name, start, member, rooms[len(chain) % 2][name])
            for number, (its_level, one) in reversed(list(enumerate(chain))):
                self._apply(its_level, start, one, rooms[number % 2], rooms[(number + 1) % 2])

    def _under(self, start: int, piece: Piece) -> Piece | None:
        """The piece of the group that a group was encoded against; None if that was none, or another one."""
        under = _at(self._manifest, piece.base, piece.group[0], start)
        alike = under is not None and under.group == piece.group and under.raw_nbytes == piece.raw_nbytes
        return under if alike else None

    def _apply(
        self,
        level: str | None,
        start: int,
        piece: Piece,
        outs: Mapping[str, memoryview],
        bases: Mapping[str, memoryview],
    ) -> None:
        """Decode one group over what it was encoded against."""
        codec = get_group_codec(piece.codec)
        members = dict(members_of(self._manifest, level, start, piece))
        if len(members) != len(codec.roles) or piece.base is None:
            raise CorruptError(f"{piece.group[0]!r}: pieces encoded together with {piece.codec!r} do not fit together")
        self._count(sum(one.raw_nbytes for one in members.values()))
        with ExitStack() as stack:
            stored = {name: stack.enter_context(self._stored(name, one)) for name, one in members.items()}
            roles = dict(zip(piece.group, codec.roles, strict=True))
            try:
                codec.decode(*({roles[name]: data for name, data in one.items()} for one in (stored, outs, bases)))
            except CorruptError as err:
                raise CorruptError(f"{piece.group[0]!r}: {err.message}", hint=err.hint) from err

    def _count(self, nbytes: int) -> None:
        """Groups of other groups, and so on, could be arranged so that decoding them never ends."""
        with self._lock:
            if self._left_bytes is None:
                self._left_bytes = MOST_DECODED * sum(piece.raw_nbytes for _, piece in stored_pieces(self._manifest))
            self._left_bytes -= nbytes
            if self._left_bytes < 0:
                raise CorruptError(f"its groups take more than {MOST_DECODED} times as long to decode as they should")


def stored_pieces(manifest: Manifest) -> list[tuple[str, Piece]]:
    """Everything that must be stored for a snapshot: (entry, piece) of its entries, then of their bases."""
    found = [(name, piece) for name, entry in manifest.entries.items() for piece in entry.pieces]
    for entries in manifest.bases.values():
        found += [(name, piece) for name, pieces in entries.items() for piece in pieces.values()]
    return found


class HasPiece(Protocol):
    """Something that is to be read."""

    @property
    def piece(self) -> Piece:
        """Of a snapshot."""


_Piece = TypeVar("_Piece", bound=HasPiece)


def joined(
    wanted: Iterable[_Piece], most_bytes: int, most_raw_bytes: float = math.inf, gap_bytes: int = 0
) -> list[list[_Piece]]:
    """Neighbouring pieces, together as long as they have at most so many bytes, stored and decoded.

    Args:
        gap_bytes: at most so many may lie between neighbours.
    """
    spans: list[list[_Piece]] = []
    file, start, end, raw_nbytes = -1, 0, 0, 0
    for one in sorted(wanted, key=_placement):
        piece = one.piece
        raw_nbytes += piece.raw_nbytes
        fits = piece.offset + piece.nbytes - start <= most_bytes and raw_nbytes <= most_raw_bytes
        if fits and piece.file == file and 0 <= piece.offset - end <= gap_bytes:
            spans[-1].append(one)
        else:
            spans.append([one])
            file, start, raw_nbytes = piece.file, piece.offset, piece.raw_nbytes
        end = piece.offset + piece.nbytes
    return spans


def needed_for(manifest: Manifest, name: str, start: int, piece: Piece) -> dict[tuple[str | None, str], Piece]:
    """All that decoding a piece of an entry takes, itself included: by the snapshot whose it is (None: of an entry) and
    the entry.

    Raises:
        CorruptError: as `chain_of`.
    """
    found: dict[tuple[str | None, str], Piece] = {}
    open_ends: list[tuple[str | None, str, Piece]] = [(None, name, piece)]
    while open_ends:
        level, member, one = open_ends.pop()
        if (level, member) in found:
            continue
        found[level, member] = one
        open_ends += [(level, other, there) for other, there in members_of(manifest, level, start, one)]
        under = base_of(manifest, member, start, one)
        if under is not None:
            open_ends.append((one.base, member, under))
    return found


def require_decodable(manifest: Manifest) -> None:
    """Whether a manifest says of each of its pieces where everything is that decoding it takes, and by which codec.

    Raises:
        CorruptError: it does not; names the first entry. Reading the snapshot would fail there.
        NewerFormatError: there is no codec of that name.
    """
    for codec, is_group in {(piece.codec, bool(piece.group)) for _, piece in stored_pieces(manifest)}:
        if codec != RAW or is_group:
            (get_group_codec if is_group else get_codec)(codec)
    for name, entry in manifest.entries.items():
        for start, piece in entry.placed():
            if piece.base is not None or piece.group:
                chain_of(manifest, name, start, piece)
                needed_for(manifest, name, start, piece)


def base_of(manifest: Manifest, name: str, start: int, piece: Piece) -> Piece | None:
    """The piece that a piece of an entry, which begins at byte `start` of it, was encoded against.

    Raises:
        CorruptError: the manifest does not say where it is; names the entry.
    """
    if piece.base is None:
        return None
    found = manifest.bases.get(piece.base, {}).get(name, {}).get(start)
    if found is None or found.raw_nbytes != piece.raw_nbytes:
        raise CorruptError(f"{name!r}: the manifest does not say where its base in {piece.base} is")
    return found


def chain_of(manifest: Manifest, name: str, start: int, piece: Piece) -> list[Piece]:
    """A piece, its base, the base of that, and so on.

    Raises:
        CorruptError: as `base_of`; or it does not end.
    """
    found = [piece]
    while (under := base_of(manifest, name, start, found[-1])) is not None:
        if len(found) > MAX_CHAIN:
            raise CorruptError(f"{name!r}: its bases do not end: {' -> '.join(str(one.base) for one in found)}")
        found.append(under)
    return found


class Decoder:
    """Decodes pieces of one snapshot. Thread safe.

    Args:
        fetch: reads what has to be read on the way, verified; called in the thread that asks.
        glance: as `fetch`, but need not verify: what is made of it is compared with its own digest, and if that differs
            it is made again of what `fetch` reads. Digesting what is read besides costs as much as reading it.
        there: stored bytes that have been read already, unverified; beside `glance`.
        rooms: memory for what is made on the way, if other decoders use the same.
        known: decoded bytes by their digest, which are not read.
    """

    def __init__(
        self,
        manifest: Manifest,
        fetch: FetchPiece,
        glance: FetchPiece | None = None,
        there: Callable[[Piece], memoryview | None] = lambda _: None,
        rooms: BufferPool | None = None,
        known: KnownBytes = MappingProxyType({}),
    ) -> None:
        self._manifest = manifest
        self._rooms = rooms or BufferPool()
        self._quick: Decoder | None = None
        self._fetch = fetch
        self._there = there
        self._known = known
        if glance is not None:
            self._quick = Decoder(manifest, glance, None, there, self._rooms, known)
            self._there = lambda _: None
        self._groups = GroupDecoder(manifest, self._stored, self._fill_base, self._rooms)

    def read(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece of an entry, which begins at byte `start` of it.

        Raises:
            CorruptError: the snapshot is damaged; names the entry.
            NewerFormatError: an encoding that this version does not know.
            CkptError: whatever `fetch` raises.
        """
        self.read_together(start, {name: (piece, out)})

    def read_together(self, start: int, wanted: Mapping[str, tuple[Piece, memoryview]]) -> None:
        """As `read`, of several pieces of one group, by entry, which then need no memory but where they belong."""
        if self._quick is not None:
            with suppress(FormatError):
                self._quick._fill_together(start, wanted)
                if all(digest(out) == piece.content_digest for piece, out in wanted.values()):
                    return
        self._fill_together(start, wanted)
        for name, (piece, out) in wanted.items():
            _require(name, start, piece, out)

    def _fill_together(self, start: int, wanted: Mapping[str, tuple[Piece, memoryview]]) -> None:
        name, (piece, out) = next(iter(wanted.items()))
        chain = chain_of(self._manifest, name, start, piece)
        if piece.group:
            with self._rooms.turns.one():  # once, however many groups this one is made of
                self._groups.fill(None, start, piece, {one: place for one, (_, place) in wanted.items()})
        else:
            self._fill(name, start, chain, None, out)

    def decode(self, name: str, start: int, piece: Piece, stored: memoryview, out: memoryview) -> None:
        """As `read`, where the stored bytes of the piece are there, verified."""
        self._fill(name, start, chain_of(self._manifest, name, start, piece), stored, out)
        _require(name, start, piece, out)

    def _fill(
        self,
        name: str,
        start: int,
        chain: list[Piece],
        stored: memoryview | None,
        out: memoryview,
        level: str | None = None,
    ) -> None:
        """Fill `out` with the first piece of a chain.

        Args:
            stored: its stored bytes; None: they have to be read.
            level: the snapshot among the bases that the first of the chain is of; None: it is one of an entry.
        """
        piece = chain[0]
        known = self._known.get(piece.content_digest)
        if known is not None and known.nbytes == out.nbytes:
            out[:] = known
            return
        if piece.codec == RAW and stored is None:
            self._fetch(name, piece, out)
            return
        if piece.group:  # others of the group need what is stored, too: it is read again
            self._groups.fill(level, start, piece, {name: out})
            return
        codec = get_codec(piece.codec)
        if len(chain) == 1 and codec.needs_base:
            raise CorruptError(f"{name!r}: a piece encoded with {piece.codec!r} names no base")
        with ExitStack() as stack:
            base: memoryview | None = None
            if len(chain) > 1:
                # Decoded over its base nothing but the piece's own digest tells that it was the right one.
                over = piece.codec in _IN_PLACE and piece.raw_digest is not None
                base = out if over else stack.enter_context(self._rooms.lend(piece.raw_nbytes))[0]
                self._fill(name, start, chain[1:], None, base, piece.base)
            data = stack.enter_context(self._stored(name, piece)) if stored is None else stored
            try:
                codec.decode(data, out, base)
            except (NewerFormatError, MemoryError):
                raise
            except Exception as err:  # a package's codec raises its own
                raise CorruptError(f"{name!r}: {getattr(err, 'message', repr(err))}") from err

    @contextmanager
    def _stored(self, name: str, piece: Piece) -> Iterator[memoryview]:
        found = self._there(piece)
        if found is not None:
            yield found
            return
        with self._rooms.lend(piece.nbytes) as (room,):
            self._fetch(name, piece, room)
            yield room

    def _fill_base(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        under = chain_of(self._manifest, name, start, piece)[1:]
        self._fill(name, start, under, None, out, piece.base)


def _require(name: str, start: int, piece: Piece, out: memoryview) -> None:
    """Once per chain: what is under it was verified as it was stored."""
    if piece.raw_digest is not None and digest(out) != piece.raw_digest:
        raise CorruptError(f"{name!r}: bytes {start} to {start + out.nbytes} are not what was encoded")


def decoder_of(read: ReadInto, manifest: Manifest, glance: FetchPiece | None = None) -> Decoder:
    """Decodes pieces of a snapshot, of which `read` reads the data files; what is read is verified.

    Args:
        read: as `Storage.get_into`.
        glance: see `Decoder`.
    """

    def fetch(entry: str, piece: Piece, out: memoryview) -> None:
        name = manifest.files[piece.file].name
        read(name, piece.offset, out)
        if digest(out) != piece.digest:
            raise CorruptError(f"{entry!r}: bytes of {name} do not match their digest")

    return Decoder(manifest, fetch, glance)
