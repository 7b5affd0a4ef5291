"""The storage contract on an NFS mount; run by `test_nfs.py` where `$NFS_A` and `$NFS_B` are."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import prune
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lock_scope import locks_are_shared
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import StorageContract, listed, put
from tests.store.samples import save

MOUNTS = [Path(os.environ[name]) for name in ("NFS_A", "NFS_B")]


class TestNfs(StorageContract):
    @pytest.fixture
    def storage(self) -> LocalStorage:
        return LocalStorage(MOUNTS[0] / uuid.uuid4().hex / "run")


@pytest.fixture
def both() -> list[LocalStorage]:
    """The same new folder, through each mount."""
    name = uuid.uuid4().hex
    return [LocalStorage(mount / name) for mount in MOUNTS]


def test_the_mounts_are_nfs() -> None:
    """Version 4.2, and locks that other machines see."""
    for mount in MOUNTS:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        (line,) = (line for line in lines if f" {mount} " in line)
        assert " - nfs4 " in line
        assert "vers=4.2" in line
        assert locks_are_shared(str(mount / "run"))


def test_what_one_mount_writes_the_other_sees(both: list[LocalStorage]) -> None:
    """Data, manifests, replacements and removals, each at once."""
    here, there = both
    for number in range(20):
        assert listed(there, "data/") == listed(here, "data/")
        put(here, f"data/{number}", bytes([number]) * 5000)
        assert there.get(f"data/{number}") == bytes([number]) * 5000
        put(here, "state", bytes([number]), exclusive=False)
        assert there.get("state") == bytes([number])
    there.delete("data/3")
    assert "data/3" not in {item.name for item in listed(here)}


def test_a_reader_elsewhere_sees_a_run_grow_and_shrink(both: list[LocalStorage]) -> None:
    """Every snapshot that is listed there is whole there, while retention removes others here."""
    here, there = (Repository(storage) for storage in both)
    with acquire(here.storage) as lease:
        for step in range(1, 12):
            newest = save(here, step)
            prune(here, lease, KeepLast(3), verified=(newest,))
            ids = [info.id for info in Repository(there.storage).list()]
            assert ids == [info.id for info in here.list()]
            assert len(ids) == min(step, 3)
            for snapshot in ids:
                (file,) = Repository(there.storage).read(snapshot).files
                assert len(there.storage.get(file.name)) == file.nbytes
                assert file.name == names.data_name(snapshot)


def test_a_pin_set_elsewhere_holds_or_is_refused(both: list[LocalStorage]) -> None:
    """What retention removed here cannot be pinned there, whatever its cache says; what was pinned there stays here."""
    here, there = (Repository(storage) for storage in both)
    with acquire(here.storage) as lease:
        ids = [save(here, step) for step in (1, 2, 3)]
        assert [info.id for info in there.list()] == ids
        prune(here, lease, KeepLast(1))
        for gone in ids[:2]:
            with pytest.raises(StorageMissingError):
                pins.pin(there, gone)
        pins.pin(there, ids[2], "kept")
        newest = save(here, 4)
        assert prune(here, lease, KeepLast(1)).plan.keep == {ids[2]: "pinned: kept", newest: "last 1 of 1"}
