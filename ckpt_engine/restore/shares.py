"""Several ranks restore from memory: the shares that the writers of dead ranks hold are one snapshot, the nearest one.

What is on the same machine is mapped; with replication or parity what is on others is fetched from there, and what a
lost machine had is a copy there, or made from parity. All ranks attach to the same snapshot, or none does, and nobody
goes on before all have: the next writers end those that serve it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.persist import control, parts
from ckpt_engine.persist.peer import connect
from ckpt_engine.persist.pulse import Beat
from ckpt_engine.persist.wire import Received
from ckpt_engine.ranks.session import Session
from ckpt_engine.restore.lost_share import rebuild
from ckpt_engine.restore.memory import (
    MemoryPlace,
    MemoryStorage,
    SharedFile,
    answers,
    beat_of,
    own_memory,
    shared_file,
)
from ckpt_engine.restore.share_plan import Plan, Source, lacking, plan
from ckpt_engine.store import layout, manifest_codec


def attach(
    session: Session, root_url: str, timeout: float, emit: Callable[[Event], object]
) -> tuple[MemoryPlace | None, bool]:
    """The newest snapshot whose shares of all ranks are in memory. On all ranks, in the same order.

    Args:
        timeout: seconds to wait for the writers; they answer at once, but for the digests of the snapshot.
        emit: told on rank 0 why what should be in memory, on whichever machines, cannot be had.

    Returns:
        The place, which MUST be released; None, on all ranks: one of them cannot get at all shares, or there are none.
        And, alike on all ranks, whether writers of dead trainers hold shares: they are about to make them durable.

    Raises:
        WaitTimeoutError, RanksError: the other ranks do not answer.
    """
    ranks, deadline = session.ranks, time.monotonic() + timeout
    found: list[Source] = []

    def look() -> dict[str, Any]:
        for writer in range(ranks.size):
            source = _source(root_url, writer, ranks.node, session.replicates, deadline)
            found.extend([source] if source is not None else [])
        return {"node": ranks.node, "sources": [asdict(source) for source in found]}

    def agree(said: list[dict[str, Any] | None]) -> dict[str, Any]:
        sources = [[Source(**source) for source in one["sources"]] if one is not None else [] for one in said]
        nodes = Counter(one["node"] for one in said if one is not None)
        chosen = plan(ranks.size, sources)
        return {
            "plan": None if chosen is None else asdict(chosen),
            "lacking": None if chosen is not None else lacking(ranks.size, sources),
            "beside": max(nodes.values()),
        }

    def warn(why: str) -> None:
        if session.replicates and session.coordinates:
            emit(Notice("WARNING", f"{why}; what is durable is resumed from"))

    said = session.meet(look, agree)
    if said["plan"] is None:
        if said["lacking"] is None:
            return None, False
        snapshot, lost = said["lacking"]
        warn(f"the shares of ranks {', '.join(map(str, lost))} of {snapshot} are in nobody's memory any more")
        return None, True
    wanted = Plan.from_json(said["plan"])
    place, why = _assembled(root_url, wanted, found, ranks.size, deadline, said["beside"])

    def judge(all_said: list[str | None]) -> str:
        return next((f"rank {rank}: {one or 'no answer'}" for rank, one in enumerate(all_said) if one != ""), "")

    if failed := session.meet(lambda: why, judge):
        warn(f"{wanted.snapshot} is in memory and cannot be had from there: {failed}")
        if place is not None:
            place.release(bye=False)
        return None, True
    return place, True


def _source(root_url: str, writer: int, node: str, serves: bool, deadline: float) -> Source | None:
    try:
        if not answers(root_url, writer):
            return None
    except WaitTimeoutError:
        return None
    reply = _ask(root_url, {"what": control.HELD}, writer, deadline)
    if reply is None or reply.body.get("node") != node:
        return None
    try:
        body = reply.body
        shares = {str(writer): [str(one) for one in body["held"]]}
        shares |= {str(rank): list(ids) for rank, ids in body.get("guests", {}).items()}
        host, port = (str(body.get("host", "")), int(body.get("port", 0))) if serves else ("", 0)
        group = [int(rank) for rank in body.get("group", ())]
        parity = [str(one) for one in body.get("parity", ())]
        return Source(writer, shares, host, port, str(body.get("secret", "")) if port else "", group, parity)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _ask(root_url: str, request: dict[str, Any], writer: int, deadline: float) -> Received | None:
    try:
        return control.ask(root_url, request, max(0.1, deadline - time.monotonic()), writer)
    except (CkptError, OSError):
        return None


def _assembled(
    root_url: str, wanted: Plan, here: Sequence[Source], size: int, deadline: float, beside: int
) -> tuple[MemoryPlace | None, str]:
    """All shares as one place; or None, and why."""
    shares: dict[int, Received] = {}
    try:
        _gather(shares, root_url, wanted, here, size, deadline, beside)
        return _place(root_url, wanted.snapshot, [shares[rank] for rank in range(size)]), ""
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CkptError) as err:
        for reply in shares.values():
            for fd in reply.fds:
                os.close(fd)
        return None, str(err) or type(err).__name__


def _gather(
    shares: dict[int, Received],
    root_url: str,
    wanted: Plan,
    here: Sequence[Source],
    size: int,
    deadline: float,
    beside: int,
) -> None:
    """Put the shares of all ranks into `shares`; whoever calls owns what is in there, also if this raises."""

    def parity_of(keeper: int) -> Received:
        request = {"what": control.PARITY, "snapshot": wanted.snapshot}
        local = any(one.writer == keeper and wanted.snapshot in one.parity for one in here)
        reply = _ask(root_url, request, keeper, deadline) if local else None
        return reply or _fetch(wanted.parity[str(keeper)], {**request, "what": "parity"}, beside, deadline)

    def share_of(rank: int) -> Received:
        request = {"what": control.SNAPSHOT, "snapshot": wanted.snapshot, "rank": rank}
        local = next((one for one in here if wanted.snapshot in one.shares.get(str(rank), ())), None)
        reply = _ask(root_url, request, local.writer, deadline) if local is not None else None
        return reply or _fetch(wanted.remote[str(rank)], {**request, "what": "give"}, beside, deadline)

    for rank in range(size):
        if str(rank) not in wanted.lost:
            shares[rank] = share_of(rank)
    for lost, group in wanted.lost.items():
        shares[int(lost)] = rebuild(int(lost), group, shares, parity_of, beside)


def _place(root_url: str, snapshot: str, replies: Sequence[Received]) -> MemoryPlace:
    """The shares of all ranks, which it owns from now on unless it raises, as one snapshot."""
    manifest = parts.merge([parts.decode(str(one.body["manifest"]).encode(), "a share in memory") for one in replies])
    beats: list[Beat] = [beat for one in replies if (beat := beat_of(one)) is not None]
    texts = {
        layout.RECORD: str(replies[0].body["record"]).encode(),
        layout.manifest_name(snapshot): manifest_codec.encode(manifest),
    }
    files: list[SharedFile] = [shared_file(reply) for reply in replies]
    storage = MemoryStorage(texts, files, max(beats, key=lambda beat: beat.step, default=None))
    return MemoryPlace(root_url, snapshot, manifest.info.step, storage, len(replies))


def _fetch(source: Source, request: dict[str, Any], beside: int, deadline: float) -> Received:
    """A share or parity from another machine, in memory of this process. Whoever reads it compares its digests.

    Args:
        beside: ranks of this machine that fetch the same at the same time.

    Raises:
        OSError, CkptError, LookupError: it is not to be had.
    """
    line = connect(source.host, source.port, source.secret)
    try:
        line.send(request)
        body = line.receive()
        if "nbytes" not in body:
            raise WriterError(f"rank {source.writer} at {source.host}:{source.port}: {body.get('why')}")
        if time.monotonic() > deadline:
            raise WaitTimeoutError("the shares of other machines do not come in time")
        fd, image = own_memory(int(body["nbytes"]), beside)
        try:
            line.fill(image)
        except BaseException:
            os.close(fd)
            raise
        return Received(body, (fd,))
    finally:
        line.close()
