"""Takes the lease of the nearest tier for a writer: who asks, for whom it waits, and what the one before has left."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_engine.errors import CkptError, FormatError, StorageMissingError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.observe.units import duration
from ckpt_engine.persist.job import History, WriterConfig
from ckpt_engine.store.lease import Holder, acquire, read_holder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage


def waiting(
    storage: Storage, holder: Holder, seconds: float, emit: Callable[[Event], object]
) -> Callable[[float], None]:
    """Sleeps, and says once for whom: the trainer waits too, and its user sees nothing else.

    Args:
        seconds: how long the lease is waited for at most.
    """
    told = False

    def pause(pause_seconds: float) -> None:
        nonlocal told
        other = None if told else read_holder(storage)
        if other is not None and other != holder:
            told = True
            emit(_waits_for(other, holder, storage.url, seconds))
        time.sleep(pause_seconds)

    return pause


def _is_gone(other: Holder) -> bool:
    return other.host == socket.gethostname() and not Path(f"/proc/{other.pid}").exists()


def _waits_for(other: Holder, me: Holder, url: str, seconds: float) -> Notice:
    wait = duration(seconds)
    if other.is_process_of(me):
        return Notice("INFO", f"another writer of this process still finishes at {url}; waiting for it, at most {wait}")
    if _is_gone(other):
        return Notice(
            "INFO", f"process {other.pid} is gone, its writer still finishes at {url}; waiting for it, at most {wait}"
        )
    return Notice(
        "WARNING",
        f"the run at {url} is being written by {other}; waiting for its end, at most {wait}; `ckpt stop {url}` on "
        f"{other.host} lets it save and end, or give this run another folder",
    )


def let_finish(storage: Storage, seconds: float, emit: Callable[[Event], object]) -> None:
    """Wait at most `seconds` for the writer of a trainer that is gone: what it still makes durable counts for a resume.

    A writer that was killed too, or whose trainer lives or is on another machine, is not waited for.
    """
    other, me = read_holder(storage), Holder.current()
    if other is None or not _is_gone(other):
        return
    with suppress(CkptError):  # then somebody else goes on there, or nothing can be written
        acquire(storage, me, seconds, pause=waiting(storage, me, seconds, emit)).release()


def history_of(repository: Repository) -> History | None:
    """What is there; None: nothing. To be asked once the lease is taken: then nothing comes from others any more."""
    ids = repository.ids()
    if not ids:
        return None
    newest = ids[-1]
    try:
        info = repository.info(newest.id)
    except (FormatError, StorageMissingError):
        return History(len(ids), newest.id, newest.step, newest.seq)
    return History(len(ids), newest.id, newest.step, newest.seq, info.created, info.line.attempt)


def holder_of(config: WriterConfig) -> Holder:
    """The holder as the lease names it: what the trainer said about itself, completed with this process."""
    told = config.holder
    return Holder(
        pid=int(told.get("pid", os.getpid())),
        host=str(told.get("host", socket.gethostname())),
        started=float(told.get("started", time.time())),
        command=str(told.get("command", sys.executable)),
    )
