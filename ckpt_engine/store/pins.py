"""Pins: objects `pins/<id>.json` that keep a snapshot whatever retention says.

No lease is needed, because a run that is being written can be pinned too. That is safe against retention running at
the same time: a pin is written before its snapshot is looked for once more, and retention looks for pins once more
after it has removed manifests and before it removes data (`collect.prune`).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from ckpt_engine.errors import StorageExistsError, StorageMissingError
from ckpt_engine.store import layout
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage


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
    created: float

    def __str__(self) -> str:
        return f"pinned: {self.note}" if self.note else "pinned"


def pin(repository: Repository, snapshot: str, note: str = "", *, created: float | None = None) -> Pin:
    """Keep `snapshot` until it is unpinned. Pinning it again replaces the note.

    Args:
        created: wall-clock seconds, instead of now.

    Raises:
        StorageMissingError: there is no such snapshot, or retention removed it at this moment.
        StorageError: it is not pinned, as before.
    """
    _require(repository, snapshot)
    made = Pin(snapshot, note, time.time() if created is None else created)
    text = json.dumps({"note": made.note, "created": made.created}, ensure_ascii=False)
    storage, name = repository.storage, layout.pin_name(snapshot)
    try:
        storage.put(name, [memoryview(text.encode() + b"\n")])
        is_new = True
    except StorageExistsError:
        storage.put(name, [memoryview(text.encode() + b"\n")], exclusive=False)
        is_new = False
    try:
        _require(repository, snapshot)
    except StorageMissingError:
        if is_new:
            storage.delete(name)
        raise
    return made


def unpin(repository: Repository, snapshot: str) -> bool:
    """Leave `snapshot` to retention again; whether it was pinned."""
    was_pinned = snapshot in pinned_ids(repository.storage)
    repository.storage.delete(layout.pin_name(snapshot))
    return was_pinned


def pinned_ids(storage: Storage) -> frozenset[str]:
    """The snapshots that have a pin: one listing, no reads."""
    found = (layout.pin_id(item.name) for item in storage.list(layout.PINS))
    return frozenset(parsed.id for parsed in found if parsed)


def pins(storage: Storage) -> list[Pin]:
    """All pins, by the age of their snapshots. A damaged pin still pins."""
    return sorted((pin for one in pinned_ids(storage) if (pin := _read(storage, one))), key=lambda pin: pin.id)


def protection(storage: Storage) -> dict[str, str]:
    """Id → reason of every pinned snapshot, for `plan`."""
    return {pin.id: str(pin) for pin in pins(storage)}


def _read(storage: Storage, snapshot: str) -> Pin | None:
    try:
        data = storage.get(layout.pin_name(snapshot))
    except StorageMissingError:
        return None  # unpinned meanwhile
    try:
        row = json.loads(data)
        return Pin(snapshot, str(row["note"]), float(row["created"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return Pin(snapshot, "", 0.0)


def _require(repository: Repository, snapshot: str) -> None:
    if all(parsed.id != snapshot for parsed in repository.ids()):
        where = repository.storage.url
        raise StorageMissingError(f"no snapshot {snapshot} at {where}", hint=f"`ckpt ls {where}` lists them")
