"""Snapshots of a `Trainer` leave as folders that transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from accelerate_ckpt import TransformersCallback
from ckpt_engine.cli.main import main
from tests.interop.training import same_tree, tiny_trainer
from tests.loop.runs import only, saved

STEPS = 8


def trained(
    folder: Path, *, ours: TransformersCallback | None = None, checkpoint: Path | None = None
) -> GPT2LMHeadModel:
    """The model of a training that is over."""
    trainer = tiny_trainer(folder, steps=STEPS, seed=0 if checkpoint is None else 9)
    resume = None if checkpoint is None else str(checkpoint)
    if ours is not None:
        trainer.add_callback(ours)
        resume = ours.resume_from(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == STEPS
    assert isinstance(trainer.model, GPT2LMHeadModel)
    return trainer.model


@pytest.mark.filterwarnings("ignore")
def test_a_snapshot_becomes_a_folder_that_trainer_resumes_from(tmp_path: Path) -> None:
    """From the middle of an epoch the Trainer alone ends where the run with our callback ended, bit for bit."""
    options = {"tiers": str(tmp_path / "run"), "every_n_steps": 4, "keep": {"last": 9}, "writer": "thread"}
    reference = trained(tmp_path / "first", ours=TransformersCallback(options))
    (snapshot,) = [one for one in saved(tmp_path / "run") if one.step == 4]
    root = only(tmp_path / "run", snapshot, tmp_path / "four")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(root), str(tmp_path / "checkpoint-4"), "--to", "transformers"])
    assert not ended.value.code
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert model.config.n_embd == reference.config.n_embd
    resumed = trained(tmp_path / "second", checkpoint=tmp_path / "checkpoint-4")
    same_tree(dict(resumed.state_dict()), dict(reference.state_dict()))
