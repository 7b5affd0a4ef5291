"""One snapshot of the parts that the places of several nodes have."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import zstandard

from ckpt_engine.errors import (
    CkptError,
    FormatError,
    SnapshotFailedError,
    SnapshotSkippedError,
)
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.manifest import Manifest, Partial, SnapshotInfo
from ckpt_engine.writer import part_records


@dataclass(frozen=True, slots=True)
class JointSnapshot:
    """A snapshot that the places have together.

    Args:
        text: its whole manifest.
        homes: the place, by its number, that has each data file; what is in none is not in it.
        sizes: of these data files.
    """

    text: bytes
    homes: Mapping[str, int]
    sizes: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, manifest: Manifest, homes: Mapping[str, int]) -> JointSnapshot:
        """Of a whole manifest."""
        sizes = {file.name: file.nbytes for file in manifest.files if file.name in homes}
        return cls(manifest_codec.encode(manifest), homes, sizes)

    def packed(self) -> str:
        """As text, small enough for the ranks' store."""
        text = json.dumps([self.text.decode(), dict(self.homes)])
        return base64.b85encode(zstandard.ZstdCompressor().compress(text.encode())).decode()

    @classmethod
    def unpacked(cls, packed: str) -> JointSnapshot:
        """The inverse of `packed`."""
        text, homes = json.loads(zstandard.ZstdDecompressor().decompress(base64.b85decode(packed)))
        return cls.of(manifest_codec.decode(text.encode()), homes)


Began = Callable[[SnapshotInfo, Sequence[int]], bool]
"""Whether a snapshot is the first one that was ever begun, and the nodes of these ranks had not finished it."""
AskManifest = Callable[[int, str], tuple[bytes, dict[str, int]]]
"""The manifest that a place (its number) has of a snapshot, and the sizes of its data files; as `manifest_at`.
"""


def gather(
    snapshot: str, holders: Collection[int], ask: AskManifest, silent: Mapping[str, str], began: Began
) -> JointSnapshot:
    """What the manifests of these places are together.

    Args:
        holders: the places that have one.
        silent: why places do not answer, for messages; `ask` may find out more.
        began: tells a snapshot that was never finished from one of which something was lost.

    Raises:
        FormatError: they are not the whole snapshot; says what is missing.
    """
    wrong: list[str] = []
    found: list[tuple[int, part_records.PartRecord]] = []
    for place in holders:
        try:
            text, sizes = ask(place, snapshot)
            manifest = manifest_codec.decode(text)
            for file in manifest.files:
                if sizes.get(file.name) != file.nbytes:
                    raise FormatError(f"data file {file.name} is not there whole")
        except CkptError as err:
            wrong.append(err.message)
            continue
        if manifest.info.partial is None:
            return JointSnapshot.of(manifest, {file.name: place for file in manifest.files})
        part = part_records.of_manifest(manifest)
        if all(set(part.ranks).isdisjoint(other.ranks) for _, other in found):
            found.append((place, part))
    size = found[0][1].size if found else 0
    lacking = sorted(set(range(size)) - {rank for _, part in found for rank in part.ranks})
    if lacking or not found:
        what = f"the shares of {Partial(tuple(lacking), size)}" if found else "its shares"
        if found and not wrong and not silent and began(found[0][1].manifest.info, lacking):
            raise FormatError(f"it was never finished: {what} were not written")
        why = "; ".join(dict.fromkeys((*silent.values(), *wrong)))
        if silent:
            raise FormatError(f"{what} cannot be had: {why}")
        raise FormatError(f"{what} are in the folder of no node{f': {why}' if why else ' that takes part'}")
    try:
        whole = part_records.merge([part for _, part in found])
    except (SnapshotFailedError, SnapshotSkippedError) as err:
        raise FormatError(f"the shares of the places are not one snapshot: {err.message}") from err
    homes = {file.name: place for place, part in found for file in part.manifest.files}
    return JointSnapshot.of(whole, {file.name: homes[file.name] for file in whole.files})
