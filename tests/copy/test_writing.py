"""Snapshots write what is new and refer to the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy.make_room import prune
from ckpt_engine.copy.transfer import Copied, RunText, adopt_run, copy_data, copy_snapshot
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.restore.load import load
from ckpt_engine.store import manifest_codec
from ckpt_engine.store import names as layout
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from tests.cli.conftest import Outcome
from tests.copy.test_reading import flip_bit
from tests.snapshot.passage import same
from tests.support.bounds import bounds

FROZEN, TRAINED = 300_000, 3_000
"""Elements."""


def state(step: int) -> dict[str, Any]:
    """A big tensor that stays, and a small one with a moment that does not."""
    still = torch.Generator().manual_seed(0)
    moving = torch.Generator().manual_seed(step)
    return {
        "model": {
            "frozen": torch.randn(FROZEN, generator=still),
            "none": torch.empty(0, 2),
            "lora": torch.randn(TRAINED // 10, 10, generator=moving),
        },
        "optimizer": {"moment": torch.randn(TRAINED, generator=moving), "step": torch.tensor(step)},
        "step": step,
    }


class Life:
    """A run whose snapshots are saved one after another, each by a writer of its own or by the same."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.options = {"keep": {"last": 9}, **options}

    def save(self, *states: dict[str, Any]) -> None:
        with Checkpointer(self.root, **self.options) as ckpt:
            for one in states:
                ckpt.save(one, step=one["step"]).wait(60)

    @property
    def repository(self) -> Repository:
        return Repository(LocalStorage(self.root))

    def manifests(self) -> list[Manifest]:
        repository = self.repository
        return [repository.read(parsed.id) for parsed in repository.ids()]

    def written(self, manifest: Manifest) -> int:
        """Bytes of the data files that a snapshot wrote itself."""
        owner = manifest.info.id
        return sum(file.nbytes for file in manifest.files if file.name.startswith(f"data/{owner}"))

    def check(self, states: dict[int, dict[str, Any]]) -> None:
        """Every snapshot is whole and restores bit for bit."""
        repository = self.repository
        checker = Checker(repository, lambda _: None)
        for info in repository.list():
            verdict = checker.check(info.id)
            assert verdict.ok, verdict.problems
            found = load([self.repository], step=info.step)
            assert found is not None and same(found.state, states[info.step])


@pytest.mark.long
@pytest.mark.parametrize("together", [True, False], ids=["one-writer", "writer-each"])
def test_what_does_not_change_is_written_once(tmp_path: Path, together: bool, ckpt: Callable[..., Outcome]) -> None:
    """The second snapshot and later ones write what is trained, restore whole, and older readers can read them."""
    life = Life(tmp_path / "run")
    states = {step: state(step) for step in (1, 2, 3, 4)}
    if together:
        life.save(*states.values())
    else:
        for one in states.values():
            life.save(one)
    first, *later = life.manifests()
    trained = 4 * 2 * TRAINED + 8
    for manifest in later:
        assert life.written(manifest) <= trained + 2 * 4096
        assert manifest.files[0].name == first.files[0].name
        assert manifest_codec.version_of(manifest) == 1
    life.check(states)
    assert ckpt("verify", life.root).code == 0


def test_retention_keeps_data_that_others_need(tmp_path: Path) -> None:
    """When the first snapshot goes its data stays until nothing refers to it."""
    life = Life(tmp_path / "run")
    states = {step: state(step) for step in (1, 2, 3)}
    life.save(*states.values())
    first = life.manifests()[0]
    with acquire(LocalStorage(life.root)) as lease:
        assert prune(life.repository, lease, KeepLast(1)).plan.remove
    assert [one.info.step for one in life.manifests()] == [3]
    assert (life.root / first.files[0].name).exists()
    life.check(states)
    last = state(9)
    last["model"]["frozen"] = last["model"]["frozen"] + 1
    with Checkpointer(life.root, **life.options) as ckpt:
        assert ckpt.load() is not None  # the same line of history: another one would leave this snapshot alone
        ckpt.save(last, step=9).wait(60)
    with acquire(LocalStorage(life.root)) as lease:
        prune(life.repository, lease, KeepLast(1))
    assert not (life.root / first.files[0].name).exists()
    assert len(list((life.root / "data").iterdir())) == 1


def test_a_state_that_changes_everywhere_is_one_plain_file(tmp_path: Path) -> None:
    """Nothing is spared, so nothing is referred to."""
    life = Life(tmp_path / "run")
    states = {}
    for step in (1, 2, 3):
        states[step] = {"w": torch.randn(50_000, generator=torch.Generator().manual_seed(step)), "step": step}
    life.save(*states.values())
    for manifest in life.manifests():
        assert [file.name for file in manifest.files] == [layout.data_name(manifest.info.id)]
    life.check(states)


def test_a_file_of_which_little_is_needed_is_not_kept_for_it(tmp_path: Path) -> None:
    """What is unchanged in it moves to a file of its own, once, and is referred to from then on."""
    life = Life(tmp_path / "run")
    still = torch.randn(300_000, generator=torch.Generator().manual_seed(0))

    def mixed(step: int) -> dict[str, Any]:
        moving = torch.Generator().manual_seed(step)
        return {"still": still, "moving": torch.randn(1_200_000, generator=moving), "step": step}

    states = {step: mixed(step) for step in (1, 2, 3, 4)}
    life.save(*states.values())
    first, second, third, fourth = life.manifests()
    assert [file.name for file in second.files] == [layout.data_name(second.info.id, part=part) for part in (1, 2)]
    for manifest in (third, fourth):
        names = [file.name for file in manifest.files]
        assert names == [second.files[1].name, layout.data_name(manifest.info.id, part=1)]
        assert first.files[0].name not in names
    life.check(states)


def test_parts_of_one_tensor_are_spared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several pieces of which some change; only newer readers can read it."""
    monkeypatch.setattr("ckpt_engine.copy.write_snapshot.cut.__defaults__", (200_000,))
    life = Life(tmp_path / "run", writer="thread")
    w = torch.randn(5000, 100, generator=torch.Generator().manual_seed(0))
    states = {}
    for step in (1, 2, 3):
        w = w.clone()
        w[step * 750] += 1
        states[step] = {"w": w, "step": step}
    life.save(*states.values())
    _, second, third = life.manifests()
    assert manifest_codec.version_of(third) == 2
    assert life.written(second) < 2 * 200_000 + 8192
    assert len({piece.file for piece in third.entries["w"].pieces}) > 1
    life.check(states)


def test_a_missing_file_is_not_referred_to_again(tmp_path: Path) -> None:
    """If older data is lost, the next snapshot is whole by itself."""
    life = Life(tmp_path / "run")
    life.save(state(1), state(2))
    first = life.manifests()[0]
    (life.root / first.files[0].name).unlink()
    life.save(state(3))
    newest = life.manifests()[-1]
    assert [file.name for file in newest.files] == [layout.data_name(newest.info.id)]
    found = load([life.repository])
    assert found is not None and same(found.state, state(3))


def test_damage_to_shared_data_leads_to_what_is_whole(tmp_path: Path) -> None:
    """All snapshots that refer to it are passed over, and none is loaded wrong."""
    life = Life(tmp_path / "run")
    whole = {"model": {"frozen": torch.ones(5)}, "step": 1}
    life.save(whole, state(2), state(3))
    _, second, third = life.manifests()
    piece = third.entries["model/frozen"].pieces[0]
    assert third.files[piece.file] == second.files[0]
    flip_bit(life.root / third.files[piece.file].name, piece.offset)
    found = load([life.repository])
    assert found is not None and same(found.state, whole)
    assert [one.id for one in found.rejected] == [third.info.id, second.info.id]


def test_a_copy_takes_what_it_refers_to_along_once(tmp_path: Path) -> None:
    """Another place gets the files of older snapshots that it lacks, and not twice."""
    life = Life(tmp_path / "run")
    states = {step: state(step) for step in (1, 2, 3)}
    life.save(*states.values())
    far = LocalStorage(tmp_path / "far")
    target = adopt_run(RunText.of(life.repository), far)
    second, third = life.manifests()[1:]
    sent = copy_snapshot(life.repository, target, third.info.id).sent_bytes
    assert sent == sum(file.nbytes for file in third.files)
    again = copy_snapshot(life.repository, target, second.info.id).sent_bytes
    assert again == life.written(second)
    Life(tmp_path / "far").check(states)


def test_a_copy_whose_older_files_go_meanwhile_is_not_made(tmp_path: Path) -> None:
    """Room for another snapshot may take them after the copy has looked: nothing is visible; the next try is fine."""
    life = Life(tmp_path / "run")
    life.save(state(1), state(2))
    target = adopt_run(RunText.of(life.repository), LocalStorage(tmp_path / "far"))
    second = life.manifests()[1].info.id

    def put(manifest: Manifest) -> tuple[Manifest, Copied]:
        done = copy_data(life.repository, target, manifest)
        target.storage.delete(*(file.name for file in manifest.files if second not in file.name))
        return done

    with pytest.raises(StorageMissingError, match="removed while a copy"):
        copy_snapshot(life.repository, target, second, put)
    assert target.ids() == ()
    copy_snapshot(life.repository, target, second)
    Life(tmp_path / "far").check({2: state(2)})


def test_what_hardly_spares_anything_is_not_shared(tmp_path: Path) -> None:
    """Below a megabyte another file costs more than the bytes: each snapshot is one plain file."""
    life = Life(tmp_path / "run")
    still = torch.randn(250_000, generator=torch.Generator().manual_seed(0))
    states = {step: {"still": still, "moving": torch.full((100_000,), step), "step": step} for step in (1, 2, 3)}
    life.save(*states.values())
    for manifest in life.manifests():
        assert [file.name for file in manifest.files] == [layout.data_name(manifest.info.id)]
    life.check(states)


@given(
    changes=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6),
    keep=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=4, deadline=None)
def test_whatever_changes_every_snapshot_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, changes: list[set[int]], keep: int, seed: int
) -> None:
    """A law: tensors of six sizes change by chance, under retention."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {str(n): torch.randn(10 ** (n % 5), generator=generator) for n in range(6)}
    life = Life(tmp_path_factory.mktemp("law") / "run", keep={"last": keep}, writer="thread")
    states = {}
    for step, changed in enumerate(changes):
        tensors = {name: t + 1 if int(name) in changed else t for name, t in tensors.items()}
        states[step] = {"t": tensors, "step": step}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("PLAIN", least_bytes=0))
        life.save(*states.values())
    life.check(states)
    assert {one.info.step for one in life.manifests()} <= set(states)


class Table:
    """A big table of which a few rows change between snapshots, beside a small tensor that changes everywhere."""

    def __init__(self, rows: int = 20_000, width: int = 16) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.table = torch.randn(rows, width, generator=self.random)
        self.step = 0

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def touch(self, share: float = 0.01) -> dict[str, Any]:
        self.step += 1
        rows = torch.randperm(len(self.table), generator=self.random)[: int(share * len(self.table))]
        self.table = self.table.clone()
        self.table[rows] += 1
        return {"table": self.table, "head": torch.randn(100, generator=self.random), "step": self.step}


def test_of_a_table_only_the_rows_that_changed_are_written(tmp_path: Path) -> None:
    """Their bytes, the map of rows and headers, in each of twenty snapshots."""
    life, table = Life(tmp_path / "run", keep={"last": 99}), Table(60_000)
    states = {one["step"]: one for one in (table.touch() for _ in range(21))}
    life.save(*states.values())
    sizes = [life.written(manifest) for manifest in life.manifests()]
    touched = table.nbytes // 100
    assert max(sizes[1:]) <= 2 * touched, sizes
    depths = [len(manifest.bases) for manifest in life.manifests()]
    assert depths == list(range(21)), depths
    found = load([life.repository])
    assert found is not None and same(found.state, states[21])


def test_a_table_outlives_the_snapshots_it_was_written_by(tmp_path: Path) -> None:
    """Retention keeps the data of bases although their snapshots are gone."""
    life, table = Life(tmp_path / "run", keep={"last": 1}), Table()
    states = {one["step"]: one for one in (table.touch() for _ in range(6))}
    life.save(*states.values())
    (only,) = life.manifests()
    assert len(only.bases) == 5
    life.check(states)


def test_a_damaged_base_is_noticed_and_the_snapshot_before_it_used(tmp_path: Path) -> None:
    """Those that build on it cannot be used, and none is loaded wrong."""
    life, table = Life(tmp_path / "run", keep={"last": 99}), Table()
    whole = {"other": torch.ones(3), "step": 0}
    life.save(whole, *(table.touch() for _ in range(3)))
    manifests = life.manifests()
    name, pieces = next(iter(next(iter(manifests[-1].bases.values())).items()))
    assert name == "table"
    base = manifests[1].entries["table"].pieces[0]
    flip_bit(life.root / manifests[1].files[base.file].name, base.offset + 5)
    found = load([life.repository])
    assert found is not None and same(found.state, whole)
    assert [one.id for one in found.rejected] == [one.info.id for one in reversed(manifests[1:])]
    assert all("table" in one.reason for one in found.rejected)
    assert pieces


def test_a_table_that_changes_everywhere_again_is_written_whole(tmp_path: Path) -> None:
    """Deltas end as soon as they do not pay, and begin again when they do."""
    life, table = Life(tmp_path / "run", keep={"last": 99}), Table()
    states = {one["step"]: one for one in (table.touch(share) for share in (0.01, 0.01, 1.0, 0.9, 0.01, 0.01))}
    life.save(*states.values())
    sizes = [life.written(manifest) for manifest in life.manifests()]
    assert [nbytes > table.nbytes // 2 for nbytes in sizes] == [True, False, True, True, False, False]
    life.check(states)


def test_show_says_what_was_written_and_who_needs_it(tmp_path: Path, ckpt: Callable[..., Outcome]) -> None:
    """`show` says the bytes written, the size, the bytes in older files, and which snapshots need this one."""
    life = Life(tmp_path / "run")
    life.save(state(1), state(2), state(3))
    first, second, third = (one.info.id for one in life.manifests())
    found = ckpt("show", life.root, second, "--json").json
    written = life.written(life.manifests()[1])
    assert found["stored"] == {"written_bytes": written, "referred_bytes": 4 * FROZEN, "needed_by": []}
    assert ckpt("show", life.root, first, "--json").json["stored"]["needed_by"] == [second, third]
    text = ckpt("show", life.root, second).out
    assert "of its size), 1.2 MB in files of older snapshots" in text
    assert f"{second}, {third}" in ckpt("show", life.root, first).out


def test_compacting_makes_a_snapshot_independent(tmp_path: Path, ckpt: Callable[..., Outcome]) -> None:
    """It is one plain file with the same content, and what only it needed is gone."""
    life, table = Life(tmp_path / "run", keep={"last": 1}), Table()
    states = {one["step"]: one for one in (table.touch() for _ in range(4))}
    life.save(*states.values())
    (before,) = life.manifests()
    assert len(before.files) > 1
    planned = ckpt("compact", life.root, "--dry-run", "--json").json["snapshots"]
    assert [(one["id"], one["new"]) for one in planned] == [(before.info.id, None)]
    assert life.manifests() == [before]
    done = ckpt("compact", life.root, "--json").json["snapshots"]
    (after,) = life.manifests()
    assert done[0]["new"] == after.info.id != before.info.id
    assert (after.info.seq, after.bases, manifest_codec.version_of(after)) == (before.info.seq, {}, 1)
    assert [path.name for path in (life.root / "data").iterdir()] == [Path(after.files[0].name).name]
    life.check(states)
    assert "already" in ckpt("compact", life.root).out
    last = table.touch()
    states[last["step"]] = last
    life.save(last)
    life.check(states)


def test_a_pinned_snapshot_is_not_compacted(tmp_path: Path, ckpt: Callable[..., Outcome]) -> None:
    """It stays as it was, and that is said."""
    life, table = Life(tmp_path / "run"), Table()
    life.save(table.touch(), table.touch())
    before = life.manifests()
    assert ckpt("pin", life.root, "latest").code == 0
    found = ckpt("compact", life.root)
    assert found.code == 2 and "pinned" in found.err
    assert life.manifests() == before
