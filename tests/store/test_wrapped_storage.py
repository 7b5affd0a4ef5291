"""Storages keep the storage contract whatever is wrapped around them, and so do the wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.base import Capabilities, Storage, Throttle, Versions, WrapperStorage, metered
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.watchdog import AbandonedError, CallProgress, WatchedSource, WatchedStorage
from ckpt_engine.testing import StorageContract, put
from ckpt_engine.writer.replicate import CopyThrottle
from tests.writer.faulty import Faulty, Weather


class Plain(WrapperStorage):
    """A storage without special abilities."""

    capabilities = Capabilities()  # type: ignore[assignment]


def limited(storage: Storage) -> Storage:
    return metered(storage, lambda _: CopyThrottle(Throttle(1e12)))


def watched(storage: Storage) -> Storage:
    return WatchedStorage(storage, CallProgress())


@pytest.mark.parametrize("kind", ["folder", "plain"])
class TestWrapped(StorageContract):
    @pytest.fixture(params=["limited", "twice", "source", "faulty"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Storage:
        local = LocalStorage(tmp_path / "root")
        own: Storage = local if kind == "folder" else Plain(local)
        wrappers = {
            "limited": lambda: limited(own),
            "twice": lambda: watched(watched(limited(own))),
            "source": lambda: WatchedSource(own, CallProgress()).storage,
            "faulty": lambda: watched(limited(Faulty(tmp_path / "root", Weather()))),
        }
        return wrappers[request.param]()


def test_abilities_show_through_wrappers(tmp_path: Path) -> None:
    """A watched, limited folder is a folder: its lease is a lock, and its files have paths."""
    storage = watched(watched(limited(LocalStorage(tmp_path))))
    can = storage.capabilities
    assert can.cheap_reads
    assert can.folder is not None
    assert (can.folder.root, can.folder.path("a/b")) == (str(tmp_path), f"{tmp_path}/a/b")
    with acquire(storage) as lease:
        lease.check()
    assert not Plain(LocalStorage(tmp_path)).capabilities.cheap_reads


def test_what_a_folder_is_asked_for_is_watched_too(tmp_path: Path) -> None:
    """The ability does not lead around the wrapper."""
    progress = CallProgress()
    folder = watched(WatchedStorage(LocalStorage(tmp_path), progress)).capabilities.folder
    assert folder is not None
    progress.abandoned = True
    with pytest.raises(AbandonedError):
        put(folder, "a", b"1")
    with pytest.raises(AbandonedError):
        folder.receive("b", 1, "0" * 16, lambda partial: partial.write(0, memoryview(b"1")))


class Conditional(Plain):
    """A storage that claims conditional writes and has none."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(versions=self)

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        return b"1", name

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        put(self, name, data, exclusive=version is None)


def test_conditional_writes_are_watched(tmp_path: Path) -> None:
    """A lease that hangs is noticed."""
    asked: list[float] = []

    class Counting(CallProgress):
        def during(self, request: Callable[[], Any], rest_seconds: float = 0.0) -> Any:
            asked.append(rest_seconds)
            return super().during(request, rest_seconds)

    versions: Versions | None = WatchedStorage(Conditional(LocalStorage(tmp_path)), Counting()).capabilities.versions
    assert versions is not None
    assert versions.read_versioned("x") == (b"1", "x")
    versions.replace("x", b"2", None)
    assert len(asked) == 2
