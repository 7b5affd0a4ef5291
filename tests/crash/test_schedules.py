"""Random schedules of all that adds and removes snapshots, on disks that die: what is listed is whole, nothing leaks.

The same with processes, real trainings and real kills is `tests/faults/schedules.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.copy import drop_components
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import collect, compact, prune
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_snapshot
from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Garbage, Repository
from ckpt_engine.store.retention_rules import KeepAll, KeepLast
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import Evolving
from tests.crash.life import QuietDisk
from tests.crash.powerloss import Killed
from tests.support.bounds import bounds
from tests.support.copies import copy_encoded

BAR_SCHEDULES = 200
QUICK_SEEDS = range(12, 20)
"""Among them two that leave something behind if copies that are interrupted are forgotten."""
LENGTH = 14
CODECS = ("zstd", "byteplane-zstd", "delta", "delta")


class MortalDisk(QuietDisk):
    """A disk that kills the program before its n-th change."""

    def __init__(self, changes: int) -> None:
        self._left = changes


def _mortal(name: str) -> Callable[..., object]:
    def call(self: MortalDisk, *arguments: object) -> object:
        self._left -= 1
        if self._left < 0:
            raise Killed
        return getattr(QuietDisk, name)(self, *arguments)

    return call


for _name in ("create", "open", "write", "sync", "link", "rename", "remove", "make_folder", "sync_folder"):
    setattr(MortalDisk, _name, _mortal(_name))


class Schedule:
    """Three places: one that is saved to, one that gets encoded copies, one that gets copies byte for byte."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.root = root
        self.run = Evolving(root / "near", seed)
        self.run.save()
        self.pinned: set[str] = set()
        self.killed = 0

    def place(self, name: str, disk: Disk | None = None) -> Repository:
        return Repository(LocalStorage(self.root / name, disk=disk or QuietDisk()))

    def play(self, length: int = LENGTH) -> None:
        often, once = (self.save, self.encode), (self.prune, self.pin, self.unpin, self.compact, self.copy)
        verbs = (*often, *often, *once)
        for _ in range(length):
            disk = MortalDisk(self.chance.choice((0, 1, 2, 3, 5, 8, 13, 21, 10_000, 10_000)))
            verb = self.chance.choice(verbs)
            try:
                verb(disk)
            except Killed:
                self.killed += 1
                self.check()
                if verb == self.encode and self.chance.random() < 0.5:
                    verb(QuietDisk())  # the next start goes on where this one was
            self.check()
        self.clean()

    def save(self, disk: Disk) -> None:
        self.run.change()
        calm, self.run.repository = self.run.repository, self.place("near", disk)
        try:
            with acquire(self.run.repository.storage):
                self.run.save()
        finally:
            self.run.repository = calm
            for parsed in self.place("near").ids():  # killed when it was there already
                self.run.truth.setdefault(
                    parsed.id, {name: array.data.tobytes() for name, array in self.run.arrays.items()}
                )

    def encode(self, disk: Disk) -> None:
        """The newest one, by a writer that may have other options than the last one."""
        near, codec = self.place("near"), self.chance.choice(CODECS)
        newest = near.ids()[-1].id
        far = self.place("far", disk)
        with acquire(far.storage):
            far = adopt_run(RunText.of(near), far.storage)
            if all(parsed.id < newest for parsed in far.ids()):
                if self.chance.random() < 0.25:
                    copy_snapshot(near, far, newest)
                else:
                    copy_encoded(near, far, newest, lambda _: codec, EncodeStats())

    def copy(self, disk: Disk) -> None:
        source = self.place(self.chance.choice(("near", "far")))
        target = self.place("copy", disk)
        with acquire(target.storage):
            for parsed in source.ids():
                target = adopt_run(RunText.of(source), target.storage)
                if parsed not in target.ids():
                    copy_snapshot(source, target, parsed.id)

    def prune(self, disk: Disk) -> None:
        place = self.place(self.chance.choice(("near", "far", "copy")), disk)
        if place.ids():
            with acquire(place.storage) as lease:
                prune(place, lease, KeepLast(self.chance.randint(1, 3)), tidy=self.chance.random() < 0.5)

    def pin(self, disk: Disk) -> None:
        place = self.place("near", disk)
        chosen = self.chance.choice(place.ids()).id
        pins.pin(place, chosen, "kept")
        self.pinned.add(chosen)

    def unpin(self, disk: Disk) -> None:
        place = self.place("near", disk)
        chosen = self.chance.choice(place.ids()).id
        self.pinned.discard(chosen)
        pins.unpin(place, chosen)

    def compact(self, disk: Disk) -> None:
        place = self.place(self.chance.choice(("near", "far")), disk)
        if not place.ids():
            return
        chosen = self.chance.choice(place.ids()).id
        made = drop_components.foresee(place.read(chosen), ())
        if made is not None:
            self.run.truth[made.manifest.info.id] = self.run.truth[chosen]
        with acquire(place.storage) as lease:
            try:
                compact(place, lease, chosen)
            except (FormatError, StorageMissingError):  # encoded without digests of what it was, or pinned
                return

    def check(self) -> None:
        for name in ("near", "far", "copy"):
            self.run.check(self.place(name))
        there = {parsed.id for parsed in self.place("near").ids()}
        assert self.pinned <= there, f"pinned and gone: {self.pinned - there}"

    def clean(self) -> None:
        for name in ("near", "far", "copy"):
            place = self.place(name)
            if place.record() is None:
                continue
            with acquire(place.storage) as lease:
                place.create_if_absent()
                prune(place, lease, KeepAll())
                assert collect(place, lease).freed_bytes == 0, "collected twice"
            self.run.check(place)
            needed = {file for parsed in place.ids() for file in place.files_of(parsed.id)}
            needed |= {names.manifest_name(parsed.id) for parsed in place.ids()} | {names.RECORD, names.LEASE}
            needed |= {names.pin_name(snapshot) for snapshot in pins.pinned_ids(place.storage)}
            root = self.root / name
            assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == needed


@pytest.fixture(autouse=True)
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that in few snapshots all happens that may happen."""
    monkeypatch.setattr(*bounds("ENCODED", most_bases=2))
    monkeypatch.setattr(*bounds("ENCODED", part_bytes=2000))


@pytest.mark.long
def test_random_schedules_leave_whole_snapshots_and_nothing_else(tmp_path: Path) -> None:
    """A few of them; most of what is done is interrupted."""
    killed = 0
    for seed in QUICK_SEEDS:
        schedule = Schedule(tmp_path / str(seed), seed)
        schedule.play()
        killed += schedule.killed
    assert killed > len(QUICK_SEEDS)


def test_a_collection_that_takes_too_much_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that looks at names only fails under the same schedules."""
    found = Repository.unreferenced

    def careless(self: Repository, in_flight: object = (), data: object = None) -> Garbage:
        alive = {parsed.id for parsed in self.ids()}
        items = [
            item
            for item in self.storage.list(names.DATA)
            if (one := names.data_owner(item.name)) is not None and one.id not in alive
        ]
        return Garbage(tuple(items), (), found(self).damaged)

    monkeypatch.setattr(Repository, "unreferenced", careless)
    with pytest.raises((AssertionError, StorageMissingError)):
        for seed in QUICK_SEEDS:
            Schedule(tmp_path / str(seed), seed).play()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(BAR_SCHEDULES // 50))
def test_many_random_schedules_leave_whole_snapshots_and_nothing_else(tmp_path: Path, part: int) -> None:
    """As many as the bar asks for."""
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        Schedule(tmp_path / str(seed), seed).play(30)
