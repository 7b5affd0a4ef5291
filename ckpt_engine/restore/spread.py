"""The nearest tier where each place has a root of its own: its partial manifests are one, and so are its data files."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import zstandard

from ckpt_engine.errors import (
    CkptError,
    FormatError,
    SnapshotFailedError,
    SnapshotSkippedError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.persist import parts
from ckpt_engine.restore.lending import Borrower
from ckpt_engine.store import layout, manifest_codec
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.storage.base import Capabilities, Folder, ObjectInfo, Storage


@dataclass(frozen=True, slots=True)
class Known:
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
    def of(cls, manifest: Manifest, homes: Mapping[str, int]) -> Known:
        """Of a whole manifest."""
        sizes = {file.name: file.nbytes for file in manifest.files if file.name in homes}
        return cls(manifest_codec.encode(manifest), homes, sizes)

    def packed(self) -> str:
        """As text, small enough for the ranks' store."""
        text = json.dumps([self.text.decode(), dict(self.homes)])
        return base64.b85encode(zstandard.ZstdCompressor().compress(text.encode())).decode()

    @classmethod
    def unpacked(cls, packed: str) -> Known:
        """The inverse of `packed`."""
        text, homes = json.loads(zstandard.ZstdDecompressor().decompress(base64.b85decode(packed)))
        return cls.of(manifest_codec.decode(text.encode()), homes)


Began = Callable[[SnapshotInfo, Sequence[int]], bool]
"""Whether a snapshot is the first one that was ever begun, and the nodes of these ranks had not finished it."""
Ask = Callable[[int, str], tuple[bytes, dict[str, int]]]
"""The manifest that a place (its number) has of a snapshot, and the sizes of its data files; as `lending.manifest_at`.
"""


def gather(snapshot: str, holders: Collection[int], ask: Ask, silent: Mapping[str, str], began: Began) -> Known:
    """What the manifests of these places are together.

    Args:
        holders: the places that have one.
        silent: why places do not answer, for messages; `ask` may find out more.
        began: tells a snapshot that was never finished from one of which something was lost.

    Raises:
        FormatError: they are not the whole snapshot; says what is missing.
    """
    wrong: list[str] = []
    found: list[tuple[int, parts.Part]] = []
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
            return Known.of(manifest, {file.name: place for file in manifest.files})
        part = parts.of_manifest(manifest)
        if all(set(part.ranks).isdisjoint(other.ranks) for _, other in found):
            found.append((place, part))
    size = found[0][1].size if found else 0
    lacking = sorted(set(range(size)) - {rank for _, part in found for rank in part.ranks})
    if lacking or not found:
        what = f"the shares of ranks {', '.join(map(str, lacking))} of {size}" if found else "its shares"
        if found and not wrong and not silent and began(found[0][1].manifest.info, lacking):
            raise FormatError(f"it was never finished: {what} were not written")
        why = "; ".join(dict.fromkeys((*silent.values(), *wrong)))
        if silent:
            raise FormatError(f"{what} cannot be had: {why}")
        raise FormatError(f"{what} are in the folder of no node{f': {why}' if why else ' that takes part'}")
    try:
        whole = parts.merge([part for _, part in found])
    except (SnapshotFailedError, SnapshotSkippedError) as err:
        raise FormatError(f"the shares of the places are not one snapshot: {err.message}") from err
    homes = {file.name: place for place, part in found for file in part.manifest.files}
    return Known.of(whole, {file.name: homes[file.name] for file in whole.files})


class Far:
    """The data files of other places, as far as `Storage` has to do with reading them. Thread safe.

    Args:
        url: how it is called.
        lenders: by the number of the place; None: this rank's own, or one that lends nothing.
        homes: filled by `Spread`.
    """

    def __init__(self, url: str, lenders: Sequence[Borrower | None], homes: Mapping[str, int]) -> None:
        self.url = url
        self._lenders = lenders
        self._homes = homes

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slow_answers=False)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        home = self._homes.get(name)
        lender = self._lenders[home] if home is not None else None
        if lender is None:
            raise StorageMissingError(f"nobody lends {name}")
        lender.get_into(name, start, out)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:  # noqa: ARG002
        raise StorageMissingError(f"{name} is only read where it is needed")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002
        return iter(())

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{self.url} is not written by this rank")

    def delete(self, *names: str) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{self.url} is not written by this rank")

    def sweep(self) -> int:
        return 0

    def free_bytes(self) -> int | None:
        return None


class Spread(Far):
    """The snapshots that all places have together, read-only; see `Storage`.

    A data file is read from this rank's own root if its place has it, else from the place that does.

    Args:
        own: this rank's root.
        place: the number of its place.
        lenders: see `Far`.
        record: of the run.
        offers: where this rank chooses: the snapshots that any place has, and how to gather one.
        silent: there: places that do not answer, and why; grows when one is gathered.
    """

    def __init__(
        self,
        own: Folder,
        place: int,
        lenders: Sequence[Borrower | None],
        record: str,
        offers: tuple[Collection[str], Callable[[str], Known]] | None = None,
        silent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.silent = silent
        self._known: dict[str, Known] = {}
        self.sizes: dict[str, int] = {}
        """Of the data files of snapshots that were gathered."""
        self.unfinished: set[str] = set()
        """Snapshots that never were whole, and that nothing is lost of."""
        homes: dict[str, int] = {}
        super().__init__(own.url, lenders, homes)
        self._all_homes = homes
        self._own = own
        self._place = place
        self._record = record
        self._offers = offers
        self.far: Storage = Far(own.url, lenders, homes)
        """What other places have; `NodeStorage` where the ranks of this node read it once."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slow_answers=False, nodes=self, unshared=self._unshared())

    def _unshared(self) -> Storage | None:
        far = self.far.capabilities.unshared
        if far is None:
            return None
        direct = copy.copy(self)
        direct.far = far
        return direct

    def announce(self, manifest: Manifest) -> None:
        """Begin with what comes from elsewhere, where ranks of this node share it."""
        announce = self.far.capabilities.announce
        if announce is not None:
            announce(manifest, {name for name, home in self._all_homes.items() if home != self._place})

    def known(self, snapshot: str) -> Known | None:
        """What was gathered of a snapshot."""
        return self._known.get(snapshot)

    def learn(self, snapshot: str, known: Known) -> None:
        """It was gathered by another rank."""
        self._known[snapshot] = known
        self._all_homes.update(known.homes)
        self.sizes.update(known.sizes)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == layout.RECORD and self._record:
            text = self._record.encode()
        else:
            parsed = layout.manifest_id(name)
            if parsed is None or parsed.id not in self._snapshots():
                raise StorageMissingError(f"{self.url} does not have {name}")
            if parsed.id not in self._known and self._offers is not None:
                self.learn(parsed.id, self._offers[1](parsed.id))
            text = self._known[parsed.id].text
        return text[start:] if nbytes is None else text[start : start + nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        if self._all_homes.get(name) == self._place:
            self._own.get_into(name, start, out)
        else:
            self.far.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [ObjectInfo(layout.manifest_name(snapshot), 0) for snapshot in self._snapshots()]
        found += [ObjectInfo(name, nbytes) for name, nbytes in self.sizes.items()]
        return iter([item for item in found if item.name.startswith(prefix)])

    def _snapshots(self) -> Collection[str]:
        return self._offers[0] if self._offers is not None else self._known.keys()
