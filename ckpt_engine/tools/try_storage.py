"""Tries out what a storage can do.

It says what that means for a run there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from timeit import timeit

from ckpt_engine.errors import CkptError, StorageExistsError
from ckpt_engine.observe import units
from ckpt_engine.store.lock_scope import lockable
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage

WRITERS = 8
SAMPLES = 5
SKEW_SECONDS = 5.0
READ_BYTES = 16 << 20


class Mark(StrEnum):
    """What a finding means: fine, worth knowing, or no run should be put there."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried."""

    check: str
    mark: Mark
    text: str


def examine(url: str, options: dict[str, object], nbytes: int) -> Iterator[Finding]:
    base = open_storage(url, options)
    folder = f".ckpt-doctor-{os.urandom(6).hex()}"
    local = base.capabilities.folder
    above = base.url.rstrip("/")
    if local is not None:  # where a folder that does not exist yet would be made
        above = next(str(path) for path in (Path(local.root), *Path(local.root).parents) if path.is_dir())
    storage = open_storage(f"{above}/{folder}", options)
    try:
        yield from _findings(storage, nbytes)
    finally:
        _clean(storage)


def _clean(storage: Storage) -> None:
    """Remove what was tried out; a storage that does not answer keeps it."""
    with suppress(CkptError):
        storage.delete(*(item.name for item in storage.list("")))
    if (local := storage.capabilities.folder) is not None:
        shutil.rmtree(local.root, ignore_errors=True)


def _findings(storage: Storage, nbytes: int) -> Iterator[Finding]:
    checks: dict[str, Callable[[Storage], tuple[Mark, str]]] = {
        "write and read": _round_trip,
        "create only": _exclusive,
        "create at once": _race,
        "replace if unchanged": _conditional,
        "list and delete": _listing,
        "lease": _lease,
        "latency": _latency,
        "throughput": partial(_throughput, nbytes=nbytes),
        "clock": _clock,
        "free space": _space,
        **({"channel": _channel} if storage.capabilities.encrypted is not None else {}),
    }
    for check, work in checks.items():
        found = tried(check, work, storage)
        yield found
        if work is _round_trip and found.mark is Mark.BAD:
            return


def tried(check: str, work: Callable[[Storage], tuple[Mark, str]], storage: Storage) -> Finding:
    """What `work` finds at a storage; an error of it is bad news."""
    try:
        return Finding(check, *work(storage))
    except CkptError as err:
        return Finding(check, Mark.BAD, " ".join(str(err).split()))


def _put(storage: Storage, name: str, data: bytes, *, exclusive: bool = True) -> None:
    storage.put(name, [memoryview(data)], exclusive=exclusive)


def _round_trip(storage: Storage) -> tuple[Mark, str]:
    data = os.urandom(100_003)
    _put(storage, "whole", data)
    if storage.get("whole") != data or storage.get("whole", 70_001, 9) != data[70_001:70_010]:
        return Mark.BAD, "what is read is not what was written"
    return Mark.OK, "bytes come back, whole and in ranges"


def _creates(storage: Storage, name: str, data: bytes) -> bool:
    """Create an object; whether there was none of this name."""
    with suppress(StorageExistsError):
        _put(storage, name, data)
        return True
    return False


def _exclusive(storage: Storage) -> tuple[Mark, str]:
    _put(storage, "once", b"first")
    if not _creates(storage, "once", b"second") and storage.get("once") == b"first":
        return Mark.OK, "an object is not replaced by accident"
    return Mark.BAD, "an object was replaced although only its creation was asked for"


def _race(storage: Storage) -> tuple[Mark, str]:
    with ThreadPoolExecutor(WRITERS) as pool:
        won = sum(pool.map(lambda number: _creates(storage, "race", bytes([number]) * 1000), range(WRITERS)))
    if won == 1:
        return Mark.OK, f"of {WRITERS} creators of one object one succeeds"
    return Mark.NOTE, f"of {WRITERS} creators of one object {won} succeed: the lease waits and reads back instead"


def _conditional(storage: Storage) -> tuple[Mark, str]:
    if lockable(storage) is not None:
        return Mark.OK, "not needed: the lease is a file lock"
    versions = storage.capabilities.versions
    if versions is None:
        return Mark.NOTE, "not offered here: the lease waits and reads back instead"
    _put(storage, "versioned", b"1")
    there = versions.read_versioned("versioned")
    assert there is not None
    versions.replace("versioned", b"2", there[1])
    try:
        versions.replace("versioned", b"3", there[1])
    except StorageExistsError:
        return Mark.OK, "a lease is never overwritten unseen"
    return Mark.NOTE, "ignored here: the lease waits and reads back instead"


def _listing(storage: Storage) -> tuple[Mark, str]:
    names = [f"many/{number}" for number in range(12)]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda name: _put(storage, name, b"x"), names))
    if sorted(item.name for item in storage.list("many/")) != sorted(names):
        return Mark.BAD, "a listing misses what was just written"
    storage.delete(*names)
    if list(storage.list("many/")):
        return Mark.BAD, "a listing shows what was just deleted"
    return Mark.OK, "seen at once"


def _lease(storage: Storage) -> tuple[Mark, str]:
    if lockable(storage) is not None:
        return Mark.OK, "a file lock, free at once when its holder dies"
    return Mark.OK, "an object with a heartbeat; a holder that died on another machine expires in 30 s"


def _latency(storage: Storage) -> tuple[Mark, str]:
    names = [f"small{number}" for number in range(SAMPLES)]
    writes = [timeit(partial(_put, storage, name, b"x" * 1000), number=1) for name in names]
    reads = [timeit(partial(storage.get, name), number=1) for name in names]
    shown = [units.duration(statistics.median(values)) for values in (writes, reads)]
    return Mark.OK, f"1 kB written in {shown[0]}, read in {shown[1]}"


def _throughput(storage: Storage, nbytes: int) -> tuple[Mark, str]:
    random = os.urandom(1 << 20)
    data = memoryview(random * (1 + nbytes // len(random)))[:nbytes]
    write_seconds = timeit(partial(storage.put, "big", [data]), number=1)
    back = memoryview(bytearray(nbytes))
    ranges = [(start, back[start : start + READ_BYTES]) for start in range(0, nbytes, READ_BYTES)]
    with ThreadPoolExecutor(4) as pool:
        read_seconds = timeit(lambda: list(pool.map(lambda one: storage.get_into("big", *one), ranges)), number=1)
    if back != data:
        return Mark.BAD, f"{units.size(nbytes)} do not come back as they were written"
    rates = [units.size(nbytes / seconds) for seconds in (write_seconds, read_seconds)]
    cached = ", perhaps from memory" if storage.capabilities.folder is not None else ""
    return Mark.OK, f"{units.size(nbytes)} written at {rates[0]}/s, read at {rates[1]}/s{cached}"


def _clock(storage: Storage) -> tuple[Mark, str]:
    before = time.time()
    there: float | None = None
    can = storage.capabilities
    if can.server_seconds is not None:
        there = can.server_seconds()
    elif can.folder is not None:
        _put(storage, "clock", b"x")
        there = Path(can.folder.path("clock")).stat().st_mtime
    after = time.time()
    if there is None:
        return Mark.NOTE, "the storage does not tell its time"
    skew = max(there - after, before - there - 1.0, 0.0)  # the answer has whole seconds
    if skew <= SKEW_SECONDS:
        return Mark.OK, "the same as here"
    ahead = "ahead" if there > after else "behind"
    return Mark.NOTE, f"{units.duration(skew)} {ahead}: ages are shown wrongly; nothing else depends on it"


def _space(storage: Storage) -> tuple[Mark, str]:
    free_bytes = storage.capabilities.free_bytes()
    return Mark.OK, "not limited, or not known" if free_bytes is None else f"{units.size(free_bytes)} free"


def _channel(storage: Storage) -> tuple[Mark, str]:
    encrypted = storage.capabilities.encrypted
    if encrypted is not None and encrypted():
        return Mark.OK, "encrypted"
    return Mark.NOTE, "not encrypted: uploads are compared with digests of the store; that costs CPU"
