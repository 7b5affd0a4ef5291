"""Which ranks see one and the same root: rank 0 leaves a beacon there, and whoever sees it is in its place."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.errors import CkptError
from ckpt_engine.store.repository import Repository, encode_record
from ckpt_engine.store.storage.base import Folder
from ckpt_engine.store.storage.local import TEMP

Places = tuple[tuple[int, ...], ...]
"""The ranks by the root they see, in the order of their lowest ranks: rank 0 is in the first one."""

LOOKS_SECONDS = (0.0, 0.1, 0.3)
"""Pauses before each look for the beacon: some mounts show new files a moment late."""


class Beacon:
    """A file in the root that nobody can have looked for before: network file systems remember what was missing.

    It takes the form of an interrupted put, so that it is no object, and is swept if its process dies.

    Args:
        root: a folder.
        make: make the folder if it is not there.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, root: Folder, *, make: bool) -> None:
        if make:
            root.make_folder(root.root)
        self.name = f"{TEMP}{os.urandom(8).hex()}-beacon"
        self._path = f"{root.root}/{self.name}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without locks a sweep could take it away: then the nodes count as places of their own
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def put_out(self) -> None:
        """Remove it."""
        with suppress(OSError):  # the next sweep does
            Path(self._path).unlink()
        os.close(self._fd)


def sees(root: Folder, beacon: str) -> bool:
    """Whether the beacon of this name is in `root`."""
    never = threading.Event()
    for pause in LOOKS_SECONDS:
        never.wait(pause)
        with suppress(CkptError):
            next(iter(root.list("")), None)  # has an NFS client ask for folders that it believes to be missing
        with suppress(OSError):
            if Path(root.root, beacon).exists():
                return True
    return False


def record_in(root: Folder) -> str:
    """The record of the run that has snapshots in `root`; empty: there is none that can be read."""
    try:
        repository = Repository(root)
        record = repository.record() if repository.ids() else None
        return encode_record(record).decode() if record is not None else ""
    except CkptError:
        return ""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a rank says of its root.

    Args:
        sees: the beacon is there.
        node: name of its machine.
        record: of the run there, if it is not rank 0's root.
    """

    sees: bool
    node: str
    record: str = ""


def divide(said: Sequence[Sight | None]) -> Places:
    """The places: ranks that see the beacon, and of those that do not the ranks of each machine.

    Args:
        said: by rank; None: it has said nothing, and counts to rank 0's place.
    """
    found: dict[tuple[bool, str], list[int]] = {}
    first = said[0]
    for rank, one in enumerate(said):
        known = one or first
        assert known is not None
        key = (True, "") if known.sees else (False, known.node)
        found.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())
