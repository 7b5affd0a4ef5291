"""The folders of several nodes as one place, while their ranks load together: each node has a part of every snapshot,
and the others ask it over the network, again where a connection breaks.

Their partial manifests are one, and so are their data files. The leader of each folder lends its objects, read-only.

The connection is that of `writer.peer_service`: both ends prove that they know a secret which the ranks have agreed on.

| `what`     | carries                     | reply |
|---|---|---|
| `manifest` | `snapshot`                  | `files`: the sizes of its data files, by name; `nbytes`, the bytes |
| `read`     | `name`, `start`, `nbytes`   | `nbytes`, the bytes of a data file |

Where it cannot be done the reply is `error`.
"""

from __future__ import annotations

import copy
import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    StorageError,
    StorageMissingError,
    WriterError,
)
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.ranks.session import Places as RanksByRoot
from ckpt_engine.restore.ask_tiers import Places
from ckpt_engine.restore.choose import JointSnapshot, gather
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store import names as layout
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository, encode_record
from ckpt_engine.store.storage.base import Capabilities, Folder, ObjectInfo, ReadOnlyStorage, Storage
from ckpt_engine.store.storage.object_requests import GrowingPauses
from ckpt_engine.writer.peer_service import SECONDS, PeerConnection, Server, connect


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

    def parts_of(self, chosen: Manifest) -> str | None:
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

    def learn(self, snapshot: str, parts: str | None) -> None:
        """Take what `parts_of` has on rank 0."""
        if parts is not None and self._spread is not None and self._spread.known(snapshot) is None:
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
            else Borrower(str(where[0]), int(where[1]), secret, roots[number][0], ranks.size)
            for number, where in enumerate(met["lenders"])
        ]

        def gathered(snapshot: str) -> JointSnapshot:
            ask, offers = partial(self._ask, own), self._offers[snapshot]
            return gather(snapshot, offers, ask, self._silent, self._began)

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

    def _close(self) -> None:
        for borrower in self._borrowers:
            if borrower is not None:
                borrower.close()
        if self._lender is not None:
            self._lender.close()


def _folder(leader: int) -> str:
    return f"the folder of rank {leader}"


class Far(ReadOnlyStorage):
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
            raise StorageMissingError(f"no other rank lends {name}")
        lender.get_into(name, start, out)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:  # noqa: ARG002
        raise StorageMissingError(f"{name} is only read where it is needed")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002
        return iter(())


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
        offers: tuple[Collection[str], Callable[[str], JointSnapshot]] | None = None,
        silent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.silent = silent
        self._known: dict[str, JointSnapshot] = {}
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

    def known(self, snapshot: str) -> JointSnapshot | None:
        """What was gathered of a snapshot."""
        return self._known.get(snapshot)

    def learn(self, snapshot: str, known: JointSnapshot) -> None:
        """It was gathered by another rank."""
        self._known[snapshot] = known
        self._all_homes.update(known.homes)
        self.sizes.update(known.sizes)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == names.RECORD and self._record:
            text = self._record.encode()
        else:
            parsed = names.manifest_id(name)
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
        found = [ObjectInfo(names.manifest_name(snapshot), 0) for snapshot in self._snapshots()]
        found += [ObjectInfo(name, nbytes) for name, nbytes in self.sizes.items()]
        return iter([item for item in found if item.name.startswith(prefix)])

    def _snapshots(self) -> Collection[str]:
        return self._offers[0] if self._offers is not None else self._known.keys()


LINES = 4
"""Most connections of a rank to each leader: requests beyond wait for each other."""
ALL_LINES = 448
"""Of all ranks to one leader: what `writer.peer_service` takes, and some to spare."""
MOST_BYTES = 4 << 20
"""Of one request: a leader has so much in memory for each of those that it answers."""
AT_ONCE = 16
"""Requests that a leader answers at the same time."""
PATIENCE_SECONDS = 30.0
"""How long a rank asks again where it is hung up on: a leader may have too many guests."""
_PAUSES = GrowingPauses(0.05, 2.0)


def lines(ranks: int) -> int:
    """How many connections each of so many ranks may have to a leader."""
    return max(1, min(LINES, ALL_LINES // ranks))


def manifest_at(root: Folder, snapshot: str) -> tuple[bytes, dict[str, int]]:
    """The manifest that a root has of a snapshot, and the sizes of those data files that are there.

    Raises:
        StorageMissingError, FormatError, StorageError: it cannot be used.
    """
    data = root.get(layout.manifest_name(snapshot))
    names = {file.name for file in manifest_codec.decode(data).files}
    return data, {item.name: item.nbytes for item in root.list(layout.DATA) if item.name in names}


class Lender:
    """Serves a root until it is closed.

    Args:
        host: where those who may ask reach this machine.
        secret: of theirs.
        ranks: how many may.

    Raises:
        OSError: no port is to be had.
    """

    def __init__(self, root: Folder, host: str, secret: str, ranks: int) -> None:
        self._root = root
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._server = Server(host, secret, self._answer, clients=lines(ranks) * ranks)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def close(self) -> None:
        """Idempotent."""
        self._server.close()

    def _answer(self, request: dict[str, Any], line: PeerConnection) -> None:
        if not self._turns.acquire(timeout=SECONDS):
            raise WriterError("too many ask at once")  # hangs up: it asks again
        try:
            try:
                head, data = self._found(request)
            except CkptError as err:
                line.send({"error": asdict(ErrorRecord.of(err))})
                return
            line.send({**head, "nbytes": data.nbytes})
            line.send_file(data)
        finally:
            self._turns.release()

    def _found(self, request: dict[str, Any]) -> tuple[dict[str, Any], memoryview]:
        if request["what"] == "manifest":
            data, files = manifest_at(self._root, str(request["snapshot"]))
            return {"files": files}, memoryview(data)
        name, start, nbytes = str(request["name"]), int(request["start"]), int(request["nbytes"])
        if layout.data_owner(name) is None or start < 0 or not 0 <= nbytes <= MOST_BYTES:
            raise StorageError(f"{nbytes} bytes of {name} from {start} on are not lent")
        out = memoryview(bytearray(nbytes))
        self._root.get_into(name, start, out)
        return {}, out


class Borrower:
    """A rank's side of another place's lender. Thread safe; connects when it is first asked.

    Args:
        leader: of that place, for messages.
        ranks: how many may ask there.
    """

    def __init__(self, host: str, port: int, secret: str, leader: int, ranks: int) -> None:
        self.url = f"the folder of rank {leader} at {host}"
        self.gone: str | None = None
        """Why it does not answer; it is not asked again then."""
        self._where = (host, port, secret)
        self._room = threading.BoundedSemaphore(lines(ranks))
        self._keeps = ranks <= ALL_LINES
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []

    def manifest(self, snapshot: str) -> tuple[bytes, dict[str, int]]:
        """As `manifest_at` there.

        Raises:
            StorageError: it does not answer. And as `manifest_at`.
        """
        found: list[bytearray] = []

        def room(nbytes: int) -> memoryview:
            found.append(bytearray(nbytes))
            return memoryview(found[-1])

        head = self._ask({"what": "manifest", "snapshot": snapshot}, room)
        return bytes(found[-1]), {str(name): int(nbytes) for name, nbytes in head["files"].items()}

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Storage.get_into`."""
        out = out.cast("B")
        for at in range(0, max(1, out.nbytes), MOST_BYTES):
            part = out[at : at + MOST_BYTES]
            self._read(name, start + at, part)

    def _read(self, name: str, start: int, out: memoryview) -> None:
        def room(nbytes: int) -> memoryview:
            if nbytes != out.nbytes:
                raise CorruptError(f"{self.url} sends {nbytes} bytes of {name} instead of {out.nbytes}")
            return out

        self._ask({"what": "read", "name": name, "start": start, "nbytes": out.nbytes}, room)

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _ask(self, request: dict[str, Any], room: Callable[[int], memoryview]) -> dict[str, Any]:
        """The reply to a request, whose bytes go where `room` says; asked again where a connection breaks."""
        pause = _PAUSES.first_seconds
        with self._room:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                if self.gone is not None:
                    raise StorageError(self.gone)
                try:
                    head = self._once(request, room)
                    break
                except (OSError, WriterError) as err:
                    # No server listens any more: waiting does not change that.
                    ended = isinstance(err, ConnectionRefusedError) or time.monotonic() + pause > deadline
                    if ended or self._closed.wait(pause):
                        self.gone = f"{self.url} does not answer on port {self._where[1]}: {err}"
                        raise StorageError(self.gone) from err
                pause = _PAUSES.after(pause)
        if "error" in head:
            raise ErrorRecord(**head["error"]).exception()
        return head

    def _once(self, request: dict[str, Any], room: Callable[[int], memoryview]) -> dict[str, Any]:
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or connect(*self._where)
        try:
            line.send(request)
            head = line.receive()
            if "error" not in head:
                line.fill(room(int(head["nbytes"])))
        except BaseException:
            line.close()
            raise
        if not self._keeps:
            line.close()
            return head
        with self._lock:
            self._idle.append(line)
        return head
