"""Waits for the lease of a run while another writer has it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.observe.units import duration
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire, read_holder, way_out_of_links
from ckpt_engine.store.lease_holder import LeaseHolder, ProcessIdentity
from ckpt_engine.store.lock_scope import lockable
from ckpt_engine.store.object_lease import LOOK_SECONDS, Record
from ckpt_engine.store.storage.base import Storage


def waiting(
    storage: Storage, holder: LeaseHolder, seconds: float, emit: Callable[[Event], object]
) -> Callable[[float], None]:
    """Sleeps, and says once for whom: the trainer waits too, and its user sees nothing else.

    Args:
        seconds: how long the lease is waited for at most.
    """
    said = False

    def pause(pause_seconds: float) -> None:
        nonlocal said
        other = None if said else read_holder(storage)
        if other is not None and other != holder:
            said = True
            emit(_waits_for(other, holder, storage, seconds))
        time.sleep(pause_seconds)

    return pause


def _is_gone(other: LeaseHolder) -> bool:
    return other.host == socket.gethostname() and not Path(f"/proc/{other.pid}").exists()


def _waits_for(other: LeaseHolder, me: LeaseHolder, storage: Storage, seconds: float) -> Notice:
    url, wait = storage.url, duration(seconds)
    if other.is_process_of(me):
        return Notice(
            "INFO", f"another writer of this process is still writing to {url}; waiting for it, at most {wait}"
        )
    if _is_gone(other):
        return Notice(
            "INFO",
            f"process {other.pid} is gone, its writer is still writing to {url}; waiting for it, at most {wait}",
        )
    stop = f"`ckpt stop {url}` on {other.host} lets it save and end, or give this run another folder"
    return Notice(
        "WARNING",
        f"the run at {url} is being written by {other}; waiting for its end, at most {wait}; "
        + (way_out_of_links(storage) or stop),
    )


def let_finish(storage: Storage, other: LeaseHolder | None, seconds: float, emit: Callable[[Event], object]) -> None:
    """Wait at most `seconds` for the writer of a trainer that is gone: what it still makes durable counts for a resume.

    A writer that was killed too, or whose trainer lives or is on another machine, is not waited for.

    Args:
        other: who the lease there names.

    Raises:
        CkptError: it does not end, or nothing can be written there.
    """
    if other is None or not _is_gone(other):
        return
    me = LeaseHolder.current()
    pause = waiting(storage, me, seconds, emit)
    if lockable(storage) is not None:
        acquire(storage, me, seconds, pause=pause).release()
        return
    deadline = time.monotonic() + seconds  # nothing is taken: a lease of objects takes long to take
    while (record := Record.decode(storage.get(names.LEASE))) is not None and record.place is not None:
        if ProcessIdentity.of(record.place.pid) != record.place or time.monotonic() >= deadline:
            return
        pause(LOOK_SECONDS)
