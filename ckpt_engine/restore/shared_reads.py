"""Lets the ranks of a node read once what is far away.

They meet before they load, and each byte is requested by one of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.data.walk import leaves
from ckpt_engine.errors import CkptError, WaitTimeoutError
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.restore.ask_tiers import FindPlaces
from ckpt_engine.restore.node_storage import NodeStorage
from ckpt_engine.restore.shared_blocks import (
    SHARED_MEMORY,
    open_shared,
    remove_shared,
)
from ckpt_engine.state.sharding import is_sharded
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage

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
        members = _members(session, node, timeout)
    finally:
        if made:
            remove_shared(name)  # all who are members have it open by now
        if fd >= 0 and len(members) < 2:
            os.close(fd)
    return Seat(fd, members.index(session.ranks.rank), len(members)) if len(members) > 1 else None


def _members(session: Session, node: str, timeout: float) -> list[int]:
    """The ranks of this node; none if this one is not among them."""

    def by_node(said: list[str | None]) -> dict[str, list[int]]:
        return {where: [rank for rank, one in enumerate(said) if one == where] for where in said if where}

    try:
        members = session.meet(lambda: node, by_node, timeout).get(node, [])
    except WaitTimeoutError:
        return []
    return members if session.ranks.rank in members else []


@contextmanager
def read_once(session: Session, where: FindPlaces, into: Any, *, alike: bool = True) -> Iterator[FindPlaces]:
    """Inside, while ranks load together: finds the places of the run, those far away read once per node.

    The state must be the same on all ranks: where each needs a part of its own there is nothing to share.

    Args:
        where: the places as one rank alone would read them.
        into: as given to `load`.
        alike: False: each rank needs a part of its own, whatever `into` is.

    Raises:
        WaitTimeoutError, RanksError: as `meet`.
    """
    wanted = alike and not any(map(is_sharded, leaves(into)))
    try:
        has_far = any(_is_far(place.storage) for place in where())
    except CkptError:
        has_far, wanted = True, False  # loading will say what is wrong; the others must not wait for this rank
    seat = meet(session, wanted=wanted) if has_far else None
    shared: dict[str, NodeStorage] = {}
    try:
        yield lambda: [_shared(place, seat, shared) for place in where()]
    finally:
        idle = [storage.stop() for storage in shared.values()]
        if seat is not None and all(idle):
            os.close(seat.fd)  # a request that hangs would write into whatever gets this number next


def _shared(place: Repository, seat: Seat | None, shared: dict[str, NodeStorage]) -> Repository:
    """A place as the ranks of this node read it together. `shared`: by URL, grows."""
    if seat is None or not _is_far(place.storage):
        return place
    url, nodes = place.storage.url, place.storage.capabilities.nodes
    if url not in shared:
        shared[url] = NodeStorage(place.storage if nodes is None else nodes.far, seat.fd, seat.index, seat.count)
    if nodes is None:
        return Repository(shared[url])
    nodes.far = shared[url]
    return place


def _is_far(storage: Storage) -> bool:
    return not storage.capabilities.cheap_reads
