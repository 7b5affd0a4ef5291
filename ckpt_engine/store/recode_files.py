"""Puts together the data files and the manifest of an encoded copy from its encoded pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ckpt_engine.store import container, layout
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, DataFile, Manifest, Piece
from ckpt_engine.store.recode_plan import Key, Needed, Plan, Work, placed

_PART_NUMBERS = 10**12
"""Parts that are named by what they hold have numbers from here on: no others do."""


@dataclass(frozen=True, slots=True)
class Done:
    """A piece as it will be stored.

    Args:
        tried: the codec that it was given to, whether it paid or not.
        kind: its class of tensors.
        digest, raw_digest: of the stored and of the decoded bytes.
        seconds: processor time of encoding.
        is_over: whether it is a difference to what `work.over` tells.
        group: as `Piece.group`.
    """

    work: Work
    stored: bytes | memoryview
    codec: str
    tried: str
    kind: str
    digest: str
    raw_digest: str
    seconds: float
    is_over: bool = False
    group: tuple[str, ...] = ()

    def piece_at(self, file: int, offset: int) -> Piece:
        """As the manifest names it."""
        nbytes = len(self.stored)
        if self.codec == RAW:
            return Piece(file, offset, nbytes, self.digest, nbytes)
        base = self.work.over.base if self.is_over and self.work.over is not None else None
        raw_nbytes = self.work.piece.raw_nbytes
        return Piece(file, offset, nbytes, self.digest, raw_nbytes, self.codec, base, self.raw_digest, self.group)


class Files:
    """The files and the manifest of a copy, as they grow.

    Args:
        manifest: that of the source.
        planned: how the copy is stored.
    """

    def __init__(self, manifest: Manifest, planned: Plan) -> None:
        self._source = manifest
        self._plan = planned
        self._new: list[DataFile] = []
        self._pieces: dict[Key, Piece] = {}
        self._needed: dict[tuple[str, str, int], Piece] = {}
        """Pieces of the older snapshot that are bases, by whose they are, entry and place."""
        for (name, start), needed in planned.old.items():
            self._keep(start, {key: piece for key, piece in needed.items() if key[0] is not None})
            self._pieces[name, start] = needed[None, name]

    def add(self, part: Sequence[Done]) -> tuple[DataFile, bytes]:
        """The next data file: its header, after which the pieces follow."""
        entries = self._source.entries
        runs = ((name, list(run)) for name, run in groupby(part, lambda one: one.work.name))
        whole = {
            name for name, run in runs if len(run) == len(entries[name].pieces) and all(one.codec == RAW for one in run)
        }
        rows: list[tuple[str, str, Sequence[int], int]] = []
        for one in part:
            name, start, nbytes = one.work.name, one.work.start, one.work.piece.raw_nbytes
            if name not in whole:
                codec = "" if one.codec == RAW else f"~{one.codec}"
                rows.append((f"{name}~[{start}:{start + nbytes}]{codec}", "U8", (len(one.stored),), len(one.stored)))
            elif start == 0:
                size = sum(piece.raw_nbytes for piece in entries[name].pieces)
                rows.append((name, *container.container_form(entries[name].dtype, entries[name].shape, size), size))
        if not self._new:
            rows += [
                (name, *container.container_form(entry.dtype, entry.shape, 0), 0)
                for name, entry in entries.items()
                if not entry.pieces
            ]
        header = container.data_header(rows)
        text = b"".join([header, *(one.digest.encode() for one in part)])
        number = _PART_NUMBERS + int(digest(text).partition(":")[2], 16) % _PART_NUMBERS
        nbytes = len(header) + sum(len(one.stored) for one in part)
        file = DataFile(layout.data_name(self._source.info.id, part=number), nbytes)
        offset = len(header)
        for one in part:
            self._pieces[one.work.key] = one.piece_at(len(self._new), offset)
            if one.is_over and one.work.over is not None:
                self._keep(one.work.start, one.work.over.needed)
            offset += len(one.stored)
        self._new.append(file)
        return file, header

    def _keep(self, start: int, needed: Needed) -> None:
        assert self._plan.before is not None
        for (level, name), piece in needed.items():
            self._needed[level or self._plan.before.info.id, name, start] = piece

    def old_files(self) -> tuple[DataFile, ...]:
        """The files of older snapshots that are needed, the oldest first."""
        before = self._plan.before
        if before is None:
            return ()
        used = {self._pieces[key].file for key in self._plan.old} | {piece.file for piece in self._needed.values()}
        return tuple(sorted((before.files[index] for index in used), key=lambda file: file.name))

    def manifest(self) -> Manifest:
        """Of all that was added."""
        old = self.old_files()
        files = (*old, *self._new)
        number = {file.name: index for index, file in enumerate(files)}
        before = self._plan.before

        def older(piece: Piece) -> Piece:
            assert before is not None
            return replace(piece, file=number[before.files[piece.file].name])

        def placed_at(key: Key) -> Piece:
            piece = self._pieces[key]
            return older(piece) if key in self._plan.old else replace(piece, file=len(old) + piece.file)

        entries = {
            name: replace(entry, pieces=tuple(placed_at((name, start)) for start, _ in placed(entry.pieces)))
            for name, entry in self._source.entries.items()
        }
        bases: dict[str, dict[str, dict[int, Piece]]] = {}
        for (snapshot, name, start), piece in self._needed.items():
            bases.setdefault(snapshot, {}).setdefault(name, {})[start] = older(piece)
        return replace(self._source, files=files, entries=entries, bases=bases)
