"""Pieces in several files, and bases of deltas, that are damaged at one place come from the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine.copy.transfer import RunText, adopt_run, copy_snapshot
from ckpt_engine.copy.write_snapshot import cut
from ckpt_engine.restore.load import load
from ckpt_engine.store.decode import chain_of
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.test_reading import flip_bit
from tests.copy.test_writing import Life
from tests.snapshot.passage import same

PIECE = 2 << 20


@pytest.mark.parametrize("of", ["piece", "base", "delta"])
def test_what_is_read_without_a_copy_is_verified_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Large pieces are read where they belong, and deltas decoded where they lie: what is wrong never stays."""
    monkeypatch.setattr(cut, "__defaults__", (PIECE,))
    life = Life(tmp_path / "run", writer="thread")
    dense, table = torch.randn(1500, 1024), torch.randn(30_000, 32)
    later, touched = dense.clone(), table.clone()
    later[0] += 1
    touched[7::100] += 1
    states = [{"dense": dense, "table": table, "step": 1}, {"dense": later, "table": touched, "step": 2}]
    life.save(*states)
    newest = life.manifests()[-1]
    name = "dense" if of == "piece" else "table"
    pieces = newest.entries[name].pieces
    start, piece = (pieces[0].raw_nbytes, pieces[1]) if of == "piece" else (0, pieces[0])
    victim = chain_of(newest, name, start, piece)[0 if of == "delta" else -1]
    assert (victim.base is not None) == (of == "delta") and len(newest.files) > 1
    far = LocalStorage(tmp_path / "far")
    copy_snapshot(life.repository, adopt_run(RunText.of(life.repository), far), newest.info.id)
    flip_bit(life.root / newest.files[victim.file].name, victim.offset + victim.nbytes // 2)
    found = load([life.repository, Repository(far)])
    assert found is not None and same(found.state, states[1])
    assert [(one.entry, one.nbytes) for one in found.repairs] == [(name, victim.nbytes)]
