"""The lease of a run as an object that its holder renews, for stores whose locks other machines do not see.

It expires when its holder does not renew it. No wall clock is trusted: who wants such a lease watches the object, and
takes it when it has seen no change for the holder's own `ttl_seconds` by its own clock. To take it is to write a token,
wait, and read it back; where the store has conditional writes they decide, but not all stores that accept them are
atomic about them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from ckpt_engine.errors import CkptError, LeaseHeldError, StorageExistsError
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import Lease, ProcessIdentity
from ckpt_engine.store.sealed_json import seal, stored
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.retries import asking

TTL_SECONDS = 30.0
BEATS = 4
"""Renewals within `ttl_seconds`."""
SETTLE_SECONDS = 1.0
"""How long another taker's write may be under way unseen, at least."""
LOOK_SECONDS = 1.0
JOIN_SECONDS = 5.0
_FREE = b"{}\n"


@dataclass(frozen=True, slots=True)
class Record:
    """What the lease object says, besides its holder for people."""

    token: str
    beat: int
    ttl_seconds: float
    place: ProcessIdentity | None = None

    def encode(self, holder: Mapping[str, Any]) -> bytes:
        return seal({**holder, "lease": asdict(self)}) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Record | None:
        """The record, or None if these bytes are none. Their digest has no weight: a flip in what is for people does
        not end a lease.
        """
        try:
            return msgspec.json.decode(data, type=_Stored).lease
        except msgspec.DecodeError:
            return None


@dataclass(frozen=True, slots=True)
class _Stored:
    lease: Record


class LeaseSlot:
    """Where a lease is written. Without conditional writes creation is exclusive, and replacing is not."""

    def __init__(self, storage: Storage) -> None:
        self.url = storage.url
        self._storage = storage
        self._versions = storage.capabilities.versions

    def read(self) -> tuple[bytes, str] | None:
        """What is there and its version, None if there is nothing."""
        if self._versions is not None:
            return self._versions.read_versioned(names.LEASE)
        return stored(self._storage, names.LEASE, lambda data, _: (data, hashlib.sha256(data).hexdigest()))

    def write(self, data: bytes, version: str | None) -> None:
        """Replace that version (None: nothing). Raises `StorageExistsError` where it is known to be another by now."""
        if self._versions is not None:
            self._versions.replace(names.LEASE, data, version)
        else:
            self._storage.put(names.LEASE, [memoryview(data)], exclusive=version is None)


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happen, in seconds of a monotonic clock; tests make it faster."""

    ttl_seconds: float = TTL_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    look_seconds: float = LOOK_SECONDS
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def take(slot: LeaseSlot, holder: Mapping[str, Any], wait_seconds: float, timing: Timing) -> ObjectLease:
    """Take the lease, waiting at most `wait_seconds` for a holder that lives.

    It takes up to the holder's `ttl_seconds` to see whether it does.

    Raises:
        LeaseHeldError: the lease is renewed by its holder. `args[0]` has no name: the caller reads it.
        StorageError: from the store.
    """
    before: bytes | None = None
    since = timing.clock()
    deadline, changes = since + wait_seconds, 0
    while True:
        seen = slot.read()
        data = seen[0] if seen else None
        if data != before:
            changes += before is not None
            before, since = data, timing.clock()
        record = Record.decode(data) if data else None
        ended = record is not None and record.place is not None and record.place.is_dead()
        silent = timing.clock() - since >= (record.ttl_seconds if record else TTL_SECONDS)
        if data is None or not data.strip(b"{} \n") or ended or silent:
            lease = _try_to_take(slot, holder, seen, timing)
            if lease is not None:
                return lease
            changes += 1  # somebody else was faster, and so is alive
        if changes and timing.clock() >= deadline:
            raise LeaseHeldError(f"the lease of {slot.url} is renewed by its holder")
        timing.pause(timing.look_seconds)


def _try_to_take(
    slot: LeaseSlot, holder: Mapping[str, Any], seen: tuple[bytes, str] | None, timing: Timing
) -> ObjectLease | None:
    record = Record(os.urandom(16).hex(), 0, timing.ttl_seconds, ProcessIdentity.current())
    began = timing.clock()
    try:
        slot.write(record.encode(holder), seen[1] if seen else None)
    except StorageExistsError:
        return None
    timing.pause(max(timing.settle_seconds, 3 * (timing.clock() - began)))
    back = slot.read()
    found = Record.decode(back[0]) if back else None
    if found is None or found.token != record.token:
        return None
    return ObjectLease(slot, holder, record, began, timing)


class ObjectLease(Lease):
    """A lease that a thread keeps renewing. `check` asks the store."""

    def __init__(
        self, slot: LeaseSlot, holder: Mapping[str, Any], record: Record, written: float, timing: Timing
    ) -> None:
        self._slot = slot
        self._holder = holder
        self._record = record
        self._written = written
        self._timing = timing
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckpt-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Ask the store whether the lease is still ours, and renew it if that is due.

        Raises:
            LeaseHeldError: it was given back, or somebody else took it.
            StorageError: the store does not say.
        """
        self.renew(due_seconds=self._timing.ttl_seconds / BEATS)

    def release(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        with self._lock:
            if self._lost is not None:
                return
            self._lost = "given back"
            there = self._read_own()
            if there is not None:
                self._slot.write(_FREE, there)

    def renew(self, *, due_seconds: float = 0.0) -> None:
        """Write the next beat, unless the last one is younger than that. Raises as `check` does."""
        with self._lock:
            if self._lost is not None:
                raise LeaseHeldError(f"the lease of {self._slot.url} was {self._lost}")
            version = self._read_own()
            if version is None:
                raise self._taken()
            now = self._timing.clock()
            if now - self._written < due_seconds:
                return
            following = replace(self._record, beat=self._record.beat + 1)
            try:
                self._slot.write(following.encode(self._holder), version)
            except StorageExistsError as err:
                raise self._taken() from err
            self._record, self._written = following, now

    def _taken(self) -> LeaseHeldError:
        self._lost = "taken by another process"
        return LeaseHeldError(
            f"the lease of {self._slot.url} was {self._lost}", hint="stop all writers of this run but one"
        )

    def _read_own(self) -> str | None:
        """The version of our record, None if it is not ours any more."""
        there = self._slot.read()
        record = Record.decode(there[0]) if there else None
        return there[1] if there and record and record.token == self._record.token else None

    def _beat(self) -> None:
        while not self._stop.wait(self._timing.ttl_seconds / BEATS):
            try:
                with asking():  # the next beat asks again
                    self.renew()
            except LeaseHeldError:
                return  # the next `check` raises it
            except CkptError:
                continue  # the store is unreachable; whether somebody took the lease meanwhile shows at the next beat
