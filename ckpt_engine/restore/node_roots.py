"""The folders of several nodes as one place, while their ranks load together.

Each node has a part of every snapshot, and the others ask it over the network, again where a connection breaks. Their
partial manifests are one, and so are their data files. The leader of each folder serves its objects, read-only.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ckpt_engine.errors import (
    CkptError,
    StorageMissingError,
)
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.ranks.session import Places as RanksByRoot
from ckpt_engine.restore.ask_tiers import FindPlaces
from ckpt_engine.restore.folder_service import FolderClient, FolderServer, manifest_at
from ckpt_engine.restore.joint_snapshot import JointSnapshot, gather
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.quarantine import encode_quarantine
from ckpt_engine.store.repository import Repository, encode_record
from ckpt_engine.store.storage.base import Capabilities, Folder, ObjectInfo, ReadOnlyStorage, Storage
from ckpt_engine.undo import on_failure


@dataclass(eq=False)
class JointTiers:
    """The places of a run as all ranks together have them: with one root for all those of one rank. A context manager.

    Every rank enters it, in the same order. A rank that leaves it lends nothing any more.

    Args:
        _where: the places as this rank alone sees them.

    Raises:
        WaitTimeoutError, RanksError: rank 0 is not there.
    """

    _session: Session
    _where: FindPlaces
    _opened: ExitStack = field(default_factory=ExitStack)
    _borrowers: list[FolderClient | None] = field(default_factory=list)
    _spread: JointStorage | None = None
    _nearest: Repository | None = None
    _sizes: dict[str, dict[int, dict[str, int]]] = field(default_factory=dict)
    """Where this rank chooses, of snapshots that were looked at: the data files that each place has."""
    _roots: RanksByRoot = ()
    _offers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """There, too: the places that have each snapshot, by their numbers; so are the next two."""
    _silent: dict[str, str] = field(default_factory=dict)
    """Why places do not answer, by URL."""
    _since: dict[int, float] = field(default_factory=dict)
    """When the places began to have a run."""

    def __enter__(self) -> Self:
        roots, own = self._session.places(), self._session.root
        if len(roots) > 1 and own is not None:
            with on_failure(self._opened.close):
                self._meet(roots, own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def places(self) -> Sequence[Repository]:
        """All places of the run, nearest first."""
        found, own = self._where(), self._session.root
        if self._nearest is None or own is None:
            return found
        return [self._nearest if one.storage.url == own.url else one for one in found]

    def parts_of(self, chosen: Manifest) -> str | None:
        """What other ranks have to know of a snapshot that this one has chosen; None: nothing.

        Where only a further tier has it whole, those of its data files that places have too are read there.
        """
        if self._spread is None:
            return None
        known = self._spread.known.get(chosen.info.id)
        if known is None:
            homes = {
                file.name: number
                for number, sizes in self._sizes.get(chosen.info.id, {}).items()
                for file in chosen.files
                if sizes.get(file.name) == file.nbytes
            }
            if not homes:
                return None
            known = JointSnapshot.of(chosen, homes)
            self._spread.learn(chosen.info.id, known)
        return known.packed()

    def learn(self, snapshot: str, parts: str | None) -> None:
        """Take what `parts_of` has on rank 0."""
        if parts is not None and self._spread is not None and snapshot not in self._spread.known:
            self._spread.learn(snapshot, JointSnapshot.unpacked(parts))

    def _meet(self, roots: RanksByRoot, own: Folder) -> None:
        session, ranks = self._session, self._session.ranks
        self._roots = roots
        place = next(number for number, members in enumerate(roots) if ranks.rank in members)
        address = session.locate()
        secret = session.agree(lambda: secrets.token_hex(16), LOAD_SECONDS)
        leads = roots[place][0] == ranks.rank
        met = session.meet(lambda: self._lend(own, address, secret) if leads else {}, self._combined)
        self._borrowers = [
            None
            if where is None or number == place
            else FolderClient(str(where[0]), int(where[1]), secret, roots[number][0], ranks.size)
            for number, where in enumerate(met["lenders"])
        ]
        for borrower in filter(None, self._borrowers):
            self._opened.callback(borrower.close)

        def gathered(snapshot: str) -> JointSnapshot:
            ask, offers = partial(self._ask, own), self._offers[snapshot]
            return gather(snapshot, offers, ask, self._silent, self._began)

        chooses = (self._offers.keys(), gathered) if session.coordinates else None
        self._spread = JointStorage(own, place, self._borrowers, met["texts"], chooses, self._silent)
        self._nearest = Repository(self._spread)

    def _lend(self, own: Folder, address: str, secret: str) -> dict[str, Any]:
        """What a leader says: what is in its root, and where it lends that."""
        try:
            repository = Repository(own)
            ids = [parsed.id for parsed in repository.ids()]
            damaged = repository.damage.snapshots.items()
            texts = {names.quarantine_name(one): encode_quarantine(noted.files).decode() for one, noted in damaged}
            since = None
            if (record := repository.record()) is not None:
                texts[names.RECORD] = encode_record(record).decode()
                since = Path(own.path(names.RECORD)).stat().st_mtime
            lender = FolderServer(own, address, secret, self._session.ranks.size)
            self._opened.callback(lender.close)
            return {"host": address, "port": lender.port, "ids": ids, "texts": texts, "since": since}
        except (CkptError, OSError) as err:
            return {"why": f"it cannot be used: {err}"}

    def _combined(self, said: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Of what the leaders say, on rank 0, what all have to know."""
        leaders = [said[members[0]] or {} for members in self._roots]
        for number, one in enumerate(leaders):
            if "port" not in one:
                url = _folder(self._roots[number][0])
                self._silent[url] = f"{url}: {one.get('why', 'the rank does not answer')}"
            for snapshot in one.get("ids", ()):
                self._offers[snapshot].append(number)
            if one.get("since") is not None:
                self._since[number] = one["since"]
        return {
            "lenders": [[one["host"], one["port"]] if "port" in one else None for one in leaders],
            "texts": dict(ChainMap(*(one.get("texts", {}) for one in leaders))),
        }

    def _ask(self, own: Folder, number: int, snapshot: str) -> tuple[bytes, dict[str, int]]:
        """See `Ask`."""
        borrower = self._borrowers[number]
        try:
            found = manifest_at(own, snapshot) if borrower is None else borrower.manifest(snapshot)
        except CkptError:
            if borrower is not None and borrower.gone is not None:
                self._silent[_folder(self._roots[number][0])] = borrower.gone
            raise
        self._sizes.setdefault(snapshot, {})[number] = found[1]
        return found

    def _began(self, info: SnapshotInfo, lacking: Sequence[int]) -> bool:
        """See `Began`."""
        # A later one says that there was more, and what is not there now may have been removed: no place remembers
        # that. Of the first one it is certain enough where the nodes that lack it have a folder that is older.
        first = info.seq == 1 and info.parent is None and self._offers.keys() == {info.id}
        held = [number for number, members in enumerate(self._roots) if not set(members) & set(lacking)]
        size = self._session.ranks.size
        if not first or info.partial is None or info.partial.size != size or held != self._offers[info.id]:
            return False
        rest = [number for number in range(len(self._roots)) if number not in held]
        if not all(self._since.get(number, math.inf) < info.created for number in rest):
            return False
        assert self._spread is not None
        self._spread.unfinished.add(info.id)
        return True


def _folder(leader: int) -> str:
    return f"the folder of rank {leader}"


@dataclass(eq=False)
class RemoteData(ReadOnlyStorage):
    """The data files of other places, as far as `Storage` has to do with reading them. Thread safe.

    Args:
        url: how it is called.
        lenders: by the number of the place; None: this rank's own, or one that lends nothing.
        homes: filled by `JointStorage`.
    """

    url: str
    _lenders: Sequence[FolderClient | None]
    _homes: dict[str, int]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slow_answers=False)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        home = self._homes.get(name)
        lender = self._lenders[home] if home is not None else None
        if lender is None:
            raise StorageMissingError(f"no other rank lends {name}")
        lender.get_into(name, start, out)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:  # noqa: ARG002
        raise StorageMissingError(f"{name} is only read where it is needed")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002
        return iter(())


class JointStorage(RemoteData):
    """The snapshots that all places have together, read-only; see `Storage`.

    A data file is read from this rank's own root if its place has it, else from the place that does.

    Args:
        own: this rank's root.
        place: the number of its place.
        lenders: see `RemoteData`.
        texts: by name the run's record, and what nodes have noted of damaged snapshots.
        offers: where this rank chooses: the snapshots that any place has, and how to gather one.
        silent: there: places that do not answer, and why; grows when one is gathered.
    """

    def __init__(
        self,
        own: Folder,
        place: int,
        lenders: Sequence[FolderClient | None],
        texts: Mapping[str, str],
        offers: tuple[Collection[str], Callable[[str], JointSnapshot]] | None = None,
        silent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.silent = silent
        self.known: dict[str, JointSnapshot] = {}
        """What was gathered of snapshots."""
        self.sizes: dict[str, int] = {}
        """Of the data files of snapshots that were gathered."""
        self.unfinished: set[str] = set()
        """Snapshots that never were whole, and that nothing is lost of."""
        super().__init__(own.url, lenders, {})
        self._own = own
        self._place = place
        self._texts = texts
        self._offers = offers
        self.far: Storage = RemoteData(own.url, lenders, self._homes)
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
            announce(manifest, {name for name, home in self._homes.items() if home != self._place})

    def learn(self, snapshot: str, known: JointSnapshot) -> None:
        """It was gathered by another rank."""
        self.known[snapshot] = known
        self._homes.update(known.homes)
        self.sizes.update(known.sizes)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name in self._texts:
            text = self._texts[name].encode()
        else:
            parsed = names.manifest_id(name)
            if parsed is None or parsed.id not in self._snapshots():
                raise StorageMissingError(f"{self.url} does not have {name}")
            if parsed.id not in self.known and self._offers is not None:
                self.learn(parsed.id, self._offers[1](parsed.id))
            text = self.known[parsed.id].text
        return text[start:] if nbytes is None else text[start : start + nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        if self._homes.get(name) == self._place:
            self._own.get_into(name, start, out)
        else:
            self.far.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [ObjectInfo(names.manifest_name(snapshot), 0) for snapshot in self._snapshots()]
        found += [ObjectInfo(name, nbytes) for name, nbytes in self.sizes.items()]
        found += [ObjectInfo(name, 0) for name in self._texts]
        return iter([item for item in found if item.name.startswith(prefix)])

    def _snapshots(self) -> Collection[str]:
        return self._offers[0] if self._offers is not None else self.known.keys()
