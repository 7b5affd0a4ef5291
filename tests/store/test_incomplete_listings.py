"""A listing that lacks what is there removes nothing, whichever part of a run it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import collect, prune
from ckpt_engine.errors import StorageError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.base import ObjectInfo, WrapperStorage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import put
from tests.store.samples import data_file, files, save

Hides = Callable[[str, list[str]], bool]
CASES: dict[str, Hides] = {
    "all": lambda name, _: name.startswith(names.MANIFESTS),
    "the newest": lambda name, ids: ids[-1] in name and name.startswith(names.MANIFESTS),
    "a middle one": lambda name, ids: ids[2] in name and name.startswith(names.MANIFESTS),
    "two": lambda name, ids: name in [names.manifest_name(one) for one in ids[1:3]],
}


class Lying(WrapperStorage):
    """A storage whose listings leave some objects out."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalStorage(root))
        self.hides: Callable[[str], bool] = lambda _: False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([item for item in super().list(prefix) if not self.hides(item.name)])


@pytest.mark.parametrize("knows", [False, True], ids=["new", "knows"])
@pytest.mark.parametrize("what", CASES)
def test_nothing_is_removed_that_a_listing_lacks(tmp_path: Path, what: str, knows: bool) -> None:
    """Not by a process that has read the manifests before, nor by a new one; with a good listing, garbage goes."""
    storage = Lying(tmp_path)
    repository = Repository(storage)
    first = save(repository, 1)
    shared = [names.data_name(first)]
    ids = [first, *(save(repository, step, shared=shared) for step in (2, 3, 4))]
    put(storage, orphan := names.data_name(names.snapshot_id(9, 1)), data_file())
    before = files(tmp_path)
    seen = Repository(storage)
    if knows:
        seen.unreferenced()
    storage.hides = lambda name: CASES[what](name, ids)
    with acquire(storage) as lease:
        for _ in range(2):
            with pytest.raises(StorageError, match="lacks snapshots"):
                collect(seen, lease)
            with pytest.raises(StorageError, match="lacks snapshots"):
                prune(seen, lease, KeepLast(9), verified=ids)
        storage.hides = lambda _: False
        assert collect(seen, lease).removed == (orphan,)
    assert files(tmp_path) | {orphan, names.LEASE} == before | {names.LEASE}
    assert [one.id for one in Repository(storage).list()] == ids


def test_a_snapshot_without_data_of_its_own_is_known_from_before(tmp_path: Path) -> None:
    """The listing lacks the only one that needs a file of a snapshot that is gone."""
    storage = Lying(tmp_path)
    repository = Repository(storage)
    first = save(repository, 1)
    last = save(repository, 2, shared=[names.data_name(first)])
    repository.unreferenced()
    with acquire(storage) as lease:
        repository.forget([first])
        storage.hides = lambda name: name == names.manifest_name(last)
        with pytest.raises(StorageError, match="lacks snapshots"):
            collect(repository, lease)
        storage.hides = lambda _: False
        assert collect(repository, lease).removed == ()
