"""One start of all ranks: what they agree on once, and the ids that follow from it without asking again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckpt_engine.config import Config
from ckpt_engine.errors import CkptError, ConfigError, WaitTimeoutError
from ckpt_engine.persist.client import WriterClient
from ckpt_engine.persist.job import ErrorRecord, RankConfig
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.store import layout
from ckpt_engine.store.manifest import RANKS

START_SECONDS = 300.0
"""How long other ranks wait for rank 0 to have its writer; longer than waiting for a lease takes."""
LOAD_SECONDS = 3600.0
"""How long they wait for rank 0 to have loaded a snapshot."""

T = TypeVar("T")
U = TypeVar("U")


class Session:
    """The ranks' common numbering of snapshots. Training thread only.

    Args:
        ranks: who takes part.
        replicate: each rank's writer keeps its newest shares at a partner on another machine too.
        mirror_bytes_per_second: at most so fast; None: as fast as the link takes it.
    """

    def __init__(self, ranks: Ranks, *, replicate: bool = False, mirror_bytes_per_second: float | None = None) -> None:
        self.ranks = ranks
        self.replicates = replicate
        self._mirror_bytes_per_second = mirror_bytes_per_second
        self._others: dict[str, Any] | None = None
        self._session = ""
        self._next_seq = 0
        self._questions = self._meetings = 0
        self.count = 0
        """Snapshots that were given an id."""

    @property
    def is_open(self) -> bool:
        """Whether the ranks have agreed on their numbering."""
        return bool(self._session)

    @property
    def coordinates(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def open(self, start: Callable[[RankConfig], WriterClient]) -> WriterClient:
        """Start this rank's writer. The first time rank 0's starts first, and says from where the numbers go on.

        Raises:
            CkptError: what rank 0 could not start for, on every rank; or what this rank cannot.
            ConfigError: replication, and all ranks are on one machine.
        """
        if self._session:
            client = start(self._config(self._session, self._next_seq))
            if self._others is not None:
                client.meet({**self._others, "moved": True})
            return client
        client = self._open_first(start)
        if self.replicates:
            self._introduce(client)
        return client

    def _introduce(self, client: WriterClient) -> None:
        """Tell the writer where the others are."""
        ranks = self.ranks
        mine: list[Any] = [ranks.node, ranks.address, client.peer_port]
        said = self.meet(lambda: mine, _as_they_are)
        nodes = [str(one[0]) if one is not None else "" for one in said]
        partner = partner_of(ranks.rank, nodes)
        if partner is None:
            raise ConfigError(
                f"replicate needs ranks on several machines in equal numbers, they are on {sorted(set(nodes))}",
                hint="remove it, or start the job on more machines",
            )
        (guest,) = [rank for rank in range(ranks.size) if partner_of(rank, nodes) == ranks.rank]
        addresses = [[str(one[1]), int(one[2])] if one is not None else ["", 0] for one in said]
        self._others = {"addresses": addresses, "partner": partner, "guest": guest, "moved": False}
        client.meet(self._others)

    def _open_first(self, start: Callable[[RankConfig], WriterClient]) -> WriterClient:
        if self.coordinates:
            clients: list[WriterClient] = []

            def begin() -> dict[str, Any]:
                session = os.urandom(16).hex()
                clients.append(start(self._config(session, None)))
                return {"session": session, "first_seq": clients[0].first_seq}

            self._adopt(self.agree(begin, START_SECONDS))
            return clients[0]
        self._adopt(self.agree(dict, START_SECONDS))
        return start(self._config(self._session, self._next_seq))

    def number(self, step: int, parent: str | None) -> str:
        """The id of the next snapshot; the same on every rank.

        Args:
            step: of training.
            parent: the snapshot that this run resumed from: numbers are higher than its.
        """
        before = layout.parse_id(parent) if parent is not None else None
        if before is not None:
            self._next_seq = max(self._next_seq, before.seq + 1)
        snapshot = layout.session_id(self._session, self._next_seq, step)
        self._next_seq += 1
        self.count += 1
        return snapshot

    def agree(self, make: Callable[[], T], timeout: float) -> T:
        """What `make` returns on rank 0, a JSON value. Others wait at most `timeout` seconds for it.

        Raises:
            CkptError: what `make` has raised there, on every rank.
            WaitTimeoutError: rank 0 does not answer.
        """
        self._questions += 1
        key = f"agreed/{self._questions}"
        store = self.ranks.store
        if not self.coordinates:
            answer = json.loads(store.wait(key, timeout))
            if "error" in answer:
                raise ErrorRecord(**answer["error"]).exception()
            found: T = answer["value"]
            return found
        try:
            value = make()
        except CkptError as err:
            record = ErrorRecord.of(err)
            error = {"code": record.code, "message": f"on rank 0: {record.message}", "hint": record.hint}
            store.set(key, json.dumps({"error": error}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value

    def meet(self, make: Callable[[], T], combine: Callable[[list[T | None]], U]) -> U:
        """What `combine` makes on rank 0 of what `make` returns on each rank, JSON values; the same on every rank.

        Only for the start: it waits for the slowest rank. One that does not come counts as None.

        Args:
            make: MUST not raise, so that nobody waits for a rank in vain.

        Raises:
            WaitTimeoutError: rank 0 does not answer.
        """
        self._meetings += 1
        key, store = f"met/{self._meetings}", self.ranks.store
        mine = make()
        if not self.coordinates:
            store.set(f"{key}/{self.ranks.rank}", json.dumps(mine))
            found: U = json.loads(store.wait(key, 2 * START_SECONDS))
            return found
        deadline = time.monotonic() + START_SECONDS
        said: list[T | None] = [mine]
        for rank in range(1, self.ranks.size):
            try:
                said.append(json.loads(store.wait(f"{key}/{rank}", max(0.1, deadline - time.monotonic()))))
            except WaitTimeoutError:
                said.append(None)
        answer = combine(said)
        store.set(key, json.dumps(answer))
        return answer

    def settle(self, mine: Any, judge: Callable[[list[Any]], T], timeout: float) -> T:
        """What `judge` makes on rank 0 of what all ranks say: JSON values by rank. Waits and raises as `agree`."""
        key = f"said/{self._questions + 1}"
        store, size = self.ranks.store, self.ranks.size
        if not self.coordinates:
            store.set(f"{key}/{self.ranks.rank}", json.dumps(mine))

        def hear() -> T:
            return judge([mine, *(json.loads(store.wait(f"{key}/{rank}", timeout)) for rank in range(1, size))])

        return self.agree(hear, timeout)

    def arranged(self, components: dict[str, Any]) -> dict[str, Any]:
        """A state's components with this rank's own ones where a manifest has them.

        Raises:
            ConfigError: the state has a component of that name.
        """
        if RANKS in components:
            raise ConfigError(
                f"a state of several ranks cannot have a component {RANKS!r}", hint="give it another name"
            )
        own = {key: value for key, value in components.items() if key in self.ranks.own}
        shared = {key: value for key, value in components.items() if key not in own}
        return {**shared, RANKS: {str(self.ranks.rank): own}}

    def _adopt(self, agreed: dict[str, Any]) -> None:
        self._session, self._next_seq = agreed["session"], agreed["first_seq"]

    def _config(self, session: str, first_seq: int | None) -> RankConfig:
        return RankConfig(
            self.ranks.rank,
            self.ranks.size,
            session,
            first_seq,
            self.ranks.wait_seconds,
            self.ranks.node,
            self.replicates,
            self._mirror_bytes_per_second,
        )


def partner_of(rank: int, nodes: Sequence[str]) -> int | None:
    """Who keeps the shares of a rank, so that a lost machine's shares are on another one; None: that cannot be.

    Args:
        nodes: name of each rank's machine; ranks of one machine follow each other, as many on each.
    """
    each = nodes.count(nodes[rank])
    partner = (rank + each) % len(nodes)
    equal = all(nodes.count(node) == each for node in nodes)
    return partner if equal and nodes[partner] != nodes[rank] else None


def _as_they_are(said: list[list[Any] | None]) -> list[list[Any] | None]:
    return said


def session_of(ranks: Ranks | None, config: Config) -> Session | None:
    """The session of a run with these options; None: there is one process.

    Raises:
        ConfigError: replication, in one process; or a codec of the nearest tier, with several.
    """
    memory = config.memory
    replicate = memory is not None and memory.replicate is not None
    if ranks is not None and ranks.size > 1:
        if config.tiers[0].codec != "raw":
            raise ConfigError(
                "several ranks write their shares to the nearest tier as they are: remove its codec",
                hint="give the codec to a further tier",
            )
        limit = memory.bandwidth if memory is not None else None
        return Session(ranks, replicate=replicate, mirror_bytes_per_second=limit)
    if replicate:
        raise ConfigError("replicate needs several ranks on several machines", hint="remove it from the memory tier")
    return None
