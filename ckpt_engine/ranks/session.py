"""One start of all ranks: what they agree on once, and the ids that follow from it without asking again.

Which ranks see one and the same root: rank 0 leaves a beacon there, and a rank that sees it is in its place.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt_engine.config import Config
from ckpt_engine.copy.job import ErrorRecord, RankConfig
from ckpt_engine.errors import CkptError, ConfigError, WaitTimeoutError
from ckpt_engine.grouping import grouped
from ckpt_engine.ranks.world import PAIR, Ranks, hear, neighbours, say, towards_others
from ckpt_engine.store import names
from ckpt_engine.store.manifest import OWN_KEY, RANKS
from ckpt_engine.store.repository import Repository, encode_record
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Folder
from ckpt_engine.store.storage.disk import translated
from ckpt_engine.store.storage.local import TEMP
from ckpt_engine.undo import on_failure
from ckpt_engine.writer.client import WriterClient

START_SECONDS = 300.0
"""How long other ranks wait for rank 0 to have its writer; longer than waiting for a lease takes."""
LOAD_SECONDS = 3600.0
"""How long they wait for rank 0 to have loaded a snapshot."""
CLOSE_SECONDS = 60.0

T = TypeVar("T")
U = TypeVar("U")


class Session:
    """The ranks' common numbering of snapshots, and who shares a root with whom. Training thread only.

    Args:
        ranks: who takes part.
        root: the nearest tier as this rank sees it, if its machine may have it for itself; None: all ranks see one.
        machines: so many keep each other's newest shares, see `neighbours`; 0: none does.
        mirror_bytes_per_second: at most so fast; None: as fast as the link takes it.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        root: Folder | None = None,
        machines: int = 0,
        mirror_bytes_per_second: float | None = None,
    ) -> None:
        self.ranks = ranks
        self.root = root
        self._machines = machines
        self.replicates = machines > 0
        """Whether a lost machine's shares can be had from others."""
        self._mirror_bytes_per_second = mirror_bytes_per_second
        self._others: dict[str, Any] | None = None
        self.name = ""
        """What the ranks have agreed to call it, once it is open."""
        self._next_seq = 0
        self._reopen_seq: int | None = None
        self._places: Places | None = None
        self._record = ""
        self._address = ""
        self._questions = self._meetings = 0
        self.count = 0
        """Snapshots that were given an id."""

    @property
    def is_open(self) -> bool:
        """Whether the ranks have agreed on their numbering."""
        return bool(self.name)

    @property
    def coordinates(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def places(self, *, make: bool = False) -> Places:
        """The ranks by the root they see. Asked of all ranks at once; the answer is kept.

        Args:
            make: make the root if it is not there. Else, where it is not or cannot be written, each machine counts as a
                place, and the next call looks again.

        Raises:
            StorageError: rank 0 cannot write to what it should make, on every rank: nothing is known of places then.
            WaitTimeoutError, RanksError: rank 0 is not there.
        """
        if self._places is not None:
            return self._places
        root, everybody = self.root, (tuple(range(self.ranks.size)),)
        if root is None or self.ranks.size == 1:
            return everybody
        lit = ExitStack()

        def light() -> str:
            try:
                beacon = Beacon(root, make=make)
            except OSError as err:
                if make:
                    raise translated(err, "leave a file in", root.root) from err
                return ""  # not there, or only to be read: what other machines have of it they lend
            lit.callback(beacon.put_out)
            return beacon.name

        with lit:
            beacon = self.agree(light, START_SECONDS)

            def look() -> list[Any]:
                found = bool(beacon) and sees(root, beacon)
                return [found, self.ranks.node, "" if found else record_in(root)]

            places, record = self.meet(look, _divided)
        found = tuple(tuple(place) for place in places)
        if beacon:
            self._places, self._record = found, record
        return found

    def open(self, start: Callable[[RankConfig], WriterClient]) -> WriterClient:
        """Start this rank's writer. The first time rank 0's starts first, and says from where the numbers go on.

        Where there are several places their leaders' writers are next: they may know higher numbers.

        Raises:
            CkptError: what rank 0 or a leader could not start for, on every rank; or what this rank cannot.
            ConfigError: replication or parity, and the ranks are not on machines that allow it.
        """
        if self.name:
            first = self._next_seq if self._reopen_seq is None else self._reopen_seq
            client = start(self._config(self.name, first))
            if self._others is not None:
                client.meet({**self._others, "moved": True})
            return client
        self.places(make=True)
        if self.replicates:
            self.locate()
        clients: list[WriterClient] = []
        undo = partial(self._undo, clients)
        with on_failure(undo):
            self._open_leaders(start, clients)
        if not clients:
            clients.append(start(self._config(self.name, self._next_seq)))
        if self.replicates:
            with on_failure(undo):
                self._introduce(clients[0])
        return clients[0]

    def _undo(self, clients: Sequence[WriterClient]) -> None:
        """End writers that were started for nothing, as another one could not be: the next call begins once more."""
        for client in clients:
            client.close(CLOSE_SECONDS)
        self.name = ""

    def locate(self) -> str:
        """Where other machines reach this one: the one interface at which anything may listen for them.

        Asked of all ranks at once; the answer is kept.

        Raises:
            WaitTimeoutError, RanksError: rank 0 does not answer.
        """
        if not self._address:
            ranks = self.ranks
            mine = [ranks.node, ranks.address]
            said = self.meet(lambda: mine, list)
            self._address = towards_others(mine[1], [str(one[1]) for one in said if one and one[0] != ranks.node])
        return self._address

    def _introduce(self, client: WriterClient) -> None:
        """Tell the writer where the others are."""
        ranks = self.ranks
        mine: list[Any] = [ranks.node, self._address, client.started.port]
        said = self.meet(lambda: mine, list)
        nodes = [str(one[0]) if one is not None else "" for one in said]
        near = neighbours(ranks.rank, nodes, self._machines)
        addresses = [[str(one[1]), int(one[2])] if one is not None else ["", 0] for one in said]
        self._others = {"addresses": addresses, **asdict(near), "moved": False}
        client.meet(self._others)

    def _open_leaders(self, start: Callable[[RankConfig], WriterClient], clients: list[WriterClient]) -> None:
        """Rank 0's writer, then those of the other places' leaders: from where the numbers of all places go on.

        Args:
            clients: takes the writer of this rank, if it leads.
        """

        def begin() -> dict[str, Any]:
            session = os.urandom(16).hex()
            if self.root is not None and self._record and record_in(self.root):
                self._record = ""  # it has its own, and the others have to fit to it
            clients.append(start(self._config(session, None)))
            record = self.root.get(names.RECORD).decode() if self.divided and self.root is not None else ""
            return {"session": session, "first_seq": clients[0].started.first_seq, "record": record}

        def follow() -> dict[str, Any]:
            if not self.led_places:
                return {}
            if not clients:
                clients.append(start(self._config(self.name, None)))
            return {"first_seq": clients[0].started.first_seq}

        agreed = self.agree(begin, START_SECONDS)
        self.name, self._next_seq, self._record = agreed["session"], agreed["first_seq"], agreed["record"]
        if self.divided:
            self._next_seq = self.meet(follow, self._first_seq)

    def _first_seq(self, said: list[dict[str, Any] | None]) -> int:
        """The lowest number that is free in all places."""
        for place in self._places or ():
            if said[place[0]] is None:
                raise WaitTimeoutError(f"the writer of rank {place[0]} has not started in time")
        return max(int(one["first_seq"]) for one in said if one)

    def number(self, step: int, parent: str | None) -> str:
        """The id of the next snapshot; the same on every rank.

        Args:
            step: of training.
            parent: the snapshot that this run resumed from: numbers are higher than its.
        """
        self._next_seq = max(self._next_seq, names.seq_of(parent) + 1)
        snapshot = names.session_id(self.name, self._next_seq, step)
        self._next_seq += 1
        self.count += 1
        return snapshot

    def reopens(self, taking: bool) -> None:
        """A writer is about to start, perhaps in the background: what other ranks write from now on is not let go.

        Args:
            taking: the newest number is that of a snapshot which this rank is about to take.
        """
        self._reopen_seq = self._next_seq - 1 if taking else self._next_seq

    def agree(self, make: Callable[[], T], timeout: float, whose: str = "on rank 0: ") -> T:
        """What `make` returns on rank 0, a JSON value. Others wait at most `timeout` seconds for it.

        Args:
            whose: comes before the text of an error.

        Raises:
            CkptError: what `make` has raised there, on every rank. What is none of ours is a `WriterError` on others.
            WaitTimeoutError: rank 0 does not answer.
        """
        self._questions += 1
        key = f"agreed/{self._questions}"
        store = self.ranks.store
        if not self.coordinates:
            answer = hear(store, key, timeout)
            if "error" in answer:
                raise ErrorRecord(**answer["error"]).exception()
            return cast("T", answer["value"])
        try:
            value = make()
            say(store, key, {"value": value})
        except Exception as err:
            record = ErrorRecord.of(err)
            error = {"code": record.code, "message": f"{whose}{record.message}", "hint": record.hint}
            try:
                say(store, key, {"error": error})
            except CkptError as unheard:
                err.add_note(f"the other ranks do not know of this error: {unheard}")
            raise
        return value

    def meet(self, make: Callable[[], T], combine: Callable[[list[T | None]], U], timeout: float = START_SECONDS) -> U:
        """What `combine` makes on rank 0 of what `make` returns on each rank, JSON values; the same on every rank.

        Waits for the slowest rank. One that does not come within `timeout` seconds counts as None.

        Raises:
            CkptError: what `make` has raised on some rank, or `combine`, on every rank; it names the rank. A rank whose
                own `make` has raised raises that.
            WaitTimeoutError: rank 0 does not answer.
        """
        self._meetings += 1
        key, store = f"met/{self._meetings}", self.ranks.store
        failure: Exception | None = None
        try:
            mine: dict[str, Any] = {"value": make()}
        except Exception as err:  # noqa: BLE001 - no rank may wait for this one in vain; raised below
            failure, mine = err, {"error": asdict(ErrorRecord.of(err))}
        if not self.coordinates:
            say(store, f"{key}/{self.ranks.rank}", mine)

        def listen() -> U:
            deadline = time.monotonic() + timeout
            said: list[T | None] = [_value(0, mine)]
            for rank in range(1, self.ranks.size):
                try:
                    one = hear(store, f"{key}/{rank}", max(0.1, deadline - time.monotonic()))
                except WaitTimeoutError:
                    said.append(None)
                else:
                    said.append(_value(rank, one))
            return combine(said)

        try:
            return self.agree(listen, 2 * timeout, "")
        except CkptError as err:
            if failure is not None:
                raise failure from err
            raise

    def arranged(self, components: dict[str, Any]) -> dict[str, Any]:
        """A state's components with this rank's own ones where a manifest has them.

        Raises:
            ConfigError: the state has a component of that name.
        """
        if RANKS in components:
            raise ConfigError(
                f"a state of several ranks cannot have a component {RANKS!r}", hint="give it another name"
            )
        own = {key: value for key, value in components.items() if key == OWN_KEY or key in self.ranks.own}
        shared = {key: value for key, value in components.items() if key not in own}
        return {**shared, RANKS: {str(self.ranks.rank): own}}

    def _config(self, session: str, first_seq: int | None) -> RankConfig:
        places = self._places if self._places is not None and self.divided else ()
        return RankConfig(
            self.ranks.rank,
            self.ranks.size,
            session,
            first_seq,
            self.ranks.wait_seconds,
            self.ranks.node,
            self.replicates,
            self._mirror_bytes_per_second,
            next((place for place in places if self.ranks.rank in place), ()),
            places,
            self._record if places else "",
            self._address,
        )

    @property
    def led_places(self) -> int:
        """Once it is open, on a rank that leads one of several places: how many there are; else 0."""
        places = self._places if self.divided else None
        return len(places) if places and any(place[0] == self.ranks.rank for place in places) else 0

    @property
    def divided(self) -> bool:
        """Whether there are several places, as far as `places` has said."""
        return self._places is not None and len(self._places) > 1


def _value(rank: int, said: dict[str, Any]) -> Any:
    """What a rank's `make` has returned; raises what it has raised."""
    if "error" in said:
        error = ErrorRecord(**said["error"])
        raise ErrorRecord(error.code, f"on rank {rank}: {error.message}", error.hint).exception()
    return said["value"]


def _divided(said: list[list[Any] | None]) -> tuple[Places, str]:
    """The places, and the record of the run that some other place than rank 0's has."""
    known = [None if one is None else Sight(*one) for one in said]
    return divide(known), next((one.record for one in known if one is not None and one.record), "")


def session_of(ranks: Ranks | None, config: Config) -> Session | None:
    """The session of a run with these options; None: there is one process.

    Raises:
        ConfigError: replication or parity, in one process.
    """
    memory = config.memory
    replicate = memory.replicate if memory is not None else None
    machines = 0 if memory is None else PAIR if replicate is not None else cast("int", memory.parity or 0)
    if ranks is not None and ranks.size > 1:
        limit = memory.bandwidth if memory is not None else None
        nearest = config.tiers[0]
        root = open_storage(nearest.url, nearest.for_storage()).capabilities.locks if nearest.is_folder else None
        return Session(ranks, root=root, machines=machines, mirror_bytes_per_second=limit)
    if machines:
        what = "parity" if replicate is None else "replicate"
        raise ConfigError(f"{what} needs several ranks on several machines", hint="remove it from the memory tier")
    return None


Places = tuple[tuple[int, ...], ...]
"""The ranks by the root they see, in the order of their lowest ranks: rank 0 is in the first one."""

LOOKS_SECONDS = (0.0, 0.1, 0.3)
"""Pauses before each look for the beacon: some mounts show new files a moment late."""


class Beacon:
    """A file in the root that no process can have looked for before: network file systems remember what was missing.

    It takes the form of an interrupted put, so that it is no object, and is swept if its process dies.

    Args:
        root: a folder.
        make: make the folder if it is not there.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, root: Folder, *, make: bool) -> None:
        if make:
            root.make_folder(root.root)
        self.name = f"{TEMP}{os.urandom(8).hex()}-beacon"
        self._path = f"{root.root}/{self.name}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without locks a sweep could take it away: then the nodes count as places of their own
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def put_out(self) -> None:
        """Remove it."""
        with suppress(OSError):  # the next sweep does
            Path(self._path).unlink()
        os.close(self._fd)


def sees(root: Folder, beacon: str) -> bool:
    """Whether the beacon of this name is in `root`."""
    for pause in LOOKS_SECONDS:
        threading.Event().wait(pause)
        with suppress(CkptError):
            next(iter(root.list("")), None)  # has an NFS client ask for folders that it believes to be missing
        with suppress(OSError):
            if Path(root.root, beacon).exists():
                return True
    return False


def record_in(root: Folder) -> str:
    """The record of the run that has snapshots in `root`; empty: there is none that can be read."""
    try:
        repository = Repository(root)
        record = repository.record() if repository.ids() else None
        return encode_record(record).decode() if record is not None else ""
    except CkptError:
        return ""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a rank says of its root.

    Args:
        sees: the beacon is there.
        node: name of its machine.
        record: of the run there, if it is not rank 0's root.
    """

    sees: bool
    node: str
    record: str = ""


def divide(said: Sequence[Sight | None]) -> Places:
    """The places: ranks that see the beacon, and of those that do not the ranks of each machine.

    Args:
        said: by rank; None: it has said nothing, and counts to rank 0's place.
    """
    first = said[0]
    assert first is not None
    known = [one or first for one in said]
    by_place = grouped(((one.sees, "" if one.sees else one.node), rank) for rank, one in enumerate(known))
    return tuple(map(tuple, by_place.values()))
