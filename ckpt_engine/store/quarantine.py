"""Notes durably which snapshots of a place are damaged so that nothing mends them.

The note is an object beside the manifest, which a listing of manifests shows. The data stays where it is. Retention
does not see such a snapshot, no plan refers to its damaged files, and a resume tries it last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from ckpt_engine.errors import CkptError, CorruptError
from ckpt_engine.observe import units
from ckpt_engine.store import names
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What is known of a snapshot.

    Args:
        files: the data files of which it needs damaged bytes, as far as that is known.
    """

    files: tuple[str, ...] = ()

    @property
    def error(self) -> CorruptError:
        """It as an error."""
        what = units.first(self.files, 1) or "something of it"
        return CorruptError(f"{what} was found damaged, and nothing mends it", hint="`ckpt repair` with another copy")


def parse_quarantine(text: bytes, where: str) -> Quarantine:
    """What a note says. Raises CorruptError if it says nothing."""
    return parsed(text, where, Quarantine, "remove it: the next scrub writes it again")


class KnownDamage:
    """The damage that is known at one place.

    Attributes:
        found: data files that were read, and do not have the bytes that were written.
        snapshots: those that are noted, by id.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.found: set[str] = set()
        self.snapshots: dict[str, Quarantine] = {}

    @property
    def files(self) -> set[str]:
        """All data files to which no plan refers."""
        return self.found.union(*(one.files for one in self.snapshots.values()))

    def look(self, noted: Iterable[ParsedId]) -> None:
        """Read the notes that a listing shows; each is read once."""
        self.snapshots = {one.id: self.snapshots.get(one.id) or self._read(one.id) for one in noted}

    def _read(self, snapshot: str) -> Quarantine:
        """What is noted; a note that cannot be read counts by its name."""
        with suppress(CkptError):
            return stored(self._storage, names.quarantine_name(snapshot), parse_quarantine) or Quarantine()
        return Quarantine()

    def note(self, snapshot: str, files: Collection[str]) -> None:
        """Note durably that a snapshot needs damaged bytes of these data files, and that nothing mends them; none: that
        it is whole. Needs no lease: no plan refers to them from here on, also of a process that writes the run now.

        Raises:
            StorageError: it is not noted.
        """
        name, known = names.quarantine_name(snapshot), self.snapshots.pop(snapshot, None)
        if files:
            self.snapshots[snapshot] = found = Quarantine(tuple(sorted(files)))
            if found != known:
                self._storage.put(name, [memoryview(seal(asdict(found)) + b"\n")], exclusive=False)
        elif known is not None:
            self._storage.delete(name)

    def mended(self, file: str) -> None:
        """Note durably that a data file has its bytes again. Raises as `note`."""
        for snapshot, known in list(self.snapshots.items()):
            self.note(snapshot, set(known.files) - {file})
