"""Every state in which a power loss can leave a disk: a recorder of system calls and the states that follow from them.

The model is POSIX read strictly. Syncing a file keeps its bytes and its size, not its name. Syncing a folder keeps the
names in it. What was not synced may have landed or not, each change by itself and in any order; of a write, any part.
`link` and `rename` happen whole or not at all. (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.store.storage.disk import Disk

FOLDER = None
"""Stands for the content of a folder in a tree."""

Tree = Mapping[str, bytes | None]
"""Path → content, of everything below the recorded root's parent."""


class Killed(BaseException):
    """The process died here. Whatever it tries afterwards has no effect."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names in one folder: each path gets an inode, or none."""

    folder: str
    names: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SyncFile:
    inode: int


@dataclass(frozen=True, slots=True)
class SyncFolder:
    folder: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What the recorded program knows at this point, for the checker."""

    label: str


Operation = Change | Write | SyncFile | SyncFolder | Mark


class RecordingDisk(Disk):
    """Does what a disk does, and records it. With `die_before`, kills the program before that operation."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.operations: list[Operation] = []
        self.die_before: int | None = None
        self.dead = False
        self._inodes = itertools.count(1)
        self._of_path: dict[str, int] = {}
        self._of_fd: dict[int, int] = {}

    def mark(self, label: str) -> None:
        """Note for the checker: states from here on were reached knowing `label`."""
        self.operations.append(Mark(label))

    def create(self, path: str) -> int:
        self._next()
        fd = super().create(path)
        inode = self._of_fd[fd] = self._of_path[path] = next(self._inodes)
        self._record(Change(self._relative(Path(path).parent), {self._relative(path): inode}))
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._next()
        taken = super().write(fd, data, offset)
        self._record(Write(self._of_fd[fd], offset, bytes(data[:taken])))
        return taken

    def sync(self, fd: int) -> None:
        self._next()
        self._record(SyncFile(self._of_fd[fd]))

    def link(self, path: str, new_path: str) -> None:
        self._next()
        super().link(path, new_path)
        self._of_path[new_path] = self._of_path[path]
        self._record(Change(self._relative(Path(path).parent), {self._relative(new_path): self._of_path[path]}))

    def rename(self, path: str, new_path: str) -> None:
        self._next()
        super().rename(path, new_path)
        inode = self._of_path[new_path] = self._of_path.pop(path)
        names = {self._relative(path): None, self._relative(new_path): inode}
        self._record(Change(self._relative(Path(path).parent), names))

    def remove(self, path: str) -> None:
        self._next()
        super().remove(path)
        self._of_path.pop(path, None)
        self._record(Change(self._relative(Path(path).parent), {self._relative(path): None}))

    def make_folder(self, path: str) -> None:
        self._next()
        super().make_folder(path)
        inode = self._of_path[path] = -next(self._inodes)  # folders have negative numbers
        self._record(Change(self._relative(Path(path).parent), {self._relative(path): inode}))

    def sync_folder(self, path: str) -> None:
        self._next()
        if not Path(path).is_dir():
            raise FileNotFoundError(path)
        self._record(SyncFolder(self._relative(path)))

    def adopt(self, path: Path, data: bytes) -> None:
        """Tell the recorder about a file that somebody else has put there durably."""
        inode = self._of_path[str(path)] = next(self._inodes)
        folder = self._relative(path.parent)
        self.operations += [
            Change(folder, {self._relative(path): inode}),
            Write(inode, 0, data),
            SyncFile(inode),
            SyncFolder(folder),
        ]

    def _next(self) -> None:
        if self.dead or (self.die_before is not None and len(self.operations) >= self.die_before):
            self.dead = True
            raise Killed

    def _record(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _relative(self, path: str | Path) -> str:
        return str(Path(path).relative_to(self.base))


@dataclass
class _File:
    """The bytes of an inode: what is synced, and what was written since."""

    synced: bytes = b""
    loose: list[Write] = field(default_factory=list)


def crash_states(operations: list[Operation], upto: int, seed: int = 0) -> Iterator[Tree]:
    """The trees that may be found after a power loss right after `operations[:upto]`, without repetition."""
    names: dict[str, int] = {}
    loose: list[Change] = []
    files: dict[int, _File] = {}
    for operation in operations[:upto]:
        match operation:
            case Change():
                loose.append(operation)
                for inode in operation.names.values():
                    if inode is not None and inode > 0:
                        files.setdefault(inode, _File())
            case Write():
                files[operation.inode].loose.append(operation)
            case SyncFile():
                file = files[operation.inode]
                file.synced = _landed(file, len(file.loose))
                file.loose.clear()
            case SyncFolder():
                for change in loose:
                    if change.folder == operation.folder:
                        _apply(names, change)
                loose = [change for change in loose if change.folder != operation.folder]
            case Mark():
                pass
    rng = random.Random(f"{seed}-{upto}")
    seen: set[tuple[tuple[str, bytes | None], ...]] = set()
    for chosen in _choices(loose, rng):
        tree_names = dict(names)
        for change in chosen:
            _apply(tree_names, change)
        for contents in _contents(files, rng):
            tree = _reachable({path: contents[inode] if inode > 0 else FOLDER for path, inode in tree_names.items()})
            key = tuple(sorted(tree.items()))
            if key not in seen:
                seen.add(key)
                yield tree


def marks(operations: list[Operation], upto: int) -> list[str]:
    """The labels marked before the power loss."""
    return [operation.label for operation in operations[:upto] if isinstance(operation, Mark)]


def build(tree: Tree, base: Path) -> None:
    """Write a tree to the empty folder `base`."""
    for path, content in sorted(tree.items()):
        target = base / path
        if content is FOLDER:
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(content)


def _apply(names: dict[str, int], change: Change) -> None:
    for path, inode in change.names.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _choices(loose: list[Change], rng: random.Random) -> Iterator[list[Change]]:
    """Which of the changes of names landed: all subsets of a few, else all prefixes, all but one, one, and some."""
    count = len(loose)
    if count <= 4:
        masks = set(range(1 << count))
    else:
        full = (1 << count) - 1
        masks = {(1 << i) - 1 for i in range(count + 1)}
        masks |= {full ^ (1 << i) for i in range(count)} | {1 << i for i in range(count)}
        masks |= {rng.getrandbits(count) for _ in range(8)}
    for mask in sorted(masks):
        yield [change for i, change in enumerate(loose) if mask >> i & 1]


def _contents(files: Mapping[int, _File], rng: random.Random) -> Iterator[Mapping[int, bytes]]:
    """Possible contents of the files: no unsynced bytes, all of them, sizes without bytes, torn at several places."""
    loose = [inode for inode, file in files.items() if file.loose]
    base = {inode: file.synced for inode, file in files.items()}
    if not loose:
        yield base
        return
    yield base
    yield base | {inode: _landed(files[inode], len(files[inode].loose)) for inode in loose}
    yield base | {inode: _nul(files[inode]) for inode in loose}
    for inode in loose:
        for count in range(len(files[inode].loose)):
            yield base | {inode: _landed(files[inode], count)}
        yield base | {inode: _torn(files[inode], rng)}
    for _ in range(2):
        yield base | {inode: _torn(files[inode], rng) for inode in loose}


def _landed(file: _File, count: int) -> bytes:
    data = bytearray(file.synced)
    for write in file.loose[:count]:
        _put(data, write.offset, write.data)
    return bytes(data)


def _nul(file: _File) -> bytes:
    data = bytearray(file.synced)
    for write in file.loose:
        _put(data, write.offset, bytes(len(write.data)))
    return bytes(data)


def _torn(file: _File, rng: random.Random) -> bytes:
    """Each page, or half page, of what was written landed or not, by chance."""
    data = bytearray(file.synced)
    for write in file.loose:
        for start in range(0, len(write.data), 2048):
            if rng.random() < 0.5:
                _put(data, write.offset + start, write.data[start : start + 2048])
    return bytes(data)


def _put(data: bytearray, offset: int, new: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(new)] = new


def _reachable(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Without what lies in a folder whose own name did not survive."""
    kept: dict[str, bytes | None] = {}
    for path in sorted(tree):  # folders come before what is in them
        folder = path.rpartition("/")[0]
        if not folder or folder in kept:
            kept[path] = tree[path]
    return kept
