"""A repository does what a dictionary does, whatever happens to it in between."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_engine.copy.make_room import collect, prune
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import plan
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import put
from tests.store.samples import data_file, files, save


class _QuietDisk(Disk):
    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


class RepositoryModel(RuleBasedStateMachine):
    """Random saves, shared data, pruning, damage, orphans, foreign files and restarts, against a dict."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "run"
        self.needs: dict[str, set[str]] = {}  # the model: snapshot → data files
        self.damaged: dict[str, set[str]] = {}
        self.orphans: set[str] = set()
        self.foreign: set[str] = set()
        self.lease: Lease | None = None
        self.restart()
        self.repository.create_if_absent()

    @rule()
    def restart(self) -> None:
        """Another process takes over."""
        if self.lease:
            self.lease.release()
        storage = LocalStorage(self.root, disk=_QuietDisk())
        self.repository = Repository(storage)
        self.lease = acquire(storage)

    @rule(step=st.integers(0, 30), loss=st.floats() | st.none(), data=st.data())
    def save(self, step: int, loss: float | None, data: st.DataObject) -> None:
        there = sorted(name for names in self.needs.values() for name in names)
        shared = data.draw(st.lists(st.sampled_from(there), max_size=2, unique=True)) if there else []
        snapshot = save(self.repository, step, {} if loss is None else {"loss": loss}, shared)
        self.needs[snapshot] = {names.data_name(snapshot), *shared}

    @rule(seq=st.integers(1, 12))
    def leave_an_orphan(self, seq: int) -> None:
        name = names.data_name(names.snapshot_id(seq, 1))
        put(self.repository.storage, name, data_file())
        self.orphans.add(name)

    @rule(name=st.sampled_from(["a.txt", "data/b.safetensors", "snapshots/c.json", "data/.tmp-d"]))
    def add_a_foreign_file(self, name: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text("mine")
        self.foreign.add(name)

    @precondition(lambda self: len(self.needs) > 1)
    @rule(data=st.data())
    def damage_a_manifest(self, data: st.DataObject) -> None:
        snapshot = data.draw(st.sampled_from(sorted(self.needs)))
        (self.root / names.manifest_name(snapshot)).write_bytes(b'{"digest":"xx')
        self.damaged[snapshot] = self.needs.pop(snapshot)
        self.restart()

    @rule(
        keep=st.fixed_dictionaries(
            {"last": st.integers(1, 4)},
            optional={"every_n_steps": st.integers(1, 9), "best": st.just({"monitor": "loss"})},
        )
    )
    def prune(self, keep: dict[str, object]) -> None:
        assert self.lease is not None
        expected = plan(self.repository.list(), policy_from(keep))
        done = prune(self.repository, self.lease, policy_from(keep))
        assert done.plan.remove == expected.remove
        for snapshot in expected.remove:
            self.orphans |= self.needs.pop(snapshot)
        self._collected(done.collected.removed)

    @rule()
    def collect(self) -> None:
        assert self.lease is not None
        self._collected(collect(self.repository, self.lease).removed)

    def _collected(self, removed: tuple[str, ...]) -> None:
        needed = set().union(*self.needs.values(), *self.damaged.values())
        withheld_up_to = max((names.parse_id(bad).seq for bad in self.damaged), default=-1)
        free = {name for name in self.orphans - needed if names.data_owner(name).seq > withheld_up_to}
        assert set(removed) == free
        self.orphans -= free

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "repository"):
            return
        listing = self.repository.scan()
        assert {info.id for info in listing.snapshots} == set(self.needs)
        assert {bad.id for bad in listing.damaged} == set(self.damaged)
        assert [info.seq for info in listing.snapshots] == sorted(info.seq for info in listing.snapshots)
        data = set().union(*self.needs.values(), *self.damaged.values(), self.orphans)
        manifests = {names.manifest_name(snapshot) for snapshot in (*self.needs, *self.damaged)}
        assert files(self.root) == {names.RECORD, names.LEASE} | data | manifests | self.foreign

    def teardown(self) -> None:
        if hasattr(self, "lease") and self.lease:
            self.lease.release()
            self.folder.cleanup()


TestRepositoryModel = RepositoryModel.TestCase
TestRepositoryModel.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
