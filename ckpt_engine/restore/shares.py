"""Several ranks restore from memory: the shares that the writers of dead ranks hold are one snapshot, the nearest one.

What is on the same machine is mapped; with replication what is on others is fetched from there. All ranks attach to the
same snapshot, or none does, and nobody goes on before all have: the next writers end those that serve it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.persist import control, parts
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.peer import connect, memory_file
from ckpt_engine.persist.pulse import Beat
from ckpt_engine.persist.wire import Received
from ckpt_engine.ranks.session import Session
from ckpt_engine.restore.memory import MemoryPlace, MemoryStorage, SharedFile, beat_of, shared_file
from ckpt_engine.snapshot import headroom
from ckpt_engine.store import layout, manifest_codec


@dataclass(frozen=True, slots=True)
class Source:
    """A writer that a rank has found on its machine.

    Args:
        writer: whose writer it was.
        shares: the snapshots of which it has a share, by rank.
        host, port, secret: where it serves other machines; port 0: it does not.
    """

    writer: int
    shares: Mapping[str, Sequence[str]]
    host: str = ""
    port: int = 0
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks attach to.

    Args:
        snapshot: its id.
        remote: for each rank's share, where it is to be had over the network, if it is.
    """

    snapshot: str
    remote: Mapping[str, Source] = field(default_factory=dict)


def attach(session: Session, root_url: str, timeout: float) -> tuple[MemoryPlace | None, bool]:
    """The newest snapshot whose shares of all ranks are in memory. On all ranks, in the same order.

    Args:
        timeout: seconds to wait for the writers; they answer at once, but for the digests of the snapshot.

    Returns:
        The place, which MUST be released; None, on all ranks: one of them cannot get at all shares, or there are none.
        And, alike on all ranks, whether writers of dead trainers hold shares: they are about to make them durable.

    Raises:
        WaitTimeoutError, RanksError: the other ranks do not answer.
    """
    ranks, deadline = session.ranks, time.monotonic() + timeout
    found: list[Source] = []

    def look() -> dict[str, Any]:
        address = ranks.address if session.replicates else ""
        for writer in range(ranks.size):
            source = _source(root_url, writer, ranks.node, address, deadline)
            found.extend([source] if source is not None else [])
        return {"node": ranks.node, "sources": [asdict(source) for source in found]}

    def agree(said: list[dict[str, Any] | None]) -> dict[str, Any]:
        sources = [[Source(**source) for source in one["sources"]] if one is not None else [] for one in said]
        nodes = Counter(one["node"] for one in said if one is not None)
        chosen = plan(ranks.size, sources)
        return {
            "plan": None if chosen is None else asdict(chosen),
            "held": bool(_snapshots(sources)),
            "beside": max(nodes.values()),
        }

    said = session.meet(look, agree)
    agreed, held = said["plan"], said["held"]
    if agreed is None:
        return None, held
    remote = {rank: Source(**source) for rank, source in agreed["remote"].items()}
    wanted = Plan(agreed["snapshot"], remote)
    place = _assemble(root_url, wanted, found, ranks.size, deadline, said["beside"])
    if not session.meet(lambda: place is not None, all):
        if place is not None:
            place.release(bye=False)
        return None, held
    return place, held


def plan(size: int, found: Sequence[Sequence[Source]]) -> Plan | None:
    """The newest snapshot of which every rank gets all shares: from its own machine, or from one that serves others.

    Args:
        found: what each rank has found on its machine.
    """
    served: dict[str, dict[str, Source]] = {}
    for source in (source for one in found for source in one if source.port):
        for rank, snapshots in source.shares.items():
            for snapshot in snapshots:
                served.setdefault(snapshot, {}).setdefault(rank, source)
    known = [parsed for one in _snapshots(found) if (parsed := layout.parse_id(one)) is not None]
    for parsed in sorted(known, key=lambda parsed: parsed.seq, reverse=True):
        remote = served.get(parsed.id, {})
        local = [{rank for source in one for rank, ids in source.shares.items() if parsed.id in ids} for one in found]
        if all(str(rank) in remote or str(rank) in here for here in local for rank in range(size)):
            return Plan(parsed.id, remote)
    return None


def _snapshots(found: Sequence[Sequence[Source]]) -> set[str]:
    return {one for sources in found for source in sources for ids in source.shares.values() for one in ids}


def _source(root_url: str, writer: int, node: str, address: str, deadline: float) -> Source | None:
    reply = _ask(root_url, {"what": control.HELD}, writer, deadline)
    if reply is None or reply.body.get("node") != node:
        return None
    try:
        body = reply.body
        shares = {str(writer): [str(one) for one in body["held"]]}
        shares |= {str(rank): list(ids) for rank, ids in body.get("guests", {}).items()}
        port = int(body.get("port", 0)) if address else 0
        return Source(writer, shares, address, port, str(body.get("secret", "")) if port else "")
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _ask(root_url: str, request: dict[str, Any], writer: int, deadline: float) -> Received | None:
    try:
        return control.ask(root_url, request, max(0.1, deadline - time.monotonic()), writer)
    except (CkptError, OSError):
        return None


def _assemble(
    root_url: str, wanted: Plan, here: Sequence[Source], size: int, deadline: float, beside: int
) -> MemoryPlace | None:
    replies: list[Received] = []
    try:
        for rank in range(size):
            request = {"what": control.SNAPSHOT, "snapshot": wanted.snapshot, "rank": rank}
            local = next((one for one in here if wanted.snapshot in one.shares.get(str(rank), ())), None)
            reply = _ask(root_url, request, local.writer, deadline) if local is not None else None
            if reply is None:
                reply = _fetch(wanted.remote[str(rank)], rank, wanted.snapshot, beside, deadline)
            replies.append(reply)
        manifest = parts.merge(
            [parts.decode(str(one.body["manifest"]).encode(), "a share in memory") for one in replies]
        )
        beats: list[Beat] = [beat for one in replies if (beat := beat_of(one)) is not None]
        texts = {
            layout.RECORD: str(replies[0].body["record"]).encode(),
            layout.manifest_name(wanted.snapshot): manifest_codec.encode(manifest),
        }
        files: list[SharedFile] = [shared_file(reply) for reply in replies]
        storage = MemoryStorage(texts, files, max(beats, key=lambda beat: beat.step, default=None))
        return MemoryPlace(root_url, wanted.snapshot, manifest.info.step, storage, size)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CkptError):
        for reply in replies:
            for fd in reply.fds:
                os.close(fd)
        return None


def _fetch(source: Source, rank: int, snapshot: str, beside: int, deadline: float) -> Received:
    """A share from another machine, in memory of this process. Whoever reads it compares its digests.

    Args:
        beside: ranks of this machine that fetch the same at the same time.

    Raises:
        OSError, CkptError, LookupError: it is not to be had.
    """
    line = connect(source.host, source.port, source.secret)
    try:
        line.send({"what": "give", "rank": rank, "snapshot": snapshot})
        body = line.receive()
        nbytes = int(body["nbytes"])
        room = headroom.look()
        if room is not None and nbytes * beside > room.nbytes // 2:
            raise WriterError(f"too little memory for a share of another machine: {nbytes} bytes for each rank here")
        if time.monotonic() > deadline:
            raise WaitTimeoutError("the shares of other machines do not come in time")
        fd = memory_file(nbytes)
        try:
            line.fill(memoryview(map_shared(fd, max(1, nbytes), writable=True)).cast("B")[:nbytes])
        except BaseException:
            os.close(fd)
            raise
        return Received(body, (fd,))
    finally:
        line.close()
