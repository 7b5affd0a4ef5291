"""`ckpt export` to folders and to torch files: each format is read by the framework that owns it."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_engine import Checkpointer
from ckpt_engine.data import rng
from ckpt_engine.loop.capture import Packer
from tests.interop.training import Loop, same_tree, tiny_trainer

Ckpt = Callable[..., Any]


@pytest.fixture(autouse=True)
def _streams_as_before() -> Any:
    """Frameworks put streams back; other tests must not notice."""
    before = rng.capture()
    yield
    rng.restore(before)


def _save(root: Path, state: dict[str, Any], step: int = 7) -> None:
    with Checkpointer(root, writer="thread") as checkpointer:
        checkpointer.save(state, step=step, epoch=1).wait(60)


def test_a_torch_file_has_the_whole_state(ckpt: Ckpt, tmp_path: Path) -> None:
    """Any state, read with `weights_only`, without what only the adapters put back."""
    state = Loop().trained(3).state()
    _save(tmp_path / "run", {**state, "ckpt_engine": {"rng": rng.capture()}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out.pt", "--to", "torch")
    assert result.code == 0, result.err
    same_tree(torch.load(tmp_path / "out.pt", weights_only=True), state)


@pytest.mark.filterwarnings("ignore")
def test_dcp_reads_the_folder_into_a_live_state_and_as_one_file(ckpt: Ckpt, tmp_path: Path) -> None:
    """`dcp.load` fills a state dict of the same form, `dcp_to_torch_save` needs none."""
    loop, fresh = Loop().trained(3), Loop(seed=5).trained(1)
    _save(tmp_path / "run", loop.state())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "dcp")
    assert not [one for one in heard if "torch.distributed" in str(one.message)]
    assert result.code == 0, result.err
    target = {"model": fresh.model.state_dict(), "optimizer": fresh.optimizer.state_dict(), "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "out")
    same_tree(target["model"], loop.model.state_dict())
    same_tree(target["optimizer"]["state"], loop.optimizer.state_dict()["state"])
    assert target["step"] == 3
    dcp_to_torch_save(tmp_path / "out", tmp_path / "one.pt")
    same_tree(torch.load(tmp_path / "one.pt", weights_only=False)["model"], loop.model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_accelerate_loads_the_folder(ckpt: Ckpt, tmp_path: Path) -> None:
    """`load_state` puts models, optimizer, scheduler, registered objects and all host streams back."""
    from accelerate import Accelerator

    loop, other = Loop().trained(3), nn.Linear(2, 2)
    streams = rng.capture()
    state = {**loop.state(), "second": other.state_dict(), "custom_checkpoint_0": {"best": 0.5}, "rng": streams}
    _save(tmp_path / "run", state)
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "accelerate")
    assert result.code == 0, result.err
    assert "models: model, second; optimizers: optimizer; schedulers: scheduler" in result.out

    class Best:
        best = 0.0

        def state_dict(self) -> dict[str, float]:
            return {"best": self.best}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.best = state["best"]

    accelerator, fresh, second, best = Accelerator(cpu=True), Loop(seed=5), nn.Linear(2, 2), Best()
    accelerator.prepare(fresh.model, second, fresh.optimizer, fresh.scheduler)
    accelerator.register_for_checkpointing(best)
    accelerator.load_state(str(tmp_path / "out"))
    assert rng.capture() == streams
    assert accelerator.step == 7
    assert best.best == 0.5
    same_tree(fresh.state()["model"], loop.state()["model"])
    same_tree(fresh.optimizer.state_dict(), loop.optimizer.state_dict())
    same_tree(fresh.scheduler.state_dict(), loop.scheduler.state_dict())
    same_tree(second.state_dict(), other.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_resumes_from_the_folder_as_from_its_own(ckpt: Ckpt, tmp_path: Path) -> None:
    """The Trainer ends with bitwise the same weights; `from_pretrained` reads the tied model."""
    from transformers import GPT2LMHeadModel

    trainer = tiny_trainer(tmp_path / "first", steps=4)
    trainer.train()
    own = tmp_path / "first/checkpoint-4"
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": torch.load(own / "optimizer.pt", weights_only=True),
        "scheduler": torch.load(own / "scheduler.pt", weights_only=True),
        "rng": rng.capture(),
        "trainer_state": json.loads((own / "trainer_state.json").read_text()),
        "files": {"config.json": (own / "config.json").read_bytes()},
    }
    _save(tmp_path / "run", state, step=4)
    out = tmp_path / "checkpoint-4"
    result = ckpt("export", tmp_path / "run", out, "--to", "transformers")
    assert result.code == 0, result.err
    assert "tied weights stored once: lm_head.weight = transformer.wte.weight" in result.out
    model = GPT2LMHeadModel.from_pretrained(out)
    same_tree(dict(model.state_dict()), dict(trainer.model.state_dict()))
    assert model.lm_head.weight is model.transformer.wte.weight
    ends = []
    for index, checkpoint in enumerate((own, out)):
        again = tiny_trainer(tmp_path / f"again{index}", steps=8, seed=9)
        again.train(resume_from_checkpoint=str(checkpoint))
        ends.append({**again.model.state_dict(), "step": torch.tensor(again.state.global_step)})
    assert int(ends[0]["step"]) == 8
    same_tree(*ends)


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_snapshot_becomes_an_accelerate_folder(ckpt: Ckpt, tmp_path: Path) -> None:
    """Its random streams are in the part that adapters pack, and are those of the snapshot's instant."""
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from safetensors.torch import load_file

    from lightning_ckpt import AdaptiveCheckpoint

    class AtTheEnd(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            self.streams = rng.capture()

    end, model = AtTheEnd(), BoringModel()
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[AdaptiveCheckpoint(tmp_path / "run", writer="thread"), end],
    )
    trainer.fit(model)
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "accelerate")
    assert result.code == 0, result.err
    assert "models: state_dict; optimizers: optimizer_states/0; schedulers: lr_schedulers/0" in result.out
    weights = load_file(tmp_path / "out/model.safetensors")
    same_tree(dict(sorted(weights.items())), dict(sorted(model.state_dict().items())))
    recorded = torch.load(tmp_path / "out/random_states_0.pkl", weights_only=False)
    assert recorded["step"] == 3
    assert recorded["torch_manual_seed"].numpy().tobytes() == end.streams["torch"]


def test_a_trainer_state_and_files_that_an_adapter_packs_are_found(ckpt: Ckpt, tmp_path: Path) -> None:
    """The adapter for transformers keeps them as texts beside its counters."""
    around = {
        "state": '{"global_step": 7, "log_history": [{"loss": 1.5}], "stateful_callbacks": {}}',
        "callbacks": [["Patience", '{"args": {}}'], ["Two", "1"], ["Two", "2"]],
        "files": {"config.json": '{"a": 1}'},
    }
    packed = Packer("ckpt_engine").pack({"surroundings": around, "rng": rng.capture()})
    _save(tmp_path / "run", {"model": nn.Linear(2, 2).state_dict(), "ckpt_engine": {"version": 1, "packed": packed}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "transformers")
    assert result.code == 0, result.err
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert state["log_history"] == [{"loss": 1.5}]
    assert state["stateful_callbacks"] == {
        "Patience": {"args": {}},
        "Two": [1, 2],
        "TrainerControl": {"args": {}, "attributes": {}},
    }
    assert (tmp_path / "out/config.json").read_text() == '{"a": 1}'
    assert (tmp_path / "out/rng_state.pth").exists()


def test_what_a_snapshot_lacks_is_said_with_what_can_be_exported_instead(ckpt: Ckpt, tmp_path: Path) -> None:
    """Refused also in a dry run, before anything is written."""
    _save(tmp_path / "run", {"table": [1, 2], "notes": {"a": "b"}})
    for form, why, instead in (
        ("accelerate", "has no weights", "--to torch or --to dcp"),
        ("transformers", "which has one model; it has: none", "--to accelerate"),
        ("lightning", "is not of a Lightning run", "--to torch"),
    ):
        for extra in ((), ("--dry-run",)):
            result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", form, *extra)
            assert (result.code, (tmp_path / "out").exists()) == (2, False)
            assert why in result.err
            assert instead in result.err
    _save(tmp_path / "weights", {"model": nn.Linear(2, 2).state_dict()})
    result = ckpt("export", tmp_path / "weights", tmp_path / "out", "--to", "transformers")
    assert "has no model configuration (config.json)" in result.err
    assert "--to safetensors" in result.err
    result = ckpt("export", tmp_path / "weights", tmp_path / "out", "--to", "accelerate")
    assert "no optimizer state in the snapshot" in result.out
    assert "no random streams in the snapshot" in result.out


def test_a_folder_appears_whole_or_not_at_all(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder is replaced by force only, and as a whole; an error leaves it, and nothing else, behind."""
    _save(tmp_path / "run", {"model": nn.Linear(2, 2).state_dict()})
    out = tmp_path / "outs/out"
    out.mkdir(parents=True)
    (out / "mine").write_text("mine")
    common = ("export", tmp_path / "run", out, "--to", "accelerate")
    assert "exists already\n      do:  --force replaces it" in ckpt(*common).err
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", _full)
        patch.setattr("ckpt_engine.interop.weight_files.save_file", _full)
        result = ckpt(*common, "--force")
        assert result.code == 2
        assert "CKPT301" in result.err
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "mine").read_text() == "mine"
    assert ckpt(*common, "--force").code == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert "is a file" in ckpt(*common[:2], tmp_path / "run/ckpt.json", *common[3:], "--force").err


def test_a_file_name_of_the_snapshot_cannot_leave_the_folder(ckpt: Ckpt, tmp_path: Path) -> None:
    """The snapshot names the files that go with the weights; names that lead out of the folder are left out."""
    files = {"config.json": b"{}", "../evil.json": b"{}", "..": b"{}", "/tmp/evil.json": b"{}", "optimizer.pt": b""}
    _save(tmp_path / "run", {"model": nn.Linear(2, 2).state_dict(), "files": files})
    result = ckpt("export", tmp_path / "run", tmp_path / "outs", "--to", "transformers")
    assert result.code == 0, result.err
    assert "this is for from_pretrained, and not for resuming" in result.out
    assert {path.name for path in (tmp_path / "outs").iterdir()} == {"config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "outs"}


def test_weights_that_safetensors_cannot_hold_become_a_torch_file(ckpt: Ckpt, tmp_path: Path) -> None:
    """Accelerate and transformers read that too; the note says why."""
    _save(tmp_path / "run", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "accelerate")
    assert "weights are in pytorch_model.bin: safetensors has no torch.complex128" in result.out
    assert torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)["w"].tolist() == [1, 1]


def test_streams_survive_the_foreign_form() -> None:
    """Random streams come back from any position, cached normals included."""
    from ckpt_engine.interop import legacy_streams

    for draws in range(4):
        random.seed(draws)
        np.random.seed(draws)
        for _ in range(draws):
            random.gauss(0, 1)
            np.random.standard_normal()
            torch.rand(draws)
        state = rng.capture_host()
        assert legacy_streams.from_legacy(legacy_streams.to_legacy(state)) == state


def _full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")
