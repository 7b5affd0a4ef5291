"""What another machine writes is found although an NFS client remembers that it was missing. The slow suite has NFS."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import save


class Client:
    """Names that were missing stay missing until the folder that they are missing in is opened, as on an NFS mount.

    Args:
        mount: the folder that it shows.
    """

    def __init__(self, mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mount = str(mount)
        self._missing: set[str] = set()
        self.used = True
        for name in ("open", "stat", "lstat", "scandir"):
            monkeypatch.setattr(os, name, self._remembering(getattr(os, name)))

    def _remembering(self, call: Any) -> Any:
        def remembering(path: Any, *arguments: Any, **options: Any) -> Any:
            name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if not (self.used and name.startswith(self._mount)):
                return call(path, *arguments, **options)
            names = [name, *map(str, Path(name).parents)]
            if self._missing.intersection(names):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            try:
                found = call(path, *arguments, **options)
            except FileNotFoundError:
                self._missing.update(one for one in names if not os.access(one, os.F_OK))
                raise
            if arguments and isinstance(arguments[0], int) and arguments[0] & os.O_DIRECTORY:
                self._missing = {one for one in self._missing if str(Path(one).parent) != name}
            return found

        return remembering


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(tmp_path, monkeypatch)


def test_a_run_that_another_machine_begins_is_seen(tmp_path: Path, client: Client) -> None:
    """A reader that has looked before the folder was there lists and reads what comes later."""
    here, there = (Repository(LocalStorage(tmp_path / "run")) for _ in range(2))
    assert here.scan().snapshots == ()
    client.used = False
    written = save(there, 7)
    client.used = True
    (seen,) = here.scan().snapshots
    assert (seen.id, seen.step) == (written, 7)


def test_a_file_that_was_missing_is_read(tmp_path: Path, client: Client) -> None:
    """That is so in a folder that was missing, too."""
    here, there = (LocalStorage(tmp_path / "run") for _ in range(2))
    with pytest.raises(StorageMissingError):
        here.get("data/one")
    client.used = False
    there.put("data/one", [memoryview(b"1")])
    client.used = True
    assert here.get("data/one") == b"1"
