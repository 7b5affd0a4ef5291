"""What is far away is read once per node: its ranks meet before they load, and each byte is requested by one of them.

The blocks are in a file in shared memory that has no name any more: they are gone with the last process that has it
open. A process that fetches a block has a lock on it, which the kernel frees if that process dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckpt_engine.copy import host_memory
from ckpt_engine.errors import CkptError, WaitTimeoutError
from ckpt_engine.observe.events import LOGGER_NAME
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.restore.ask_tiers import Places
from ckpt_engine.state.sharding import is_sharded
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, Storage, WrapperStorage
from ckpt_engine.store.storage.object_requests import GrowingPauses

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
        members = _members(session, meeting, node, timeout)
    finally:
        if made:
            remove_shared(name)  # all who are members have it open by now
        if fd >= 0 and len(members) < 2:
            os.close(fd)
    return Seat(fd, members.index(session.ranks.rank), len(members)) if len(members) > 1 else None


def _members(session: Session, meeting: str, node: str, timeout: float) -> list[int]:
    """The ranks of this node; none if this one is not among them."""
    ranks, store = session.ranks, session.ranks.store
    deadline = time.monotonic() + timeout
    if not session.coordinates:
        store.set(f"node/{meeting}/{ranks.rank}", node)
        try:
            store.wait(f"node/{meeting}/closed", 2 * timeout)
        except WaitTimeoutError:
            return []
        found = store.get(f"node/{meeting}/of/{node}") if node else None
        members = list(json.loads(found)) if found is not None else []
        return members if ranks.rank in members else []
    nodes: dict[str, list[int]] = {node: [0]}
    for rank in range(1, ranks.size):
        try:
            where = store.wait(f"node/{meeting}/{rank}", max(0.001, deadline - time.monotonic()))
        except WaitTimeoutError:
            continue
        nodes.setdefault(where, []).append(rank)
    for where, members in nodes.items():
        if where:
            store.set(f"node/{meeting}/of/{where}", json.dumps(members))
    store.set(f"node/{meeting}/closed", "")
    return nodes[node] if node else []


class Sharing:
    """While ranks load together: the places of the run, those far away read once per node. A context manager.

    The state must be the same on all ranks: where each needs a part of its own there is nothing to share.

    Args:
        where: the places as one rank alone would read them.
        into: as given to `load`.
        alike: False: each rank needs a part of its own, whatever `into` is.

    Raises:
        WaitTimeoutError, RanksError: as `meet`.
    """

    def __init__(self, session: Session, where: Places, into: Any, *, alike: bool = True) -> None:
        self._session = session
        self._where = where
        self._seat: Seat | None = None
        self._shared: dict[str, NodeStorage] = {}
        self._wanted = alike and not is_divided(into)

    def __enter__(self) -> Self:
        try:
            far = any(_is_far(place.storage) for place in self._where())
        except CkptError:
            far, self._wanted = True, False  # loading will say what is wrong; the others must not wait for this rank
        if far:
            self._seat = meet(self._session, wanted=self._wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        idle = [storage.stop() for storage in self._shared.values()]
        if self._seat is not None and all(idle):
            os.close(self._seat.fd)  # a request that hangs would write into whatever gets this number next

    def places(self) -> Sequence[Repository]:
        """All places of the run, nearest first."""
        seat, places = self._seat, self._where()
        if seat is None:
            return places
        found = []
        for place in places:
            if not _is_far(place.storage):
                found.append(place)
                continue
            url, nodes = place.storage.url, place.storage.capabilities.nodes
            if url not in self._shared:
                far = place.storage if nodes is None else nodes.far
                self._shared[url] = NodeStorage(far, seat.fd, seat.index, seat.count)
            if nodes is not None:
                nodes.far = self._shared[url]
            found.append(Repository(self._shared[url]) if nodes is None else place)
        return found


def is_divided(state: Any) -> bool:
    """Whether there is a DTensor in a state."""
    if is_sharded(state):
        return True
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return any(is_divided(child) for child in children)


def _is_far(storage: Storage) -> bool:
    return not storage.capabilities.cheap_reads


WAIT_SECONDS = 30.0
"""How long a block that a neighbour fetches is waited for; from then on this rank reads alone."""
LOOKS = GrowingPauses(0.001, 0.05)
"""Between two looks for it."""
AHEAD_THREADS = 8
"""Requests under way for this rank's share, besides those for what it needs at once."""
END_SECONDS = 60.0
"""How long requests ahead may still take when everything needed is there."""


class NodeBlocks:
    """The blocks of a snapshot's data files that are needed, numbered alike on all ranks.

    Args:
        manifest: of the snapshot.
        files: of no other data files; None: of all.
    """

    def __init__(self, manifest: Manifest, files: Container[str] | None = None) -> None:
        needed: set[tuple[int, int]] = set()
        for _, piece in stored_pieces(manifest):
            if files is not None and manifest.files[piece.file].name not in files:
                continue
            last = piece.offset + max(piece.nbytes, 1) - 1
            needed |= {(piece.file, n) for n in range(piece.offset // BLOCK_BYTES, last // BLOCK_BYTES + 1)}
        self._files = manifest.files
        self._places = sorted(needed)
        self._numbers = {(manifest.files[file].name, n): number for number, (file, n) in enumerate(self._places)}

    def __len__(self) -> int:
        return len(self._places)

    def number(self, name: str, n: int) -> int | None:
        """The number of the n-th block of a data file; None: it is not needed."""
        return self._numbers.get((name, n))

    def place(self, number: int) -> tuple[str, int, int]:
        """The data file of a block, its first byte there, and its bytes."""
        file, n = self._places[number]
        start = n * BLOCK_BYTES
        return self._files[file].name, start, min(BLOCK_BYTES, self._files[file].nbytes - start)

    @property
    def names(self) -> tuple[str, ...]:
        """The data files they are of."""
        return tuple(self._files[file].name for file in sorted({file for file, _ in self._places}))

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.place(number)[2] for number in range(len(self)))


class NodeStorage(WrapperStorage):
    """A storage as `Storage`, whose `get_into` asks the neighbours first. Thread safe.

    Nothing that was put into shared memory is believed: a reader verifies the pieces as ever, and what does not
    fit is read once more from `inner`.

    Args:
        inner: where the bytes come from.
        fd: of the file that the node's ranks share.
        index, count: this is the `index`-th of `count` ranks on the node.
    """

    def __init__(self, inner: Storage, fd: int, index: int, count: int) -> None:
        super().__init__(inner)
        self._fd = fd
        self._index = index
        self._count = count
        self._snapshot = ""
        self._blocks: NodeBlocks | None = None
        self._region: SharedBlocks | None = None
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._alone = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, announce=self.announce, unshared=self.inner)

    def announce(self, manifest: Manifest, files: Container[str] | None = None) -> None:
        """This snapshot is read next (`files` of it; None: all): begin with this rank's share of it."""
        if self._snapshot == manifest.info.id:
            return
        self.stop()
        self._snapshot = manifest.info.id
        blocks = NodeBlocks(manifest, files)
        self._blocks = self._region = None
        if len(blocks) == 0 or blocks.nbytes > room_bytes(self._fd):
            return  # the room is not there: everybody reads for himself
        # Ranks that need other files number their blocks otherwise.
        region = manifest.info.id if files is None else f"{manifest.info.id}/{'/'.join(blocks.names)}"
        self._region, self._blocks, self._alone = SharedBlocks(self._fd, region), blocks, False
        self._stopped = threading.Event()
        todo = iter(self._order(len(blocks)))
        lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ahead, args=(todo, lock), name="ckpt-node", daemon=True)
            for _ in range(min(AHEAD_THREADS, len(blocks)))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """End reading ahead; whether nothing uses the shared file any more."""
        self._stopped.set()
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        blocks, region = self._blocks, self._region
        if blocks is None or region is None:
            self.inner.get_into(name, start, out)
            return
        at, stop = start, start + len(out)
        while at < stop:
            n = at // BLOCK_BYTES
            end = min(stop, (n + 1) * BLOCK_BYTES)
            part = out[at - start : end - start]
            number = blocks.number(name, n)
            if number is None or at + len(part) > sum(blocks.place(number)[1:]):
                self.inner.get_into(name, at, part)
            else:
                self._take(blocks, region, number, at - n * BLOCK_BYTES, part)
            at = end

    def _take(self, blocks: NodeBlocks, region: SharedBlocks, number: int, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a block: from shared memory, or by fetching it for all."""
        pause, deadline = LOOKS.first_seconds, time.monotonic() + WAIT_SECONDS
        while True:
            found = region.claim(number)
            if found is BlockClaim.PRESENT:
                region.read(number, start, out)
                return
            if found is BlockClaim.MINE:
                out[:] = self._fetch(blocks, region, number)[start : start + len(out)]
                return
            if found is BlockClaim.TAKEN and (self._alone or time.monotonic() > deadline):
                self._give_up_waiting()
                name, first, _ = blocks.place(number)
                self.inner.get_into(name, first + start, out)
                return
            region.wait(pause)
            pause = LOOKS.after(pause)

    def _fetch(self, blocks: NodeBlocks, region: SharedBlocks, number: int) -> memoryview:
        """Read a block that was claimed, and share it."""
        name, start, nbytes = blocks.place(number)
        data = memoryview(bytearray(nbytes))
        try:
            self.inner.get_into(name, start, data)
        except BaseException:
            region.give_up(number)
            raise
        try:
            region.put(number, data)
        except OSError as err:
            self._give_up_waiting(f"shared memory takes no more ({err.strerror})")
        return data

    def _ahead(self, todo: Iterator[int], lock: threading.Lock) -> None:
        blocks, region = self._blocks, self._region
        assert blocks is not None
        assert region is not None
        while not self._stopped.is_set() and not self._alone:
            with lock:
                number = next(todo, None)
            if number is None:
                return
            if region.claim(number) is BlockClaim.MINE:
                try:
                    self._fetch(blocks, region, number)
                except CkptError:
                    return  # the reader that needs the block gets the error

    def _order(self, count: int) -> Sequence[int]:
        """This rank's share first, then what the others may not get to."""
        first = count * self._index // self._count
        return [*range(first, count), *range(first)]

    def _give_up_waiting(self, why: str = "a neighbour does not deliver what it has begun to read") -> None:
        if not self._alone:
            self._alone = True
            logging.getLogger(LOGGER_NAME).warning("%s: this rank reads the rest from %s by itself", why, self.url)


SHARED_MEMORY = "/dev/shm"
"""The name of a file in it is random, and removed before anything is written."""
BLOCK_BYTES = 8 << 20
_REGION = 44
"""Each snapshot has 2**44 bytes of the file for itself, most of them never touched; in the second half its table."""
_REGIONS = 1 << 18
_TABLE = 1 << (_REGION - 1)
_PRESENT = b"\x01"


class BlockClaim(Enum):
    """What `SharedBlocks.claim` says of a block."""

    PRESENT = 1
    MINE = 2
    COMING = 3
    TAKEN = 4


def open_shared(name: str) -> tuple[int, bool]:
    """The shared file of this name, made if there is none; whether it was made here.

    Raises:
        OSError: there is no shared memory, or it is full.
    """
    path = f"{SHARED_MEMORY}/{name}"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        return os.open(path, flags), False


def remove_shared(name: str) -> None:
    """Take the name away. A process that has the file open keeps it."""
    with suppress(FileNotFoundError):
        os.unlink(f"{SHARED_MEMORY}/{name}")  # noqa: PTH108


def room_bytes(fd: int) -> int:
    """How much a shared file may hold without taking what others need: what it has, and half of what is free."""
    there = os.statvfs(SHARED_MEMORY)
    free_bytes = there.f_bavail * there.f_frsize
    room = host_memory.look()  # of a control group, too: shared memory counts there
    if room is not None:
        free_bytes = min(free_bytes, room.nbytes)
    return os.fstat(fd).st_blocks * 512 + free_bytes // 2


class SharedBlocks:
    """The blocks of one snapshot in a shared file. Thread safe.

    Args:
        fd: of the file; every process has opened it for itself.
        snapshot: the same in all processes.
    """

    def __init__(self, fd: int, snapshot: str) -> None:
        self._fd = fd
        # Two snapshots in one region would be noticed by their digests.
        self._base = (zlib.crc32(snapshot.encode()) % _REGIONS) << _REGION
        self._mine: set[int] = set()
        self._changed = threading.Condition()

    def claim(self, block: int) -> BlockClaim:
        """PRESENT: read it. MINE: fetch it, `put` it or `give_up`. COMING: another thread does. TAKEN: a neighbour."""
        with self._changed:
            if self._is_present(block):
                return BlockClaim.PRESENT
            if block in self._mine:
                return BlockClaim.COMING
            if not self._lock(block, fcntl.F_WRLCK):
                return BlockClaim.TAKEN
            if self._is_present(block):  # it has come just before the lock
                self._lock(block, fcntl.F_UNLCK)
                return BlockClaim.PRESENT
            self._mine.add(block)
            return BlockClaim.MINE

    def put(self, block: int, data: memoryview) -> None:
        """Share a block that was claimed.

        Raises:
            OSError: shared memory is full; the block is given up.
        """
        try:
            at = self._base + block * BLOCK_BYTES
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
            os.pwrite(self._fd, _PRESENT, self._base + _TABLE + block)
        finally:
            self.give_up(block)

    def give_up(self, block: int) -> None:
        """Let others fetch a block that was claimed."""
        with self._changed:
            self._mine.discard(block)
            self._lock(block, fcntl.F_UNLCK)
            self._changed.notify_all()

    def read(self, block: int, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a block that is present."""
        at = self._base + block * BLOCK_BYTES + start
        done = 0
        while done < len(out):
            done += os.preadv(self._fd, [out[done:]], at + done)

    def wait(self, seconds: float) -> None:
        """Return when this process has fetched a block, or given one up, or after `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def _is_present(self, block: int) -> bool:
        return os.pread(self._fd, 1, self._base + _TABLE + block) == _PRESENT

    def _lock(self, block: int, kind: int) -> bool:
        """Locks belong to the open file, so that those of other processes, and only those, are in the way."""
        wanted = struct.pack("hhqqi", kind, os.SEEK_SET, self._base + _TABLE + block, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True
