"""Decodes pieces that were encoded together: one of them needs the others, so all come out at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ckpt_engine.errors import CorruptError
from ckpt_engine.store.codecs.base import get_group_codec
from ckpt_engine.store.manifest import Manifest, Piece

KEPT_BYTES = 192 << 20
"""Decoded pieces that wait for somebody to ask for them, at most."""
_SPARE = 12
MOST_DECODED = 8
"""Times that what a manifest names is decoded at most. Once is enough, but what nobody asked for soon is made again."""

Fetch = Callable[[str, Piece, memoryview], object]
FillBase = Callable[[str, int, Piece, memoryview], object]
"""`fill_base(entry, start, piece, out)` fills `out` with what a piece was encoded against."""
_Key = tuple[str | None, tuple[str, ...], int]


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
    at = 0
    for piece in manifest.entries[name].pieces if name in manifest.entries else ():
        if at == start:
            return piece
        at += piece.raw_nbytes
    return None


class Groups:
    """Decodes the groups of one snapshot; what was not asked for yet is kept for a while. Thread safe.

    Args:
        fetch: reads stored bytes, verified.
        fill_base: decodes what a piece was encoded against.
    """

    def __init__(self, manifest: Manifest, fetch: Fetch, fill_base: FillBase) -> None:
        self._manifest = manifest
        self._fetch = fetch
        self._fill_base = fill_base
        self._lock = threading.Lock()
        self._busy: dict[_Key, threading.Lock] = {}
        self._kept: OrderedDict[_Key, dict[str, memoryview]] = OrderedDict()
        self._spare: list[bytearray] = []
        self._left_bytes: int | None = None

    def fill(self, level: str | None, name: str, start: int, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece that has a group.

        Raises:
            CorruptError: it is damaged; names the entry.
            NewerFormatError: an encoding that this version does not know.
            CkptError: whatever reading raises.
        """
        key = (level, piece.group, start)
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:  # those who ask for the others wait: they will be there
            kept = self._take(key)
            if name in kept:
                out[:] = kept[name]
                self._give(kept.pop(name))
            else:
                self._give(*kept.values())
                kept = {one: self._room(out.nbytes) for one in piece.group if one != name}
                self._decode(level, start, piece, {**kept, name: out})
            self._keep(key, kept)

    def _decode(self, level: str | None, start: int, piece: Piece, outs: dict[str, memoryview]) -> None:
        codec = get_group_codec(piece.codec)
        members = dict(members_of(self._manifest, level, start, piece))
        if len(members) != len(codec.roles) or piece.base is None or set(outs) != set(members):
            raise CorruptError(f"{piece.group[0]!r}: pieces encoded together with {piece.codec!r} do not fit together")
        self._count(sum(one.raw_nbytes for one in members.values()))
        bases = {name: self._room(piece.raw_nbytes) for name in piece.group}
        stored = {name: self._room(one.nbytes) for name, one in members.items()}
        try:
            self._bases(level, start, piece, bases)
            for name, one in members.items():
                self._fetch(name, one, stored[name])
            try:
                roles = dict(zip(piece.group, codec.roles, strict=True))
                codec.decode(*({roles[name]: data for name, data in one.items()} for one in (stored, outs, bases)))
            except CorruptError as err:
                raise CorruptError(f"{piece.group[0]!r}: {err.message}", hint=err.hint) from err
        finally:
            self._give(*bases.values(), *stored.values())

    def _count(self, nbytes: int) -> None:
        """Groups of other groups, and so on, could be arranged so that decoding them never ends."""
        with self._lock:
            if self._left_bytes is None:
                named = [piece for entry in self._manifest.entries.values() for piece in entry.pieces]
                named += [
                    one for level in self._manifest.bases.values() for kept in level.values() for one in kept.values()
                ]
                self._left_bytes = MOST_DECODED * sum(piece.raw_nbytes for piece in named)
            self._left_bytes -= nbytes
            if self._left_bytes < 0:
                raise CorruptError(f"its groups take more than {MOST_DECODED} times as long to decode as they should")

    def _bases(self, level: str | None, start: int, piece: Piece, bases: dict[str, memoryview]) -> None:
        """What a group was encoded against: often a group as well."""
        under = _at(self._manifest, piece.base, piece.group[0], start)
        if under is not None and under.group == piece.group and under.raw_nbytes == piece.raw_nbytes:
            self._decode(piece.base, start, under, bases)  # ends: the chain of the piece that was asked for does
            return
        for name, member in members_of(self._manifest, level, start, piece):
            self._fill_base(name, start, member, bases[name])

    def _take(self, key: _Key) -> dict[str, memoryview]:
        with self._lock:
            return self._kept.pop(key, {})

    def _keep(self, key: _Key, left: dict[str, memoryview]) -> None:
        if not left:
            return
        with self._lock:
            self._kept[key] = left
            while sum(one.nbytes for kept in self._kept.values() for one in kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

    def _room(self, nbytes: int) -> memoryview:
        """Memory that was used before, where there is some: the first touch of new memory takes as long as decoding."""
        with self._lock:
            for number, spare in enumerate(self._spare):
                if len(spare) >= nbytes:
                    return memoryview(self._spare.pop(number))[:nbytes]
        return memoryview(bytearray(nbytes))

    def _give(self, *rooms: memoryview) -> None:
        with self._lock:
            for room in rooms:
                if isinstance(room.obj, bytearray):
                    self._spare.append(room.obj)
            self._spare.sort(key=len)
            del self._spare[:-_SPARE]
