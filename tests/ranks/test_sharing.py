"""What does not change in a rank's share is not written again, and what was let go is not referred to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.encoded_copy import Encoded
from ckpt_engine.errors import CkptError
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from ckpt_engine.writer import part_records
from tests.ranks.runs import on_all, open_ranks
from tests.snapshot.passage import same

FROZEN = 2_000_000


def state(step: int, rank: int) -> dict[str, Any]:
    """Frozen weights, a head that is trained, and what each rank has of its own."""
    frozen = torch.randn(2, FROZEN // 2, generator=torch.Generator().manual_seed(0))
    return {"frozen": frozen, "head": torch.full((1000,), step), "own": {"rank": rank, "draws": torch.full((9,), step)}}


def save(ranks: list[Checkpointer], step: int) -> None:
    for handle in on_all(lambda rank: ranks[rank].save(state(step, rank), step=step), len(ranks)):
        handle.wait(60)


def manifests(root: Path) -> list[Manifest]:
    repository = Repository(LocalStorage(root))
    return [repository.read(parsed.id) for parsed in repository.ids()]


def newest_of(root: Path) -> Manifest:
    """The one that retention, which goes on behind `save`, never takes."""
    repository = Repository(LocalStorage(root))
    return repository.read(repository.ids()[-1].id)


def written(manifest: Manifest) -> int:
    return sum(file.nbytes for file in manifest.files if manifest.info.id in file.name)


def check(root: Path, size: int) -> None:
    """Every snapshot is whole, and every rank gets its own."""
    repository = Repository(LocalStorage(root))
    for info in repository.list():
        verdict = Checker(repository, lambda _: None).check(info.id)
        assert verdict.ok, verdict.problems
    again = open_ranks(root, size)
    for step in [info.step for info in repository.list()]:
        for rank, found in enumerate(on_all(lambda rank, step=step: again[rank].load(step=step), size)):
            assert same(found, state(step, rank))
    on_all(lambda rank: again[rank].close(), size)


def test_frozen_weights_are_written_once_by_all_ranks_together(tmp_path: Path) -> None:
    """From the second snapshot on each rank refers to its own file of the first one, which need not be kept itself."""
    ranks = open_ranks(tmp_path / "run", 2, keep={"last": 1})
    sizes = []
    for step in (1, 2, 3):
        save(ranks, step)
        sizes.append(written(newest_of(tmp_path / "run")))
    on_all(lambda rank: ranks[rank].close(), 2)
    assert sizes[0] > 4 * FROZEN and max(sizes[1:]) < 60_000, sizes
    newest = newest_of(tmp_path / "run")
    old = [file.name for file in newest.files if newest.info.id not in file.name]
    assert len(old) == 2 and {name.rpartition("-")[2] for name in old} == {"r00000.safetensors", "r00001.safetensors"}
    check(tmp_path / "run", 2)


def test_what_never_came_to_be_is_not_referred_to(tmp_path: Path) -> None:
    """A rank has written its share of a snapshot that another one has no part in: the next one is written whole."""
    ranks = open_ranks(tmp_path / "run", 2)
    on_all(lambda rank: ranks[rank].engine.start(), 2)
    first = ranks[1].save(state(1, 1), step=1)
    bad = {**state(1, 0), "other": torch.ones(3)}
    with pytest.raises(CkptError):
        ranks[0].save(bad, step=1).wait(60)
    first.wait(60)
    save(ranks, 2)
    (only,) = manifests(tmp_path / "run")
    assert only.info.step == 2 and all(only.info.id in file.name for file in only.files)
    on_all(lambda rank: ranks[rank].close(), 2)
    check(tmp_path / "run", 2)


def test_a_snapshot_whose_older_data_was_removed_meanwhile_does_not_come_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator looks for what the others refer to, right before it commits."""
    root = tmp_path / "run"
    ranks = open_ranks(root, 2)
    save(ranks, 1)
    (before,) = manifests(root)
    merge = part_records.merge

    def removed(found: Any) -> Manifest:
        (root / before.files[1].name).unlink()
        return merge(found)

    monkeypatch.setattr(part_records, "merge", removed)
    monkeypatch.setattr(Encoded, "stands", lambda self: True)
    handles = on_all(lambda rank: ranks[rank].save(state(2, rank), step=2), 2)
    with pytest.raises(CkptError, match="not there whole"):
        handles[0].wait(60)
    monkeypatch.undo()
    assert [one.info.step for one in manifests(root)] == [1]
    save(ranks, 3)
    newest = newest_of(root)
    assert all(newest.info.id in file.name or "r00000" in file.name for file in newest.files)
    on_all(lambda rank: ranks[rank].close(), 2)
