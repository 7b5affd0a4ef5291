"""From stored pieces to the bytes of entries: decodes them, and finds the bases of those that need one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ckpt_engine.errors import CorruptError
from ckpt_engine.store.codecs.base import get_codec
from ckpt_engine.store.decode_groups import Groups, members_of
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.storage.base import Storage

MAX_CHAIN = 64
"""Bases behind each other that a reader follows. A snapshot with a longer chain is damaged."""
_IN_PLACE = frozenset({"rows", "delta-byteplane-zstd"})
"""Codecs that decode over their base where it lies: of a chain nothing is copied but what changed."""

Fetch = Callable[[str, Piece, memoryview], object]
"""`fetch(entry, piece, out)` fills `out` with the stored bytes of a piece of the entry, verified."""


def is_plain(entry: Entry) -> bool:
    """Whether the bytes of an entry lie in one file as they are, back to back."""
    end: int | None = None
    for piece in entry.pieces:
        if piece.codec != RAW or piece.file != entry.pieces[0].file or end not in (None, piece.offset):
            return False
        end = piece.offset + piece.nbytes
    return True


def stored_pieces(manifest: Manifest) -> Iterator[tuple[str, Piece]]:
    """Everything that must be stored for a snapshot: (entry, piece) of its entries, then of their bases."""
    for name, entry in manifest.entries.items():
        for piece in entry.pieces:
            yield name, piece
    for entries in manifest.bases.values():
        for name, pieces in entries.items():
            for piece in pieces.values():
                yield name, piece


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
    """Whether a manifest says of each of its pieces where everything is that decoding it takes.

    Raises:
        CorruptError: it does not; names the first entry. Reading the snapshot would fail there.
    """
    for name, entry in manifest.entries.items():
        start = 0
        for piece in entry.pieces:
            if piece.base is not None or piece.group:
                chain_of(manifest, name, start, piece)
                needed_for(manifest, name, start, piece)
            start += piece.raw_nbytes


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
        glance: as `fetch`, but need not verify: what is made of it is held against its own digest, and if that differs
            it is made again of what `fetch` reads. Digesting a base besides costs as much as reading it.
    """

    def __init__(self, manifest: Manifest, fetch: Fetch, glance: Fetch | None = None) -> None:
        self._manifest = manifest
        self._fetch = fetch
        self._glance = glance or fetch
        self._buffers = threading.local()
        self._groups = Groups(manifest, fetch, self._fill_base)

    def read(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece of an entry, which begins at byte `start` of it.

        Raises:
            CorruptError: the snapshot is damaged; names the entry.
            NewerFormatError: an encoding that this version does not know.
            CkptError: whatever `fetch` raises.
        """
        self._make(name, start, chain_of(self._manifest, name, start, piece), None, out)

    def decode(self, name: str, start: int, piece: Piece, stored: memoryview, out: memoryview) -> None:
        """As `read`, where the stored bytes of the piece are there, verified."""
        self._make(name, start, chain_of(self._manifest, name, start, piece), stored, out)

    def _make(self, name: str, start: int, chain: list[Piece], stored: memoryview | None, out: memoryview) -> None:
        wanted = chain[0].raw_digest
        if _is_in_place(chain) and self._glance is not self._fetch:
            with suppress(CorruptError):
                self._fill(name, start, chain, stored, out, self._glance)
                if digest(out) == wanted:
                    return
        self._fill(name, start, chain, stored, out, self._fetch)
        # Once per chain: what is under it was verified as it was stored.
        if wanted is not None and digest(out) != wanted:
            raise CorruptError(f"{name!r}: bytes {start} to {start + out.nbytes} are not what was encoded")

    def _fill(
        self,
        name: str,
        start: int,
        chain: list[Piece],
        stored: memoryview | None,
        out: memoryview,
        end: Fetch,
        level: str | None = None,
    ) -> None:
        """Fill `out` with the first piece of a chain.

        Args:
            stored: its stored bytes; None: they have to be read.
            end: reads the last piece of the chain.
            level: the snapshot among the bases that the first of the chain is of; None: it is one of an entry.
        """
        piece = chain[0]
        if piece.codec == RAW and stored is None:
            (end if len(chain) == 1 else self._fetch)(name, piece, out)
            return
        if piece.group:  # others of the group need what is stored, too: it is read again
            self._groups.fill(level, name, start, piece, out)
            return
        codec = get_codec(piece.codec)
        base: memoryview | None = None
        if len(chain) > 1:
            base = out if _is_in_place(chain) else self._buffer(len(chain), piece.raw_nbytes)
            self._fill(name, start, chain[1:], None, base, end, piece.base)
        elif codec.needs_base:
            raise CorruptError(f"{name!r}: a piece encoded with {piece.codec!r} names no base")
        if stored is None:
            stored = self._buffer(0, piece.nbytes)
            self._fetch(name, piece, stored)
        try:
            codec.decode(stored, out, base)
        except CorruptError as err:
            raise CorruptError(f"{name!r}: {err.message}") from err

    def _fill_base(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        under = chain_of(self._manifest, name, start, piece)[1:]
        self._fill(name, start, under, None, out, self._fetch, piece.base)

    def _buffer(self, number: int, nbytes: int) -> memoryview:
        """Memory that this thread reuses: one buffer for stored bytes, and one for each base that needs one."""
        kept: dict[int, bytearray] = self._buffers.__dict__.setdefault("kept", {})
        if len(kept.get(number, b"")) < nbytes:
            kept[number] = bytearray(nbytes)
        return memoryview(kept[number])[:nbytes]


def _is_in_place(chain: Sequence[Piece]) -> bool:
    """Whether a piece is decoded over its base. Then nothing but its own digest tells that it was the right one."""
    return len(chain) > 1 and chain[0].codec in _IN_PLACE and chain[0].raw_digest is not None


def decoder_of(storage: Storage, manifest: Manifest) -> Decoder:
    """Decodes pieces of a snapshot in `storage`; what is read is verified."""

    def fetch(entry: str, piece: Piece, out: memoryview) -> None:
        name = manifest.files[piece.file].name
        storage.get_into(name, piece.offset, out)
        if digest(out) != piece.digest:
            raise CorruptError(f"{entry!r}: bytes of {name} do not match their digest")

    return Decoder(manifest, fetch)
