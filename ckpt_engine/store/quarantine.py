"""Notes durably which snapshots of a place are damaged so that nothing mends them.

The note is an object beside the manifest, which a listing of manifests shows. The data stays where it is. Retention
does not see such a snapshot, no plan refers to its damaged files, and a resume tries it last.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from ckpt_engine.errors import CkptError, CorruptError, FormatError
from ckpt_engine.observe import units
from ckpt_engine.store import names
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import ObjectInfo, Storage


@dataclass(frozen=True, slots=True)
class Damaged:
    """A snapshot that is listed as damaged, and why: its manifest cannot be used, or nothing mends its data.

    Args:
        files: the data files of which it needs damaged bytes, as far as that is known.
    """

    id: str
    seq: int
    error: FormatError
    files: tuple[str, ...] = ()

    @classmethod
    def noted(cls, snapshot: str, files: Collection[str]) -> Self:
        """One that is noted, with its files."""
        what = units.first(sorted(files), 1) or "something of it"
        error = CorruptError(f"{what} was found damaged, and nothing mends it", hint="`ckpt repair` with another copy")
        return cls(snapshot, names.seq_of(snapshot), error, tuple(sorted(files)))


@dataclass(frozen=True, slots=True)
class _Note:
    """What a note says."""

    files: tuple[str, ...]


def encode_quarantine(files: Collection[str]) -> bytes:
    """The note that names these damaged data files."""
    return seal({"files": sorted(files)}) + b"\n"


def parse_quarantine(text: bytes, where: str) -> tuple[str, ...]:
    """The damaged data files that a note names. Raises CorruptError if it names none."""
    return parsed(text, where, _Note, "remove it: the next scrub writes it again").files


@dataclass(eq=False)
class KnownDamage:
    """The damage that is known at one place.

    Attributes:
        found: data files that a load has found damaged.
        files: these and all others that are known to be: no plan refers to them.
        snapshots: those that are noted, by id.
    """

    _storage: Storage
    found: set[str] = field(default_factory=set, init=False)
    files: set[str] = field(default_factory=set, init=False)
    snapshots: dict[str, Damaged] = field(default_factory=dict, init=False)

    def look(self, listed: Iterable[ObjectInfo], manifests: Container[ParsedId]) -> None:
        """Read the notes that a listing shows beside these manifests; each is read once."""
        noted = (names.quarantine_id(item.name) for item in listed)
        there = (one.id for one in noted if one is not None and one in manifests)
        self.snapshots = {one: self.snapshots.get(one) or self._read(one) for one in there}
        self.files.update(*(one.files for one in self.snapshots.values()))

    def _read(self, snapshot: str) -> Damaged:
        """What is noted; a note that cannot be read counts by its name."""
        files: tuple[str, ...] | None = None
        with suppress(CkptError):
            files = stored(self._storage, names.quarantine_name(snapshot), parse_quarantine)
        return Damaged.noted(snapshot, files or ())

    def note(self, snapshot: str, files: Collection[str]) -> None:
        """Note durably that a snapshot needs damaged bytes of these data files, and that nothing mends them; none: that
        it is whole. Needs no lease: no plan refers to them from here on, also of a process that writes the run now.

        Raises:
            StorageError: it is not noted.
        """
        name, known = names.quarantine_name(snapshot), self.snapshots.pop(snapshot, None)
        if files:
            self.files.update(files)
            self.snapshots[snapshot] = found = Damaged.noted(snapshot, files)
            if known is None or found.files != known.files:
                self._storage.put(name, [memoryview(encode_quarantine(files))], exclusive=False)
        elif known is not None:
            self._storage.delete(name)

    def mended(self, file: str) -> None:
        """Note durably that a data file has its bytes again. Raises as `note`."""
        for snapshot, known in list(self.snapshots.items()):
            self.note(snapshot, set(known.files) - {file})
