"""How the shares of a parity group are cut and combined, so that any one of them can be made from the others.

As RAID 5 does it: with g members a share is cut into g - 1 chunks, one for each other member, and a member keeps the
XOR of the chunks that it got. Members are counted as they follow each other in the group, in a ring: chunk j of a
member is for the one j + 1 places behind it. Shorter chunks count as if zeros followed. Of two members the one keeps
the other's share as it is.

What a writer keeps in memory for others: of the two newest snapshots of which it is complete.

What comes in is XORed slice by slice where it belongs, so that no chunk needs memory of its own. A chunk that breaks
off, or is not what was sent, spoils the parity of its snapshot: that one is let go, and those before stay.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from ckpt_engine.copy.host_memory import shared_bytes, shared_memory
from ckpt_engine.errors import CorruptError, WriterError
from ckpt_engine.store.container import ALGORITHM
from ckpt_engine.store.names import parse_id
from ckpt_engine.writer.peer_service import SLICE_BYTES, PeerConnection, PeerShare

KEPT = 2
"""Complete ones. Ranks may be one snapshot apart."""
OPEN = 2
"""Incomplete ones; a durable snapshot may follow one in memory that is still on its way."""


def chunk(nbytes: int, members: int, number: int) -> slice:
    """The bytes of a share of `nbytes` bytes that are its chunk `number`, from 0 to `members` - 2; perhaps none."""
    each = -(-nbytes // (members - 1))
    return slice(min(nbytes, number * each), min(nbytes, (number + 1) * each))


def number_of(group: Sequence[int], sender: int, keeper: int) -> int:
    """Which chunk of `sender` is for `keeper`."""
    return (group.index(keeper) - group.index(sender) - 1) % len(group)


def xor_into(out: memoryview, data: memoryview) -> None:
    """`out ^= data`, over the bytes that both have. Lets go of the GIL."""
    import numpy as np  # most writers never need it

    nbytes = min(out.nbytes, data.nbytes)
    if not nbytes:
        return
    target = np.frombuffer(out, np.uint8, nbytes)
    np.bitwise_xor(target, np.frombuffer(data, np.uint8, nbytes), out=target)


def restore_chunk(
    out: memoryview, lost: int, keeper: int, group: Sequence[int], parity: memoryview, shares: Mapping[int, memoryview]
) -> None:
    """Make the chunk of a lost share that `keeper` got.

    Args:
        out: the share's bytes; only those of the chunk are written.
        lost: whose share it is.
        group: all members, as they follow each other.
        parity: what `keeper` keeps.
        shares: those of all other members.
    """
    target = out[chunk(out.nbytes, len(group), number_of(group, lost, keeper))]
    target[:] = parity[: target.nbytes]
    for member in group:
        if member not in (lost, keeper):
            share = shares[member]
            xor_into(target, share[chunk(share.nbytes, len(group), number_of(group, member, keeper))])


@dataclass(frozen=True, slots=True)
class Parity:
    """The XOR of one chunk of each other member's share.

    Args:
        snapshot: its id.
        shares: what the chunks are of.
        fd: a descriptor of the memory; the owner of the value closes it.
        nbytes: of the longest chunk.
    """

    snapshot: str
    shares: Sequence[PeerShare]
    fd: int
    nbytes: int


@dataclass(eq=False)
class _Memory:
    """Shared memory, which is given back with this object."""

    fd: int
    view: memoryview

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd).atexit = False


@dataclass(slots=True)
class _Set:
    """The parity of one snapshot. `lock` is for `memory`, `nbytes` and the bytes; the rest belongs to `ParitySets`."""

    snapshot: str
    number: int
    memory: _Memory | None
    """None: it was given up."""
    nbytes: int = 0
    begun: set[int] = field(default_factory=set)
    shares: dict[int, PeerShare] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class ParitySets:
    """Keeps what comes in whole. Thread safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    group: tuple[int, ...] = field(default=(), init=False)
    """All members, as they follow each other, this rank first. The others' shares are kept."""
    _open: dict[int, _Set] = field(default_factory=dict, init=False)
    _kept: list[_Set] = field(default_factory=list, init=False)
    _spare: _Memory | None = field(default=None, init=False)
    _settled: int = field(default=-1, init=False)
    """Number of a snapshot: of this one and older ones nothing more is taken in."""

    def expect(self, group: Sequence[int]) -> None:
        """Keep the shares of this group, whose first member's writer this is."""
        with self._lock:
            self.group = tuple(group)

    def receive(self, said: Mapping[str, Any], line: PeerConnection) -> None:
        """Take in a member's chunk; raises what keeps it from being kept.

        Raises:
            WriterError: it is not expected.
            FormatError: its bytes are not what was sent.
            OSError: there is no memory, or the sender is gone.
        """
        share = msgspec.convert(said, PeerShare)
        share.decoded()
        found, nbytes = self._begin(share)
        try:
            _grow(found, nbytes)
            self._take_in(found, nbytes, str(said["digest"]), line)
        except BaseException:
            with self._lock:
                self._settle(found.number)
            raise
        self._end(found, share)

    def ids(self) -> list[str]:
        """The snapshots whose parity is complete, newest first."""
        with self._lock:
            return [one.snapshot for one in reversed(self._kept)]

    def get(self, snapshot: str) -> Parity | None:
        """The parity of a snapshot with a descriptor of its own, for reading only, which the caller closes."""
        with self._lock:
            for one in self._kept:
                if one.snapshot == snapshot and one.memory is not None:
                    fd = os.open(f"/proc/self/fd/{one.memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
                    return Parity(snapshot, tuple(one.shares.values()), fd, one.nbytes)
        return None

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        with self._lock:
            for one in [*self._open.values(), *self._kept]:
                self._put_aside(one)
            self._open.clear()
            self._kept.clear()
            self._spare = None
            self.group = ()

    def _begin(self, share: PeerShare) -> tuple[_Set, int]:
        """Where a chunk belongs, and its bytes."""
        parsed = parse_id(share.snapshot)
        with self._lock:
            if parsed is None or share.rank not in self.group[1:]:
                raise WriterError(f"the shares of rank {share.rank} are not kept here")
            if parsed.seq <= self._settled:
                raise WriterError(f"{share.snapshot} is too old, or was given up here")
            which = chunk(share.nbytes, len(self.group), number_of(self.group, share.rank, self.group[0]))
            nbytes = which.stop - which.start
            found = self._open.get(parsed.seq)
            if found is None:
                if len(self._open) == OPEN:
                    self._settle(min(self._open))
                found = self._open[parsed.seq] = _Set(share.snapshot, parsed.seq, self._new(nbytes))
            if found.snapshot != share.snapshot or share.rank in found.begun:
                raise WriterError(f"a chunk of the share of rank {share.rank} of {share.snapshot} is here already")
            found.begun.add(share.rank)
        return found, nbytes

    def _take_in(self, found: _Set, nbytes: int, digest: str, line: PeerConnection) -> None:
        whole, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, SLICE_BYTES)))
        for at in range(0, nbytes, SLICE_BYTES):
            slice_ = buffer[: min(SLICE_BYTES, nbytes - at)]
            line.fill(slice_)
            whole.update(slice_)
            with found.lock:
                if found.memory is None:
                    raise WriterError(f"what was kept of {found.snapshot} was given up")
                xor_into(found.memory.view[at : at + slice_.nbytes], slice_)
        if f"{ALGORITHM}:{whole.hexdigest()}" != digest:
            raise CorruptError(f"a chunk of {found.snapshot} does not match its digest")

    def _end(self, found: _Set, share: PeerShare) -> None:
        with self._lock:
            if self._open.get(found.number) is not found:
                raise WriterError(f"what was kept of {found.snapshot} was given up")
            found.shares[share.rank] = share
            if set(found.shares) != set(self.group[1:]):
                return
            del self._open[found.number]
            self._settle(found.number)
            self._kept = sorted([*self._kept, found], key=lambda one: one.number)
            if len(self._kept) > KEPT:
                self._put_aside(self._kept.pop(0))

    def _settle(self, number: int) -> None:
        """Nothing more is taken in of this snapshot and older ones; what is incomplete of them goes."""
        self._settled = max(self._settled, number)
        for one in [one for one in self._open if one <= number]:
            self._put_aside(self._open.pop(one))

    def _put_aside(self, old: _Set) -> None:
        """Memory that was touched once costs nothing the next time. Who still writes into `old` finds nothing there."""
        with old.lock:
            memory, old.memory = old.memory, None
        self._spare = memory or self._spare

    def _new(self, nbytes: int) -> _Memory:
        """Zeros, at least so many."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.view.nbytes >= nbytes:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(spare.view)), 0, spare.view.nbytes)
            return spare
        return _Memory(*shared_memory("ckpt-share", max(1, nbytes)))


def _grow(found: _Set, nbytes: int) -> None:
    """Make room for a longer chunk: zeros follow what is there."""
    with found.lock:
        memory = found.memory
        if memory is None:
            return  # given up meanwhile, which `_take_in` tells
        if nbytes > memory.view.nbytes:
            os.ftruncate(memory.fd, nbytes)
            memory.view = shared_bytes(memory.fd, nbytes, writable=True)
        found.nbytes = max(found.nbytes, nbytes)
