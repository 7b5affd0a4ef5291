"""Real power cuts on real file systems: no bad state, and nothing lost that was promised.

A writer runs on an ext4, xfs or btrfs disk of a guest, the guest is killed at a random moment, and the disk is mounted
here: the file system replays its journal, and then the run is read. The next cut hits the same run.
"""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import prune
from ckpt_engine.store import pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from tests.real import uml
from tests.real.powercut_writer import KEEP
from tests.writer.staged import check_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CUTS = 12
REPOSITORY = Path(__file__).parents[2]
_PATIENCE_SECONDS = 180.0
_LOOK_SECONDS = 0.01


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


class Victim:
    """A disk whose machine loses power again and again."""

    def __init__(self, kind: str, folder: Path) -> None:
        if why := uml.missing(f"mkfs.{kind}"):
            pytest.skip(why)
        self._kind, self._folder = kind, folder
        self.image, self._promises = folder / "disk.img", folder / "shared" / "promises"
        self._promises.parent.mkdir()
        _sh("truncate", "-s", "512M", str(self.image))
        _sh(f"mkfs.{kind}", "-q", "-F" if kind == "ext4" else "-f", str(self.image))
        self.cuts = 0

    def promises(self) -> list[str]:
        """All that was ever promised."""
        return self._promises.read_text().splitlines() if self._promises.exists() else []

    def cut(self, after: int, more_seconds: float, *how: str) -> None:
        """Run the writer until it has made so many more promises, and a little longer, and cut the power."""
        self.cuts += 1
        wanted = len(self.promises()) + after
        run = shlex.join(
            [sys.executable, "-m", "tests.real.powercut_writer", "/mnt/disk/run", str(self._promises), *how]
        )
        mount = f"modprobe {self._kind} 2>/dev/null; mkdir -p /mnt/disk; mount -t {self._kind} /dev/ubda /mnt/disk"
        command = f"{mount} && exec {run}"
        job = self._folder / f"guest{self.cuts}"
        with uml.Guest(job, command, shares=[self._promises.parent], disks=[self.image], cwd=REPOSITORY) as guest:
            guest.boot()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while len(self.promises()) < wanted:
                assert guest.alive(), f"the writer ended: {guest.ended()}"
                assert time.monotonic() < deadline, f"{len(self.promises())} of {wanted}: {guest.ended()}"
                time.sleep(_LOOK_SECONDS)
            time.sleep(more_seconds)  # a random moment, also in the middle of a write, a rename or a commit
            assert guest.alive(), f"the writer ended: {guest.ended()}"
            guest.cut()

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The run after the cut; mounting repairs the file system as a reboot does."""
        point = self._folder / "mnt"
        point.mkdir(exist_ok=True)
        try:
            _sh("mount", "-o", "loop", "-t", self._kind, str(self.image), str(point))
        except subprocess.CalledProcessError as err:
            pytest.skip(f"cannot mount {self._kind} here: {err.stderr.decode().strip()}")
        try:
            yield point / "run"
        finally:
            _sh("umount", str(point))


def lost(root: Path, promises: list[str]) -> list[str]:
    """The promises that were broken."""
    storage = LocalStorage(root)
    ids = [info.id for info in Repository(storage).scan().snapshots]
    promised = [line.split(" ") for line in promises]
    saved = [snapshot for word, snapshot in promised if word == "saved"]
    pinned = {snapshot for word, snapshot in promised if word == "pinned"}
    pinned -= {snapshot for word, snapshot in promised if word == "unpinning"}
    broken = [f"saved {one}" for one in saved if one not in ids and sum(other > one for other in ids) < KEEP]
    broken += [f"pinned {one}" for one in sorted(pinned) if one not in ids]
    return broken + [f"pin of {one}" for one in sorted(pinned - pins.pinned_ids(storage))]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_no_promise_is_lost_by_a_power_cut(kind: str, tmp_path: Path) -> None:
    """After each of many cuts: each listed snapshot is whole, each acknowledged one and each pin is there."""
    victim, chance = Victim(kind, tmp_path), random.Random(kind)
    for number in range(CUTS):
        victim.cut(chance.choice([0, 1, 2, 4, 8, 16]), chance.uniform(0.0, 0.4))
        with victim.mounted() as root:
            if not root.exists():
                assert not victim.promises()
                continue
            whole = check_all(root)
            assert lost(root, victim.promises()) == [], f"cut {number}"
            if number % 3 == 2:
                _tidy(root, {info.id for info in whole})
    made = sum(line.startswith("saved ") for line in victim.promises())
    print(f"{kind}: {victim.cuts} cuts, {made} snapshots promised, none lost, no bad state")
    assert made > CUTS
    shutil.rmtree(tmp_path)


def _tidy(root: Path, whole: set[str]) -> None:
    """What the cut left behind is collected, and nothing else."""
    storage = LocalStorage(root)
    with acquire(storage) as lease:
        prune(Repository(storage), lease, KeepLast(KEEP))
        again = prune(Repository(storage), lease, KeepLast(KEEP)).collected
    assert (again.removed, again.freed_bytes) == ((), 0)
    assert {info.id for info in check_all(root)} <= whole


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_a_writer_that_does_not_sync_loses_what_it_promised(kind: str, tmp_path: Path) -> None:
    """The cut takes what was not synced: these tests can fail."""
    victim = Victim(kind, tmp_path)
    victim.cut(20, 0.0, "careless")
    with victim.mounted() as root:
        assert not root.exists() or lost(root, victim.promises())
