"""Restores several ranks from the memory of their dead writers, whose shares are one snapshot.

What is on the same machine is mapped; with replication or parity what is on others is fetched from there, and the
share of a lost machine is made from what others keep of it. All ranks attach to the same snapshot, or none does,
and none continues before all have: the next writers end those that serve it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec

from ckpt_engine.errors import (
    CkptError,
    WaitTimeoutError,
    WriterError,
)
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.ranks.session import Session
from ckpt_engine.restore.memory import (
    MemoryStorage,
    answers,
    ask_writer,
    beat_of,
    image_of,
    own_memory,
    shared_file,
)
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.manifest import Partial
from ckpt_engine.undo import on_failure
from ckpt_engine.writer import control, part_records
from ckpt_engine.writer.channel import Received, close_all
from ckpt_engine.writer.parity import restore_chunk
from ckpt_engine.writer.peer_service import PeerShare, connect, verify
from ckpt_engine.writer.pulse import Heartbeat


def attach_together(
    session: Session, root_url: str, timeout: float, emit: Callable[[Event], object]
) -> tuple[MemoryStorage | None, bool]:
    """The newest snapshot whose shares of all ranks are in memory. On all ranks, in the same order.

    Args:
        timeout: seconds to wait for the writers; they answer at once, but for the digests of the snapshot.
        emit: hears on rank 0 why what should be in memory, on whichever machines, cannot be had.

    Returns:
        The place, which MUST be closed; None, on all ranks: one of them cannot get at all shares, or there are none.
        And, alike on all ranks, whether writers of dead trainers hold shares: they are about to make them durable.

    Raises:
        WaitTimeoutError, RanksError: the other ranks do not answer.
    """
    ranks, deadline = session.ranks, time.monotonic() + timeout
    found: list[ShareSource] = []

    def look() -> dict[str, Any]:
        sources = (_source(root_url, writer, ranks.node, session.replicates, deadline) for writer in range(ranks.size))
        found.extend(filter(None, sources))
        return {"node": ranks.node, "sources": [asdict(source) for source in found]}

    def agree(said: list[dict[str, Any] | None]) -> dict[str, Any]:
        sources = [[ShareSource(**source) for source in one["sources"]] if one is not None else [] for one in said]
        nodes = Counter(one["node"] for one in said if one is not None)
        chosen = plan_shares(ranks.size, sources)
        return {"plan": None if chosen is None else asdict(chosen), "beside": max(nodes.values())}

    def warn(why: str) -> None:
        if session.replicates and session.coordinates:
            emit(Notice("WARNING", f"{why}; what is durable is resumed from"))

    said = session.meet(look, agree)
    if said["plan"] is None:
        return None, False
    wanted = msgspec.convert(said["plan"], SharePlan)
    if wanted.missing:
        lost = Partial(tuple(wanted.missing), ranks.size)
        warn(f"{wanted.snapshot}: the shares of {lost} are no longer in any machine's memory")
        return None, True
    place, why = _assembled(root_url, wanted, found, ranks.size, deadline, said["beside"])

    def judge(all_said: list[str | None]) -> str:
        return next((f"rank {rank}: {one or 'no answer'}" for rank, one in enumerate(all_said) if one != ""), "")

    if failed := session.meet(lambda: why, judge):
        warn(f"{wanted.snapshot} is in memory and cannot be read from there: {failed}")
        if place is not None:
            place.close()
        return None, True
    if wanted.lost and session.coordinates:
        lost = Partial(tuple(sorted(map(int, wanted.lost))), ranks.size)
        text = f"{wanted.snapshot}: the shares of {lost} come from the memory of other machines"
        emit(Notice("WARNING", f"{text}; there is no other copy until the next snapshot"))
    return place, True


def _source(root_url: str, writer: int, node: str, serves: bool, deadline: float) -> ShareSource | None:
    try:
        if not answers(root_url, writer):
            return None
    except WaitTimeoutError:
        return None
    reply = ask_writer(root_url, {"what": control.Question.HELD}, writer, deadline - time.monotonic())
    if reply is None or reply.body.get("node") != node:
        return None
    try:
        source = msgspec.convert({**reply.body, "writer": writer}, ShareSource)
    except msgspec.ValidationError:
        return None
    return source if serves else replace(source, host="", port=0, secret="")


def _assembled(
    root_url: str, wanted: SharePlan, here: Sequence[ShareSource], size: int, deadline: float, beside: int
) -> tuple[MemoryStorage | None, str]:
    """All shares as one place; or None, and why."""
    shares: dict[int, Received] = {}
    try:
        _gather(shares, root_url, wanted, here, size, deadline, beside)
        return _joined(wanted.snapshot, [shares[rank] for rank in range(size)]), ""
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CkptError) as err:
        return None, str(err) or type(err).__name__
    finally:
        for reply in shares.values():
            close_all(reply.fds)


def _gather(
    shares: dict[int, Received],
    root_url: str,
    wanted: SharePlan,
    here: Sequence[ShareSource],
    size: int,
    deadline: float,
    beside: int,
) -> None:
    """Put the shares of all ranks into `shares`; the caller owns what is in there, also if this raises."""

    def asked(writer: int, what: str, has_it: bool, elsewhere: Mapping[str, ShareSource]) -> Received:
        request = {"what": what, "snapshot": wanted.snapshot}
        reply = ask_writer(root_url, request, writer, deadline - time.monotonic()) if has_it else None
        return reply or _fetch(elsewhere[str(writer)], request, beside, deadline)

    def parity_of(keeper: int) -> Received:
        return asked(
            keeper,
            control.Question.PARITY,
            keeper in {one.writer for one in here if wanted.snapshot in one.parity},
            wanted.parity,
        )

    local = {one.writer for one in here if wanted.snapshot in one.held}
    for rank in {*range(size)} - {*map(int, wanted.lost)}:
        shares[rank] = asked(rank, control.Question.SNAPSHOT, rank in local, wanted.remote)
    for lost, group in wanted.lost.items():
        shares[int(lost)] = rebuild_share(int(lost), group, shares, parity_of, beside)


def _joined(snapshot: str, replies: Sequence[Received]) -> MemoryStorage:
    """The shares of all ranks as one snapshot."""
    parts = [part_records.decode(str(one.body["manifest"]).encode(), "a share in memory") for one in replies]
    # In memory the shares of all ranks make one snapshot, also where nodes have roots of their own.
    manifest = part_records.merge([replace(part, place=()) for part in parts])
    beats: list[Heartbeat] = [beat for one in replies if (beat := beat_of(one)) is not None]
    texts = {
        names.RECORD: str(replies[0].body["record"]).encode(),
        names.manifest_name(snapshot): manifest_codec.encode(manifest),
    }
    files = {name: file for reply in replies for name, file in shared_file(reply).items()}
    return MemoryStorage(texts, files, max(beats, key=lambda beat: beat.step, default=None))


def _fetch(source: ShareSource, request: dict[str, Any], beside: int, deadline: float) -> Received:
    """A share or parity from another machine, in memory of this process. A reader compares its digests.

    Args:
        beside: ranks of this machine that fetch the same at the same time.

    Raises:
        OSError, CkptError, LookupError: it is not to be had.
    """
    with closing(connect(source.host, source.port, source.secret)) as line:
        line.send(request)
        body = line.receive()
        if "nbytes" not in body:
            raise WriterError(f"rank {source.writer} at {source.host}:{source.port}: {body.get('why')}")
        if time.monotonic() > deadline:
            raise WaitTimeoutError("the shares of other machines do not come in time")
        fd, image = own_memory(int(body["nbytes"]), beside)
        with on_failure(partial(os.close, fd)):
            line.fill(image)
        return Received(body, (fd,))


@dataclass(frozen=True, slots=True)
class ShareSource:
    """A writer that a rank has found on its machine.

    Args:
        writer: whose writer it was.
        held: the snapshots of which it has its rank's share.
        host, port, secret: where it serves other machines; port 0: it does not.
        group: whose shares it keeps, behind itself, as the members of the group follow each other.
        parity: the snapshots of which it keeps them.
    """

    writer: int
    held: Sequence[str]
    host: str = ""
    port: int = 0
    secret: str = ""
    group: Sequence[int] = ()
    parity: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What all ranks attach to.

    Args:
        snapshot: its id.
        remote: for each rank's share, where it is to be had over the network, if it is.
        lost: for each rank whose own share is nowhere, the group that kept it, a keeper first.
        parity: for each keeper of those groups, where what it keeps is to be had over the network.
        missing: the ranks whose shares nothing makes; with them it is no plan.
    """

    snapshot: str
    remote: Mapping[str, ShareSource]
    lost: Mapping[str, Sequence[int]]
    parity: Mapping[str, ShareSource]
    missing: Sequence[int]


def plan_shares(size: int, found: Sequence[Sequence[ShareSource]]) -> SharePlan | None:
    """The newest snapshot of which every rank gets all shares: from its own machine, from one that serves others, or
    made from parity. Where there is none, the one that the least is missing of; None: none has anything.

    Args:
        found: what each rank has found on its machine.
    """
    ids = {one for sources in found for source in sources for one in (*source.held, *source.parity)}
    known = [parsed for one in ids if (parsed := names.parse_id(one)) is not None]
    newest_first = sorted(known, key=lambda parsed: parsed.seq, reverse=True)
    plans = (_plan(parsed.id, size, found) for parsed in newest_first)
    return min(plans, key=lambda plan: len(plan.missing), default=None)


def _plan(snapshot: str, size: int, found: Sequence[Sequence[ShareSource]]) -> SharePlan:
    remote: dict[str, ShareSource] = {}
    parity: dict[str, ShareSource] = {}
    for source in (source for one in found for source in one if source.port):
        if snapshot in source.held:
            remote.setdefault(str(source.writer), source)
        if snapshot in source.parity:
            parity.setdefault(str(source.writer), source)
    local = [{source.writer for source in one if snapshot in source.held} for one in found]

    def all_get(rank: int) -> bool:
        return str(rank) in remote or all(rank in here for here in local)

    def group_of(lost: int) -> Sequence[int]:
        """The group of a rank without a share if the others have what makes it, else nothing."""
        group = next((source.group for source in parity.values() if lost in source.group[1:]), ())
        others = [rank for rank in group if rank != lost]
        alone = len(others) == 1  # what it keeps is the share
        return group if all(str(one) in parity and (alone or all_get(one)) for one in others) else ()

    groups = {rank: group_of(rank) for rank in range(size) if not all_get(rank)}
    lost = {str(rank): group for rank, group in groups.items() if group}
    missing = [rank for rank, group in groups.items() if not group]
    return SharePlan(snapshot, remote, lost, parity if lost else {}, missing)


def rebuild_share(
    lost: int,
    group: Sequence[int],
    shares: Mapping[int, Received],
    parity_of: Callable[[int], Received],
    beside: int,
) -> Received:
    """The lost share, as its writer would have given it; every byte has been compared with its digest.

    Args:
        lost: whose share it is.
        group: the members as they follow each other.
        shares: those of all other members.
        parity_of: what a member keeps; its descriptors are closed here, one member after the other.
        beside: see `own_memory`.

    Raises:
        OSError, CkptError, LookupError, TypeError, ValueError: it cannot be made.
    """
    keepers = [rank for rank in group if rank != lost]
    images = {rank: image_of(shares[rank]) for rank in keepers if len(keepers) > 1}
    share: PeerShare | None = None
    fd, out = -1, memoryview(b"")
    try:
        for keeper in keepers:
            parity = parity_of(keeper)
            try:
                if share is None:
                    row = next(one for one in parity.body["shares"] if one["rank"] == lost)
                    share = msgspec.convert(row, PeerShare)
                    if not images:
                        return _as_given(share, os.dup(parity.fds[0]))  # whole, and compared when it came
                    fd, out = own_memory(share.nbytes, beside)
                restore_chunk(out, lost, keeper, group, image_of(parity), images)
            finally:
                close_all(parity.fds)
        if share is None:
            raise LookupError(f"no machine has the parity of rank {lost}")
        verify(share, out)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return _as_given(share, fd)


def _as_given(share: PeerShare, fd: int) -> Received:
    return Received({**asdict(share), "manifest": share.part, "beat": None, "durable": False}, (fd,))
