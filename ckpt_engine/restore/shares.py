"""Several ranks restore from memory: the shares that the writers of dead ranks hold are one snapshot, the nearest one.

All ranks attach to the same snapshot, or none does, and nobody goes on before all have: the next writers end those that
serve it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckpt_engine.errors import CkptError
from ckpt_engine.persist import control, parts
from ckpt_engine.persist.pulse import Beat
from ckpt_engine.persist.wire import Received
from ckpt_engine.ranks.session import Session
from ckpt_engine.restore.memory import MemoryPlace, MemoryStorage, SharedFile, beat_of, shared_file
from ckpt_engine.store import layout, manifest_codec

Held = Sequence[Sequence[str]]
"""Ids of the snapshots whose share of each rank is in memory."""


def attach(session: Session, root_url: str, timeout: float) -> MemoryPlace | None:
    """The newest snapshot whose shares of all ranks are in the memory of this machine. On all ranks, in the same order.

    Args:
        timeout: seconds to wait for the writers; they answer at once, but for the digests of the snapshot.

    Returns:
        None, on all ranks: one of them cannot get at all shares, or there are none. The place MUST be released.

    Raises:
        WaitTimeoutError, RanksError: the other ranks do not answer.
    """
    size = session.ranks.size
    deadline = time.monotonic() + timeout
    agreed = session.meet(lambda: [_held(root_url, rank, deadline) for rank in range(size)], newest_of_all)
    if agreed is None:
        return None
    place = _assemble(root_url, agreed, size, deadline)
    if not session.meet(lambda: place is not None, all):
        if place is not None:
            place.release(bye=False)
        return None
    return place


def newest_of_all(found: Sequence[Held | None]) -> str | None:
    """The newest snapshot that every rank has found with the shares of all ranks."""
    common: set[str] | None = None
    for held in found:
        for share in held or [[]]:
            common = set(share) if common is None else common & set(share)
    known = [parsed for one in common or () if (parsed := layout.parse_id(one)) is not None]
    return max(known, key=lambda parsed: parsed.seq).id if known else None


def _held(root_url: str, rank: int, deadline: float) -> list[str]:
    reply = _ask(root_url, {"what": control.HELD}, rank, deadline)
    held = reply.body.get("held") if reply is not None else None
    return [str(one) for one in held] if isinstance(held, list) else []


def _ask(root_url: str, request: dict[str, str], rank: int, deadline: float) -> Received | None:
    try:
        return control.ask(root_url, request, max(0.1, deadline - time.monotonic()), rank)
    except (CkptError, OSError):
        return None


def _assemble(root_url: str, snapshot: str, size: int, deadline: float) -> MemoryPlace | None:
    replies: list[Received] = []
    files: list[SharedFile] = []
    try:
        found = []
        beats: list[Beat] = []
        for rank in range(size):
            reply = _ask(root_url, {"what": control.SNAPSHOT, "snapshot": snapshot}, rank, deadline)
            if reply is None:
                raise LookupError(f"the writer of rank {rank} is gone")
            replies.append(reply)
            files.append(shared_file(reply))
            found.append(parts.decode(str(reply.body["manifest"]).encode(), f"the memory of rank {rank}"))
            beat = beat_of(reply)
            beats += [beat] if beat is not None else []
        manifest = parts.merge(found)
        texts = {
            layout.RECORD: str(replies[0].body["record"]).encode(),
            layout.manifest_name(snapshot): manifest_codec.encode(manifest),
        }
        storage = MemoryStorage(texts, files, max(beats, key=lambda beat: beat.step, default=None))
        return MemoryPlace(root_url, snapshot, manifest.info.step, storage, size)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, CkptError):
        for reply in replies:
            for fd in reply.fds:
                os.close(fd)
        return None
