"""Ranks meet before they load: those of one node share what they read, and each node says what its root has."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckpt_engine.errors import CkptError, WaitTimeoutError
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.ranks.session import Places as RanksByRoot
from ckpt_engine.restore import sources
from ckpt_engine.restore.node_storage import SHARED_MEMORY, NodeStorage, open_shared, remove_shared
from ckpt_engine.restore.sources import Borrower, JointSnapshot, Lender, Spread, manifest_at
from ckpt_engine.state.sharding import is_sharded
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository, encode_record
from ckpt_engine.store.storage.base import Folder, Storage

MEET_SECONDS = 30.0
"""How long rank 0 waits for the others before it loads; who comes later reads alone."""


def node_name() -> str:
    """Equal for processes that can share memory, and for no others: same boot, same shared memory, same user.

    Raises:
        OSError: there is no shared memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    text = f"{boot}/{os.stat(SHARED_MEMORY).st_dev}/{os.getuid()}"  # noqa: PTH116
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among those of its node: `index` of `count`, and the file that they share."""

    fd: int
    index: int
    count: int


def meet(session: Session, timeout: float = MEET_SECONDS, *, wanted: bool = True) -> Seat | None:
    """Find the ranks of this node. Every rank calls it; what they say goes through the ranks' store, not a collective.

    Args:
        wanted: whether this rank has something to share.

    Returns:
        This rank's seat; None: it is alone on its node, came too late, or has nothing to share.

    Raises:
        WaitTimeoutError, RanksError: rank 0 is not there.
    """
    meeting = session.agree(lambda: os.urandom(16).hex(), LOAD_SECONDS)
    node, name, fd, made = "", "", -1, False
    if wanted:
        with suppress(OSError):
            found = node_name()
            name = f"ckpt-node-{hashlib.sha256(f'{meeting}/{found}'.encode()).hexdigest()[:32]}"
            fd, made = open_shared(name)
            node = found
    members: list[int] = []
    try:
        members = _members(session, meeting, node, timeout)
    finally:
        if made:
            remove_shared(name)  # all who are members have it open by now
        if fd >= 0 and len(members) < 2:
            os.close(fd)
    return Seat(fd, members.index(session.ranks.rank), len(members)) if len(members) > 1 else None


def _members(session: Session, meeting: str, node: str, timeout: float) -> list[int]:
    """The ranks of this node; none if this one is not among them."""
    ranks, store = session.ranks, session.ranks.store
    deadline = time.monotonic() + timeout
    if not session.coordinates:
        store.set(f"node/{meeting}/{ranks.rank}", node)
        try:
            store.wait(f"node/{meeting}/closed", 2 * timeout)
        except WaitTimeoutError:
            return []
        found = store.get(f"node/{meeting}/of/{node}") if node else None
        members = list(json.loads(found)) if found is not None else []
        return members if ranks.rank in members else []
    nodes: dict[str, list[int]] = {node: [0]}
    for rank in range(1, ranks.size):
        try:
            where = store.wait(f"node/{meeting}/{rank}", max(0.001, deadline - time.monotonic()))
        except WaitTimeoutError:
            continue
        nodes.setdefault(where, []).append(rank)
    for where, members in nodes.items():
        if where:
            store.set(f"node/{meeting}/of/{where}", json.dumps(members))
    store.set(f"node/{meeting}/closed", "")
    return nodes[node] if node else []


class Sharing:
    """While ranks load together: the places of the run, those far away read once per node. A context manager.

    The state must be the same on all ranks: where each needs a part of its own there is nothing to share.

    Args:
        where: the places as one rank alone would read them.
        into: as given to `load`.
        alike: False: each rank needs a part of its own, whatever `into` is.

    Raises:
        WaitTimeoutError, RanksError: as `meet`.
    """

    def __init__(self, session: Session, where: Places, into: Any, *, alike: bool = True) -> None:
        self._session = session
        self._where = where
        self._seat: Seat | None = None
        self._shared: dict[str, NodeStorage] = {}
        self._wanted = alike and not is_divided(into)

    def __enter__(self) -> Self:
        try:
            far = any(_is_far(place.storage) for place in self._where())
        except CkptError:
            far, self._wanted = True, False  # loading will say what is wrong; the others must not wait for this rank
        if far:
            self._seat = meet(self._session, wanted=self._wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        idle = [storage.stop() for storage in self._shared.values()]
        if self._seat is not None and all(idle):
            os.close(self._seat.fd)  # a request that hangs would write into whatever gets this number next

    def places(self) -> Sequence[Repository]:
        """All places of the run, nearest first."""
        seat, places = self._seat, self._where()
        if seat is None:
            return places
        found = []
        for place in places:
            if not _is_far(place.storage):
                found.append(place)
                continue
            url, nodes = place.storage.url, place.storage.capabilities.nodes
            if nodes is not None:
                if url not in self._shared:
                    self._shared[url] = NodeStorage(nodes.far, seat.fd, seat.index, seat.count)
                    nodes.far = self._shared[url]
                found.append(place)
                continue
            if url not in self._shared:
                self._shared[url] = NodeStorage(place.storage, seat.fd, seat.index, seat.count)
            found.append(Repository(self._shared[url]))
        return found


def is_divided(state: Any) -> bool:
    """Whether there is a DTensor in a state."""
    if is_sharded(state):
        return True
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return any(is_divided(child) for child in children)


def _is_far(storage: Storage) -> bool:
    return not storage.capabilities.cheap_reads


Places = Callable[[], Sequence[Repository]]


class Gathered:
    """The places of a run as all ranks together have them: with one root for all those of one rank. A context manager.

    Every rank enters it, in the same order. A rank that leaves it lends nothing any more.

    Args:
        where: the places as this rank alone sees them.

    Raises:
        WaitTimeoutError, RanksError: rank 0 is not there.
    """

    def __init__(self, session: Session, where: Places) -> None:
        self._session = session
        self._where = where
        self._lender: Lender | None = None
        self._borrowers: list[Borrower | None] = []
        self._spread: Spread | None = None
        self._nearest: Repository | None = None
        self._sizes: dict[str, dict[int, dict[str, int]]] = {}
        """Where this rank chooses, of snapshots that were looked at: the data files that each place has."""
        self._roots: RanksByRoot = ()
        self._offers: dict[str, list[int]] = defaultdict(list)
        """There, too: the places that have each snapshot, by their numbers; so are the next two."""
        self._silent: dict[str, str] = {}
        """Why places do not answer, by URL."""
        self._since: dict[int, float] = {}
        """When the places began to have a run."""

    def __enter__(self) -> Self:
        roots, own = self._session.places(), self._session.root
        if len(roots) > 1 and own is not None:
            try:
                self._meet(roots, own)
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def places(self) -> Sequence[Repository]:
        """All places of the run, nearest first."""
        found, own = self._where(), self._session.root
        if self._nearest is None or own is None:
            return found
        return [self._nearest if one.storage.url == own.url else one for one in found]

    def told(self, chosen: Manifest) -> str | None:
        """What other ranks have to know of a snapshot that this one has chosen; None: nothing.

        Where only a further tier has it whole, those of its data files that places have too are read there.
        """
        if self._spread is None:
            return None
        known = self._spread.known(chosen.info.id)
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

    def learn(self, snapshot: str, told: str | None) -> None:
        """Take what `told` has on rank 0."""
        if told is not None and self._spread is not None and self._spread.known(snapshot) is None:
            self._spread.learn(snapshot, JointSnapshot.unpacked(told))

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
            else Borrower(str(where[0]), int(where[1]), secret, roots[number][0], ranks.size)
            for number, where in enumerate(met["lenders"])
        ]

        def gathered(snapshot: str) -> JointSnapshot:
            ask, offers = partial(self._ask, own), self._offers[snapshot]
            return sources.gather(snapshot, offers, ask, self._silent, self._began)

        chooses = (self._offers.keys(), gathered) if session.coordinates else None
        self._spread = Spread(own, place, self._borrowers, met["record"], chooses, self._silent)
        self._nearest = Repository(self._spread)

    def _lend(self, own: Folder, address: str, secret: str) -> dict[str, Any]:
        """What a leader says: what is in its root, and where it lends that."""
        try:
            repository = Repository(own)
            ids = [parsed.id for parsed in repository.ids()]
            found = repository.record()
            record = encode_record(found).decode() if found is not None else ""
            self._lender = Lender(own, address, secret, self._session.ranks.size)
            since = Path(own.path(names.RECORD)).stat().st_mtime if record else None
            lends = {"host": address, "port": self._lender.port}
            return {**lends, "ids": ids, "record": record, "since": since}
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
            "record": next((str(one["record"]) for one in leaders if one.get("record")), ""),
        }

    def _ask(self, own: Folder, number: int, snapshot: str) -> tuple[bytes, dict[str, int]]:
        """See `sources.Ask`."""
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
        """See `sources.Began`."""
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

    def _close(self) -> None:
        for borrower in self._borrowers:
            if borrower is not None:
                borrower.close()
        if self._lender is not None:
            self._lender.close()


def _folder(leader: int) -> str:
    return f"the folder of rank {leader}"
