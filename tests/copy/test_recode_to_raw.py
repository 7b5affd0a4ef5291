"""A run whose folder has differences goes on with a writer that stores raw bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CorruptError
from ckpt_engine.store.decode import require_decodable
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage

WIDTH = 1024


class Run:
    """A layer trained by AdamW whose learning rate can become nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randn(8, WIDTH)) ** 2).mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three snapshots, of which two are predicted steps of Adam."""
    made = Run()
    with Checkpointer(tiers=[{"url": str(tmp_path / "run"), "codec": "delta"}], keep={"last": 10}) as ckpt:
        for step in range(1, 4):
            made.step()
            ckpt.save(made.state(), step=step).wait()
    assert any(piece.group for entry in newest(tmp_path).entries.values() for piece in entry.pieces)
    return made


def newest(folder: Path) -> Manifest:
    repository = Repository(LocalStorage(folder / "run"))
    return repository.read(repository.ids()[-1].id)


def test_weights_that_did_not_change_stay_whole_when_their_moments_are_written_again(run: Run, tmp_path: Path) -> None:
    """They were decoded from the moments: a reference to them alone could not be read."""
    with Checkpointer(tmp_path / "run", keep={"last": 1}) as ckpt:
        assert ckpt.load(into=run.state()) is not None
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        run.step()
        ckpt.save(run.state(), step=4).wait()
    with Checkpointer(tmp_path / "run") as ckpt:
        state = ckpt.load()
        assert ckpt.loaded is not None and ckpt.loaded.info.step == 4 and not ckpt.loaded.rejected
    assert state is not None and torch.equal(state["model"]["weight"], run.model.weight)


def test_a_manifest_that_lacks_what_decoding_takes_is_not_committed(run: Run, tmp_path: Path) -> None:
    """Every stored byte of it would be right, and no load would succeed."""
    manifest = newest(tmp_path)
    require_decodable(manifest)
    level, entries = next(iter(manifest.bases.items()))
    name = next(iter(entries))
    bases = {**manifest.bases, level: {one: pieces for one, pieces in entries.items() if one != name}}
    broken = replace(manifest, bases=bases)
    with pytest.raises(CorruptError):
        Repository(LocalStorage(tmp_path / "run")).commit(broken)


def test_a_process_that_drops_subnormal_numbers_reads_predictions_all_the_same(run: Run, tmp_path: Path) -> None:
    """Its mode is that of the threads it starts, and they decode."""
    supported = torch.set_flush_denormal(True)
    try:
        if not supported:
            pytest.skip("this processor has no such mode")
        with Checkpointer(tmp_path / "run") as ckpt:
            state = ckpt.load()
            assert ckpt.loaded is not None and ckpt.loaded.info.step == 3
    finally:
        torch.set_flush_denormal(False)
    assert state is not None and torch.equal(state["model"]["weight"], run.model.weight)
