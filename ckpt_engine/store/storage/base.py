"""The storage seam: immutable objects under one root.

What a file system and an object store can both promise, and no more: there is no rename, no append, no folder. And
storages around another storage, which pass on what they do not change, or limit its bandwidth.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, Self

from ckpt_engine.errors import StorageReadOnlyError
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.partial_file import PartialFile
from ckpt_engine.store.storage.upload_parts import MemoryBlocks

if TYPE_CHECKING:
    from ckpt_engine.store.manifest import Manifest

BURST_SECONDS = 0.25
SLICE_BYTES = 4 << 20
"""What is sent at once, so that a limit below the rate of a disk is kept evenly."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a listing and its size in bytes.

    Args:
        version: another text once an object of that name has other bytes; empty where the listing does not tell.
    """

    name: str
    nbytes: int
    version: str = field(default="", compare=False)


Duplicate = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a storage can do beyond `Storage`; as they are here, those of an object store without special abilities.

    Args:
        folder: its objects are files of this folder.
        locks: the folder whose files can be locked, also where others have other bytes than its objects.
        metered: makes the same storage with another meter, which is made of the one it has.
        versions: its conditional writes.
        view: bytes of a data file where they are in memory; raises as `get_into`.
        cheap_reads: reading costs no latency: a few reads at once do, and ranks of a machine need not share them.
        slow_answers: a request may take a second: what can be asked at once is.
        died_at_step: of what a dead trainer has left: how far it was.
        announce: says which snapshot is read next, and which of its data files (None: all).
        unshared: the same storage without what the ranks of this machine share.
        nodes: it is made of the folders of several nodes.
        free_bytes: asks how many bytes can still be stored, also where nothing is there yet; None: not known.
        prepare: makes the client, which takes long, before anything is asked.
        silent_seconds: how long a request has been without a sign; 0: there is none.
        server_seconds: asks for the server's wall clock; None: it does not tell.
        encrypted: whether the channel protects the bytes.
        rotate: wraps the keys of what is sealed for the recipients of now, and says how many; needs the lease.
        duplicate: of another storage, what makes the object of a name here as it is there, in the place of one that is
            here, without its bytes passing this process; it says whether it could. None: nothing can.
        retain: has the store refuse to delete objects that are there, for the days that the storage was given; says why
            it cannot. None: nothing can.
    """

    folder: Folder | None = None
    locks: Folder | None = None
    metered: Callable[[Callable[[Meter], Meter]], Storage] | None = None
    versions: Versions | None = None
    view: Callable[[str, int, int], memoryview] | None = None
    cheap_reads: bool = False
    slow_answers: bool = True
    died_at_step: int | None = None
    announce: Callable[[Manifest, Container[str] | None], None] | None = None
    unshared: Storage | None = None
    nodes: Nodes | None = None
    free_bytes: Callable[[], int | None] = lambda: None
    prepare: Callable[[], None] | None = None
    silent_seconds: Callable[[], float] | None = None
    server_seconds: Callable[[], float | None] | None = None
    encrypted: Callable[[], bool] | None = None
    rotate: Callable[[], int] | None = None
    duplicate: Callable[[Storage], Duplicate | None] = lambda _: None
    retain: Callable[[Sequence[str]], str | None] | None = None


class Storage(Protocol):
    """Immutable objects under one root; names are relative and use "/".

    Every method may be called from several threads at once and raises `StorageError` or one of its kinds. Nothing is
    cached: what another process has put is seen.
    """

    url: str

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond this. A storage that wraps another one answers for both."""

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        """Store `blocks`, back to back, as one object: atomically and durably.

        When this returns the whole object is visible and survives power loss. On any error nothing is visible under
        `name`; if not `exclusive`, what was there before or the whole new object.

        Args:
            blocks: contiguous bytes, unchanged until this returns. Fastest is one block starting at a page.
            exclusive: raise if the object exists, instead of replacing it.

        Raises:
            StorageExistsError, StorageFullError, StorageReadOnlyError, NotAFolderError
        """

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """At most `nbytes` bytes from `start` on; fewer where the object ends.

        Args:
            nbytes: None: all that the format allows for an object of this name (`names.most_bytes`).

        Raises:
            StorageMissingError
            CorruptError: it has more than the format allows, or it is no regular file.
        """

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises:
            StorageMissingError
            CorruptError: the object ends too early, or it is no regular file.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose name starts with `prefix`, in no order; never half-written ones. No root, no objects."""

    def delete(self, *names: str) -> None:
        """Remove objects; durable when this returns. One that does not exist is no error."""

    def sweep(self) -> int:
        """Remove what interrupted `put`s left behind and return its bytes; never touches a `put` in progress."""


def tidy(storage: Storage, *names: str) -> None:
    """Remove objects that are of no more use and do no harm, where this user may delete."""
    with suppress(StorageReadOnlyError):
        storage.delete(*names)


class Folder(Storage, Protocol):
    """A storage whose objects are files of the folder `root`."""

    root: str

    def path(self, name: str) -> str:
        """The file of the object `name`.

        Raises:
            StorageError: a name that could leave the root or meet a temporary file.
        """

    def make_folder(self, folder: str) -> None:
        """Make `folder`, in or at the root, and its missing parents, durably.

        Raises:
            OSError: from the file system.
        """

    def settle(self, prefix: str) -> None:
        """Make durable what is there under a folder such as `data/`: the process that put it may have died early."""

    def receive(self, name: str, nbytes: int, token: str, fill: Callable[[PartialFile], None]) -> None:
        """Store an object that arrives in parts: as `put`, but an interrupted one is continued by the next attempt.

        Args:
            token: 16 hexadecimal digits that stand for these very bytes: attempts with the same token continue with
                what there is.
            fill: writes what is missing. What it raises is raised, and what has arrived stays until it is swept.

        Raises:
            StorageExistsError, StorageFullError, StorageReadOnlyError, NotAFolderError
        """


class Versions(Protocol):
    """Conditional writes."""

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        """The bytes and the version of an object; None: there is none."""

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        """Put `data` in place of that version (None: of nothing).

        Raises:
            StorageExistsError: there is another version.
        """


class Nodes(Protocol):
    """Folders of several nodes that hold their snapshots together.

    Attributes:
        far: reads the data files of other nodes.
        sizes: of the data files of snapshots that were gathered; grows with each one.
        unfinished: snapshots that never were whole, of which nothing is lost.
        silent: nodes that do not answer, and why.
    """

    far: Storage
    sizes: dict[str, int]
    unfinished: set[str]
    silent: Mapping[str, str]

    def announce(self, manifest: Manifest) -> None:
        """This snapshot is read next."""


class ReadOnlyStorage:
    """What a storage refuses that this process only reads."""

    url: str

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{self.url} is not written by this process")

    def delete(self, *names: str) -> None:  # noqa: ARG002
        raise StorageReadOnlyError(f"{self.url} is not written by this process")

    def sweep(self) -> int:
        return 0


class WrapperStorage:
    """Passes everything on to `inner`; a subclass changes what it is there for."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @cached_property
    def capabilities(self) -> Capabilities:
        own = self.inner.capabilities
        folder = _WrappedFolder(self, own.folder) if own.folder is not None else None
        return replace(own, folder=folder, metered=partial(self._around, own.metered) if own.metered else None)

    def _around(self, make: Callable[[Callable[[Meter], Meter]], Storage], wrap: Callable[[Meter], Meter]) -> Self:
        made = copy.copy(self)
        vars(made).pop("capabilities", None)  # they are bound to what was copied
        made.inner = make(wrap)
        return made

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self.inner.put(name, blocks, exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.inner.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def delete(self, *names: str) -> None:
        self.inner.delete(*names)

    def sweep(self) -> int:
        return self.inner.sweep()


class _WrappedFolder(WrapperStorage):
    """A wrapper of a folder, which is asked for what only folders can do.

    Args:
        inner: the wrapper.
        folder: what it wraps.
    """

    def __init__(self, inner: Storage, folder: Folder) -> None:
        super().__init__(inner)
        self.root = folder.root
        self.path = folder.path
        self.make_folder = folder.make_folder
        self.settle = folder.settle
        self.receive = folder.receive


class MeteredStorage(WrapperStorage):
    """A storage that cannot be metered itself: the meter is asked before each object."""

    def __init__(self, inner: Storage, meter: Meter) -> None:
        super().__init__(inner)
        self._meter = meter

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, metered=lambda wrap: MeteredStorage(self.inner, wrap(self._meter)))

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self._meter.take_turn(MemoryBlocks.of(blocks).nbytes)
        self.inner.put(name, blocks, exclusive=exclusive)


def metered(storage: Storage, wrap: Callable[[Meter], Meter]) -> Storage:
    """`storage` with a meter that is made of the one it has: asked before each slice, or else before each object."""
    own = storage.capabilities.metered
    return own(wrap) if own is not None else MeteredStorage(storage, wrap(Meter()))


class Throttle:
    """A token bucket (GCRA, ITU-T I.371): in any `t` seconds at most `rate * (t + 0.25 s)` bytes start, and one slice.

    A slice of any size starts when the ones before it are paid, and is paid by those after it. Thread safe: first come,
    first served.

    Args:
        bytes_per_second: the limit.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a rate must be above 0, not {bytes_per_second}")
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> float:
        """Seconds to wait before `nbytes` bytes may be sent; they count as sent from then on."""
        with self._lock:
            now = self._clock()
            starts = max(self._free_at, now - BURST_SECONDS)
            self._free_at = starts + nbytes / self._rate
        return max(0.0, starts - now)
