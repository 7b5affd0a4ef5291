"""The catalog of a run: what many manifests say, in one object.

It is a cache that is never believed over the listing. An entry counts only where the listing shows the very manifest
that was read for it: the same name, size and version. Whatever is newer, or was not in the catalog when that was
written, is read separately. A catalog that is missing, torn, old or of another run costs time and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ckpt_engine.errors import (
    CorruptError,
)
from ckpt_engine.store import json_checks, manifest_codec, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import FORMAT, VERSION, SnapshotInfo
from ckpt_engine.store.storage.base import ObjectInfo

EVERY = 100
"""The catalog is written again when it lacks so many snapshots; a reader never reads more manifests singly."""
FEW = 8
"""So many unknown manifests are read singly without asking for the catalog."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """What is known of one snapshot from its verified manifest.

    Args:
        manifest: its manifest as the storage lists it.
        files: names of the data files that it needs.
    """

    manifest: ObjectInfo
    info: SnapshotInfo
    files: tuple[str, ...]


def encode(run: str, cards: Iterable[CatalogEntry]) -> bytes:
    """The bytes of a catalog. Cards of manifests whose version the storage does not tell are left out."""
    rows = [
        {
            "nbytes": card.manifest.nbytes,
            "version": card.manifest.version,
            "info": manifest_codec.info_to_json(card.info),
            "files": card.files,
        }
        for card in cards
        if card.manifest.version
    ]
    body = manifest_codec.dump({"format": FORMAT, "version": VERSION, "run": run, "snapshots": rows})
    return b'{"digest":"%s","catalog":%s}\n' % (digest(body).encode(), body)


def decode(data: bytes, run: str, listed: Mapping[str, ObjectInfo]) -> list[CatalogEntry]:
    """The cards that hold for the manifests of a listing.

    Args:
        run: whose catalog it must be.
        listed: manifests by the id of their snapshot.

    Raises:
        CorruptError: torn, changed, of another run or of a later version: of no use here.
    """
    start, _, body = data.partition(b',"catalog":')
    body = body[:-2]
    if start != b'{"digest":"%s"' % digest(body).encode():
        raise CorruptError("the catalog is damaged")
    with json_checks.reading("the catalog contradicts the format"):
        document = msgspec.json.decode(body)
        if (document["format"], document["version"], document["run"]) != (FORMAT, VERSION, run):
            raise CorruptError("the catalog is of another run or version")
        return [card for row in document["snapshots"] if (card := _card(row, listed)) is not None]


def _card(row: Mapping[str, Any], listed: Mapping[str, ObjectInfo]) -> CatalogEntry | None:
    there = listed.get(row["info"]["id"])
    if there is None or not there.version or (there.nbytes, there.version) != (row["nbytes"], row["version"]):
        return None
    files = tuple(row["files"])
    if any(names.data_owner(name) is None for name in files):
        raise ValueError("bad data file name")
    return CatalogEntry(there, manifest_codec.info_from_json(row["info"]), files)
