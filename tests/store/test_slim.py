"""Slimming takes components from old snapshots, and nothing else from anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_engine.copy import drop_components
from ckpt_engine.copy.make_room import plan_prune, prune
from ckpt_engine.errors import NoUsableSnapshotError
from ckpt_engine.restore.choose import SearchLog, candidates, require_none
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.cli.conftest import RunFolder
from tests.store.measured import MeasuredDisk
from tests.store.samples import files

KEEP = {"last": 9, "components": {"optimizer": {"last": 2}}}
POLICY = policy_from(KEEP)


def _arrays(step: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(step)
    return {
        "model/weight": rng.standard_normal((60, 50)).astype("float32"),
        "model/none": np.zeros((0, 3), "float32"),
        "optimizer/exp_avg": rng.standard_normal((60, 50)),
        "model/complex": rng.standard_normal(7).astype("complex128"),
        "optimizer/step": np.array(step),
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def lease(run: RunFolder) -> Iterator[Lease]:
    with acquire(run.repository.storage) as taken:
        yield taken


@pytest.fixture
def ids(run: RunFolder) -> list[str]:
    return [run.add(step, _arrays(step), metrics={"loss": 1.0 / step}) for step in (1, 2, 3, 4)]


def _slim(ids: list[str]) -> list[str]:
    return [drop_components.slim_id(one, ["optimizer"]) for one in ids]


def test_old_snapshots_lose_the_component_and_keep_every_other_byte(
    run: RunFolder, lease: Lease, ids: list[str]
) -> None:
    """The two newest stay whole; of the others there is the rest, readable by any safetensors reader."""
    done = prune(run.repository, lease, POLICY)
    assert done.slimmed == dict(zip(ids[:2], _slim(ids[:2]), strict=True))
    assert (done.plan.remove, done.not_slimmed) == ((), {})
    found = Repository(run.repository.storage)
    assert [one.id for one in found.list()] == [*_slim(ids[:2]), *ids[2:]]
    for step, snapshot in enumerate(_slim(ids[:2]), 1):
        manifest = found.read(snapshot)
        assert (manifest.info.seq, manifest.info.step, manifest.info.metrics) == (step, step, {"loss": 1.0 / step})
        assert set(manifest.tree) == {"model"}
        assert list(manifest.info.components) == ["model"]
        assert manifest.info.nbytes == sum(a.nbytes for n, a in _arrays(step).items() if n.startswith("model"))
        stored = load_file(run.data_file(snapshot))
        assert set(stored) == {"model/weight", "model/none", "model/complex"}
        assert stored["model/weight"].tobytes() == _arrays(step)["model/weight"].tobytes()
        assert stored["model/complex"].tobytes() == _arrays(step)["model/complex"].tobytes()
        assert run.data_file(snapshot).stat().st_size == manifest.files[0].nbytes
    assert not any(old in name for old in ids[:2] for name in files(run.path))
    assert prune(run.repository, lease, POLICY).slimmed == {}


def test_what_ckpt_verify_reads_is_whole(
    run: RunFolder, lease: Lease, ids: list[str], ckpt: Callable[..., Any]
) -> None:
    """Digests and headers of a slim snapshot are right."""
    prune(run.repository, lease, POLICY)
    assert ckpt("verify", run.path).code == 0


def test_an_array_shared_with_the_lost_component_stays(run: RunFolder, lease: Lease) -> None:
    """Tied memory is stored under its first name: it goes only if nothing that stays refers to it."""
    names = {"model": ("optimizer/shared", "model/w"), "optimizer": ("optimizer/shared", "optimizer/own")}
    tree = {
        component: {str(i): {"$": "tensor", "entry": name} for i, name in enumerate(entries)}
        for component, entries in names.items()
    }
    arrays = {"optimizer/shared": np.arange(5), "optimizer/own": np.arange(9), "model/w": np.arange(3)}
    first = run.add(1, arrays, tree)
    run.add(2, arrays, tree)
    done = prune(run.repository, lease, policy_from({"last": 2, "components": {"optimizer": {"last": 1}}}))
    assert set(load_file(run.data_file(done.slimmed[first]))) == {"optimizer/shared", "model/w"}


def test_pinned_snapshots_stay_whole(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """A pin keeps all of a snapshot, also one that is set while it is being slimmed."""
    pins.pin(run.repository, ids[0])
    assert list(prune(run.repository, lease, POLICY).slimmed) == [ids[1]]
    assert run.repository.list()[0].id == ids[0]


def test_a_pin_set_meanwhile_wins(
    run: RunFolder, lease: Lease, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slim form is given up."""
    write = drop_components.write_slim

    def pinned_first(repository: Repository, made: drop_components.Slim) -> None:
        write(repository, made)
        pins.pin(run.repository, made.whole.info.id)

    monkeypatch.setattr("ckpt_engine.copy.make_room.write_slim", pinned_first)
    done = prune(run.repository, lease, POLICY)
    assert set(done.not_slimmed) == set(ids[:2])
    assert [one.id for one in Repository(run.repository.storage).list()] == ids
    assert len([name for name in files(run.path) if name.startswith("data/")]) == 4


def test_a_damaged_snapshot_is_not_slimmed(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """What stays is verified on the way: damage is neither copied nor hidden, and the other ones are slimmed."""
    run.flip(ids[0], "model/weight")
    done = prune(run.repository, lease, POLICY)
    assert list(done.slimmed) == [ids[1]]
    assert list(done.not_slimmed) == [ids[0]]
    assert ids[0] in {one.id for one in run.repository.list()}
    assert len([name for name in files(run.path) if name.startswith("data/")]) == 4


def test_slimming_waits_for_room(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """It writes before it frees: within a quota only where both fit for a moment."""
    used = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    tight = policy_from(KEEP | {"quota": used + 70_000})
    done = prune(run.repository, lease, tight)
    assert done.slimmed == {}
    assert "more room" in done.not_slimmed[ids[0]]
    assert list(prune(run.repository, lease, policy_from(KEEP | {"quota": used + 100_000})).slimmed) == ids[:2]


@pytest.mark.parametrize("extra", range(0, 200_001, 10_000))
def test_slimming_never_exceeds_the_quota(run: RunFolder, lease: Lease, ids: list[str], extra: int) -> None:
    """Measured after each write, temporary files included, however much room there is beside the snapshots."""
    quota = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()) + extra
    disk = MeasuredDisk(run.path)
    done = prune(Repository(LocalStorage(run.path, disk=disk)), lease, policy_from(KEEP | {"quota": quota}))
    assert disk.most_bytes <= quota
    assert bool(done.slimmed) == (disk.most_bytes > 0)


@pytest.mark.parametrize("damaged", [False, True])
def test_an_interrupted_slimming_is_finished(run: RunFolder, lease: Lease, ids: list[str], damaged: bool) -> None:
    """Killed between the new manifest and the end of the old one: both count as one, and the old one goes.

    If they counted as two, an older snapshot would be one too many.
    """
    made = drop_components.foresee(run.repository.read(ids[1]), ["optimizer"])
    assert made is not None
    drop_components.write_slim(run.repository, made)
    if damaged:
        run.data_file(made.manifest.info.id).write_bytes(b"")
    four = policy_from({"last": 4, "components": {"optimizer": {"last": 2}}})
    decided = plan_prune(run.repository, four)
    assert decided.keep[made.manifest.info.id] == f"will replace {ids[1]}"
    prune(run.repository, lease, four)
    assert [one.id for one in Repository(run.repository.storage).list()] == [*_slim(ids[:2]), *ids[2:]]
    assert load_file(run.data_file(made.manifest.info.id))["model/weight"].shape == (60, 50)


def test_a_slim_twin_goes_if_the_rules_have_changed(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """Retention keeps the whole snapshot only, or removes both."""
    made = drop_components.foresee(run.repository.read(ids[0]), ["optimizer"])
    assert made is not None
    drop_components.write_slim(run.repository, made)
    done = prune(run.repository, lease, policy_from({"last": 4}))
    assert done.plan.why == {made.manifest.info.id: f"part of {ids[0]}"}
    assert [one.id for one in run.repository.list()] == ids
    drop_components.write_slim(run.repository, made)
    assert set(prune(run.repository, lease, policy_from({"last": 3})).plan.remove) == {ids[0], made.manifest.info.id}


def test_data_left_by_a_killed_slimming_is_replaced(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """Killed before the commit: the same name is written again."""
    run.repository.storage.put(names.data_name(_slim(ids)[0]), [memoryview(b"left")])
    made = drop_components.foresee(run.repository.read(ids[0]), ["optimizer"])
    assert made is not None
    drop_components.write_slim(run.repository, made)
    assert run.data_file(made.manifest.info.id).stat().st_size == made.manifest.files[0].nbytes


def test_a_slim_snapshot_is_never_resumed_from_unasked(run: RunFolder, lease: Lease, ids: list[str]) -> None:
    """Without its optimizer a run would go on wrongly: passed over with the reason, and found by its step."""
    prune(run.repository, lease, POLICY)
    run.repository.forget(ids[2:])
    search = SearchLog()
    assert list(candidates([run.repository], search)) == []
    assert [(one.id, one.code) for one in search.rejected] == [(one, "CKPT202") for one in _slim(ids[1::-1])]
    assert "took optimizer from it" in search.rejected[0].reason
    with pytest.raises(NoUsableSnapshotError):
        require_none([run.repository], search, None)
    (found,) = candidates([run.repository], SearchLog(), step=1)
    assert found.info.id == _slim(ids)[0]
