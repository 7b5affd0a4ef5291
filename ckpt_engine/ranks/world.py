"""What the engine has to know of the other ranks: how many there are, what is the same on all, and where to meet.

Values of any size in the ranks' store, under one name: what is too large for one entry is cut into pieces.

By which address of this machine others reach it: that of the interface through which it reaches them.

Which ranks keep what of each other's shares in memory, so that a lost machine's shares are on others.

How long ranks wait for each other because of snapshots.
"""

from __future__ import annotations

import ipaddress
import json
import math
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ckpt_engine.errors import ConfigError, RanksError
from ckpt_engine.grouping import grouped
from ckpt_engine.store.container import digest

_BLOCKED = "blocked"
_ASKED = 15
"""Other ranks at most that rank 0 asks how long they were blocked, spread over all of them."""
PIECE_BYTES = 4 << 20
"""The server of torch's `TCPStore` hangs up on a client that sets more than 8 MiB at once."""
_ANY_PORT = 9
_LOOPBACK = "127.0.0.1"
PAIR = 2
"""Machines that keep a share: its own and its partner's. With two, parity is a copy."""


class Store(Protocol):
    """Small texts by key that all ranks see. Every call is short; nothing here is a collective. Thread safe."""

    def set(self, key: str, value: str) -> None:
        """Write, or write again.

        Raises:
            RanksError: the store is gone.
        """

    def get(self, key: str) -> str | None:
        """What is there now, or None. Raises as `set`."""

    def wait(self, key: str, timeout: float) -> str:
        """What is there, waiting at most `timeout` seconds for it.

        Raises:
            WaitTimeoutError: no rank has written it.
            RanksError: as `set`.
        """

    def add(self, key: str) -> int:
        """Count up by one, from 0; what it is now. `get` gives it as text. Raises as `set`."""

    def remove(self, key: str) -> None:
        """Let go of a key. Raises as `set`."""


class Ranks(Protocol):
    """One of several processes that train together, each with its own `Checkpointer` for the same place.

    Every rank makes its checkpointers, and calls their `start`, `prepare`, `load`, `choose` and durable `save`, in the
    same order.

    Attributes:
        rank, size: of `size` ranks, from 0; rank 0 is the coordinator.
        own: components of the state that differ between ranks: each rank saves its own and gets it back.
        wait_seconds: how long the coordinator waits for the part of a rank.
    """

    rank: int
    size: int
    own: frozenset[str]
    wait_seconds: float

    @property
    def store(self) -> Store:
        """Where they meet."""

    @property
    def node(self) -> str:
        """Name of this rank's machine."""

    @property
    def address(self) -> str:
        """Where other machines reach this one."""

    def divides(self, path: tuple[Any, ...]) -> bool:
        """Whether the array at `path` is bit for bit the same on all ranks; if not, that of rank 0 counts."""


class Waits:
    """How long ranks wait for those that a snapshot blocks longest: the next all-reduce is as late as the latest rank.

    Each rank says at a boundary how long it was blocked so far; rank 0 looks when it decides on the next snapshot.

    Args:
        blocked: seconds that this rank was, by stalls and fences, since its process started.
    """

    def __init__(self, ranks: Ranks, blocked: Callable[[], float]) -> None:
        self._ranks, self._blocked = ranks, blocked
        others = range(1, ranks.size)
        self._asked = others[:: max(1, math.ceil(len(others) / _ASKED))]
        self._before = [0.0] * (1 + len(self._asked))
        self._said = 0.0
        self.seconds = 0.0
        """Of an average rank."""

    def say(self) -> None:
        """On all ranks but the first, after each boundary: nothing is sent where nothing was blocked since."""
        if (now := self._blocked()) != self._said:
            self._said = now
            self._ranks.store.set(f"{_BLOCKED}/{self._ranks.rank}", str(now))

    def look(self) -> None:
        """On rank 0."""
        said = (self._ranks.store.get(f"{_BLOCKED}/{rank}") for rank in self._asked)
        now = [self._blocked(), *(float(one or 0.0) for one in said)]
        since = [seconds - before for seconds, before in zip(now, self._before, strict=True)]
        self._before = now
        self.seconds += max(since) - statistics.fmean(since)


def say(store: Store, key: str, answer: dict[str, Any]) -> None:
    """Set `key` to a JSON value, for `hear`.

    Args:
        answer: without an entry `pieces`.

    Raises:
        RanksError: the store does not take it.
    """
    text = json.dumps(answer)  # ASCII: as many bytes as characters
    if len(text) > PIECE_BYTES:
        pieces = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            store.set(f"{key}/piece/{number}", piece)
        text = json.dumps({"pieces": len(pieces), "digest": digest(memoryview(text.encode()))})
    store.set(key, text)


def hear(store: Store, key: str, timeout: float) -> dict[str, Any]:
    """What `say` has set or will set within `timeout` seconds.

    Raises:
        WaitTimeoutError: no rank has said it.
        RanksError: the store does not answer, or what it has is not what was said.
    """
    found: dict[str, Any] = json.loads(store.wait(key, timeout))
    if "pieces" not in found:
        return found
    text = "".join(store.wait(f"{key}/piece/{number}", timeout) for number in range(found["pieces"]))
    if digest(memoryview(text.encode())) != found["digest"]:
        raise RanksError(
            f"the {found['pieces']} pieces of {key} in the ranks' store are not what was put there",
            hint="every rank must make its checkpointers and call load and save in the same order",
        )
    return cast("dict[str, Any]", json.loads(text))


def towards(host: str) -> str | None:
    """The address of this machine in what it would send to `host`; None: it cannot send there. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, _ANY_PORT))
            return str(sock.getsockname()[0])
        except OSError:
            return None


def towards_others(mine: str, others: Sequence[str]) -> str:
    """Where this machine listens for the others.

    Args:
        mine: its address, or its name where that is all that it knows; a name may mean the loopback interface here.
        others: addresses or names of other machines.
    """
    if _is_address(mine):
        return mine
    for other in sorted(others, key=_is_address, reverse=True):
        found = towards(other)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return found
    return _LOOPBACK if towards(mine) is None else mine


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks that one rank's writer has to do with.

    Args:
        keepers: who keeps its shares: its partner; or the other members of its parity group, as they follow it there.
        senders: whose shares it keeps, in the same order.
    """

    keepers: tuple[int, ...]
    senders: tuple[int, ...]


def neighbours(rank: int, nodes: Sequence[str], machines: int) -> Neighbours:
    """Who keeps what.

    Args:
        nodes: name of each rank's machine.
        machines: of a parity group; `PAIR`: each rank has one partner.

    Raises:
        ConfigError: the ranks are not on such machines; says how many are where.
    """
    if machines > PAIR:
        group = group_of(rank, nodes, machines)
        if group is None:
            raise ConfigError(
                f"parity: {machines} needs equally many ranks on each machine, in groups of {machines} machines; "
                f"{_census(nodes)}",
                hint="give a number of machines that divides theirs, or remove it",
            )
        at = group.index(rank)
        others = group[at + 1 :] + group[:at]
        return Neighbours(others, others)
    partner = partner_of(rank, nodes)
    if partner is None:
        raise ConfigError(
            f"replicate needs ranks on several machines in equal numbers; {_census(nodes)}",
            hint="remove it, or start the job on more machines",
        )
    senders = tuple(one for one in range(len(nodes)) if partner_of(one, nodes) == rank)
    return Neighbours((partner,), senders)


def partner_of(rank: int, nodes: Sequence[str]) -> int | None:
    """Who keeps the shares of a rank, so that a lost machine's shares are on another one; None: that cannot be.

    Args:
        nodes: name of each rank's machine; ranks of one machine follow each other, as many on each.
    """
    each = nodes.count(nodes[rank])
    partner = (rank + each) % len(nodes)
    equal = all(nodes.count(node) == each for node in nodes)
    return partner if equal and nodes[partner] != nodes[rank] else None


def group_of(rank: int, nodes: Sequence[str], members: int) -> tuple[int, ...] | None:
    """The parity group of a rank: one rank on each of `members` machines; None: the machines cannot be divided so.

    Machines are taken in the order of their first ranks. The first ranks of `members` machines are a group, their
    second ranks are another one, and so on.

    Args:
        nodes: name of each rank's machine.
    """
    machines = grouped((node, one) for one, node in enumerate(nodes))
    listed = list(machines.values())
    if len(listed) % members or len({len(ranks) for ranks in listed}) != 1:
        return None
    machine = list(machines).index(nodes[rank])
    place = machines[nodes[rank]].index(rank)
    first = machine // members * members
    return tuple(ranks[place] for ranks in listed[first : first + members])


def _census(nodes: Sequence[str]) -> str:
    counted = Counter(nodes)
    return f"there are {len(counted)}, with {', '.join(map(str, counted.values()))} ranks ({', '.join(counted)})"
