"""Pins: objects `pins/<id>.json` that keep a snapshot whatever retention says.

```
{"note": <text>, "created": <seconds>, "digest": <of what is before it>}\n
<the snapshot's manifest>
```
No lease is needed, because a run that is being written can be pinned too. Once `pin` has returned, the snapshot stays,
whatever retention does at the same time and wherever it is killed: a pin is written before its snapshot is looked for
once more, and retention looks for pins after manifests are removed and before data is. It spares what a pin needs, and
puts its manifest back from the pin (`orphans`, `put_back`), also after a process that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ckpt_engine.errors import ConfigError, CorruptError, FormatError, StorageExistsError, StorageMissingError
from ckpt_engine.observe.number_types import Seconds
from ckpt_engine.store import json_checks, manifest_codec, names
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.sealed_json import seal, unseal
from ckpt_engine.store.storage.base import Storage

_NOTE_CHARACTERS = 100_000
_HEAD_BYTES = 4096
"""Enough of a pin for its note, unless that is very long."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned snapshot.

    Args:
        id: of the snapshot.
        note: for people; may be empty.
        created: wall-clock seconds since 1970; 0 where the pin's text is damaged.
    """

    id: str
    note: str
    created: Seconds

    def __str__(self) -> str:
        return f"pinned: {self.note}" if self.note else "pinned"


def pin(repository: Repository, snapshot: str, note: str = "", *, created: float | None = None) -> Pin:
    """Keep `snapshot` until it is unpinned. Pinning it again replaces the note.

    Args:
        created: wall-clock seconds, instead of now.

    Raises:
        StorageMissingError: there is no such snapshot, or retention removed it at this moment.
        StorageError: it is not pinned, as before.
        ConfigError: the note is too long.
    """
    storage, name = repository.storage, names.pin_name(snapshot)
    try:
        manifest = storage.get(names.manifest_name(snapshot))
    except StorageMissingError as err:
        raise _missing(repository, snapshot) from err
    made = Pin(snapshot, note, time.time() if created is None else created)
    head = seal({"note": made.note, "created": made.created})
    if len(head) > _NOTE_CHARACTERS:
        raise ConfigError(f"the note has {len(note):,} characters", hint="give a shorter one")
    blocks = [memoryview(head + b"\n"), memoryview(manifest)]
    try:
        storage.put(name, blocks)
        is_new = True
    except StorageExistsError:
        storage.put(name, blocks, exclusive=False)
        is_new = False
    if all(parsed.id != snapshot for parsed in repository.ids()):
        if is_new:
            storage.delete(name)
        raise _missing(repository, snapshot)
    return made


def unpin(repository: Repository, snapshot: str) -> bool:
    """Leave `snapshot` to retention again; whether it was pinned."""
    was_pinned = snapshot in pinned_ids(repository.storage)
    repository.storage.delete(names.pin_name(snapshot))
    return was_pinned


def pinned_ids(storage: Storage) -> frozenset[str]:
    """The snapshots that have a pin: one listing, no reads."""
    return frozenset([parsed.id for item in storage.list(names.PINS) if (parsed := names.pin_id(item.name))])


def pins(storage: Storage) -> list[Pin]:
    """All pins, by the age of their snapshots. A damaged pin still pins."""
    return [pin for one in sorted(pinned_ids(storage)) if (pin := _read(storage, one))]


def protection(storage: Storage) -> dict[str, str]:
    """Id → reason of every pinned snapshot, for `plan`."""
    return {pin.id: str(pin) for pin in pins(storage)}


@dataclass(frozen=True, slots=True)
class Orphan:
    """A pinned snapshot whose manifest was removed and whose data is all there."""

    manifest: Manifest
    text: bytes


def orphans(repository: Repository) -> list[Orphan]:
    """Those there are now: one listing where nothing is pinned."""
    storage = repository.storage
    pinned = pinned_ids(storage)
    missing = sorted(pinned - {parsed.id for parsed in repository.ids()}) if pinned else []
    found = [orphan for snapshot in missing if (orphan := _orphan(storage, snapshot))]
    return [one for one in found if not lacking(storage, one.manifest.files)]


def put_back(repository: Repository, found: Sequence[Orphan]) -> frozenset[str]:
    """Make them snapshots again; returns their ids. Needs the lease."""
    for orphan in found:
        with suppress(StorageExistsError):
            repository.storage.put(names.manifest_name(orphan.manifest.info.id), [memoryview(orphan.text)])
        repository.remember(orphan.manifest)
    return frozenset(orphan.manifest.info.id for orphan in found)


def _orphan(storage: Storage, snapshot: str) -> Orphan | None:
    """What the pin says of its snapshot; None if that is damaged or the pin is gone."""
    try:
        text = storage.get(names.pin_name(snapshot)).partition(b"\n")[2]
        manifest = manifest_codec.decode(text)
    except (StorageMissingError, FormatError):
        return None
    return Orphan(manifest, text) if manifest.info.id == snapshot else None


def _read(storage: Storage, snapshot: str) -> Pin | None:
    name = names.pin_name(snapshot)
    try:
        head, newline, _ = storage.get(name, 0, _HEAD_BYTES).partition(b"\n")
        if not newline:
            head = storage.get(name).partition(b"\n")[0]
        return _pin(head, snapshot, name)
    except StorageMissingError:
        return None  # unpinned meanwhile
    except FormatError:
        return Pin(snapshot, "", 0.0)


def check(text: bytes, snapshot: str, where: str) -> None:
    """Read all that the pin of a snapshot says.

    Raises:
        FormatError: it is damaged, or of another snapshot.
    """
    head, _, manifest = text.partition(b"\n")
    _pin(head, snapshot, where)
    pinned = manifest_codec.decode(manifest).info.id
    if pinned != snapshot:
        raise CorruptError(f"{where} has the manifest of {pinned}")


def _pin(head: bytes, snapshot: str, where: str) -> Pin:
    row = unseal(head, where)
    with json_checks.reading(f"{where} is damaged"):
        return msgspec.convert({**row, "id": snapshot}, Pin)


def _missing(repository: Repository, snapshot: str) -> StorageMissingError:
    where = repository.storage.url
    return StorageMissingError(f"no snapshot {snapshot} at {where}", hint=f"`ckpt ls {where}` lists them")
