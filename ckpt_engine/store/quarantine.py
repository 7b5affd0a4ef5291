"""What is known of a snapshot that is damaged at a place, and that nothing mends.

It is an object beside the manifest, which a listing of manifests shows. The data stays where it is. Retention does not
see such a snapshot, no plan refers to its damaged files, and a resume tries it last.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass

from ckpt_engine.errors import CkptError, CorruptError
from ckpt_engine.observe import units
from ckpt_engine.store import names
from ckpt_engine.store.sealed_json import parsed, seal, stored
from ckpt_engine.store.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What is known.

    Args:
        files: the data files of which the snapshot needs damaged bytes, as far as that is known.
    """

    files: tuple[str, ...] = ()

    @property
    def error(self) -> CorruptError:
        """It as an error."""
        what = units.first(self.files, 1) or "something of it"
        return CorruptError(f"{what} was found damaged, and nothing mends it", hint="`ckpt repair` with another copy")


def put_quarantine(storage: Storage, snapshot: str, known: Quarantine) -> None:
    """Write what is known of a snapshot. Needs no lease. Raises StorageError."""
    text = seal(asdict(known)) + b"\n"
    storage.put(names.quarantine_name(snapshot), [memoryview(text)], exclusive=False)


def read_quarantine(storage: Storage, snapshot: str) -> Quarantine:
    """What is known of a snapshot whose object is there. One that cannot be read counts by its name."""
    with suppress(CkptError):
        return stored(storage, names.quarantine_name(snapshot), parse_quarantine) or Quarantine()
    return Quarantine()


def parse_quarantine(text: bytes, where: str) -> Quarantine:
    """What the object says. Raises CorruptError if it says nothing."""
    return parsed(text, where, Quarantine, "remove it: the next scrub writes it again")
