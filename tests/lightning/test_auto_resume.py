"""What `ckpt_path="auto"` becomes: the newest usable snapshot, a fresh start, or a refusal that says why."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine import checkpointer
from ckpt_engine.errors import (
    ConfigError,
    MismatchError,
    NoUsableSnapshotError,
    ResumeError,
    UnstorableLeafError,
)
from ckpt_engine.snapshot import writer_link
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import (
    BATCH,
    BATCHES,
    Augmented,
    Case,
    Model,
    Recorder,
    every_batch,
    fit,
    make_trainer,
    only,
    resumer,
    saved,
    seed_everything,
    train,
)
from tests.lightning.runs import tail as tail_of


def val_loader() -> Any:
    return DataLoader(Augmented(8), batch_size=4)


def test_the_first_run_starts_fresh_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One log line, and the run is the one without the callback."""
    caplog.set_level(logging.INFO, logger="lightning_ckpt")
    reference = fit(Case())
    first = fit(Case(), [resumer(tmp_path)], ckpt_path="auto")
    assert first.trace == reference.trace
    assert first.digest == reference.digest
    lines = [r.getMessage() for r in caplog.records if r.name == "lightning_ckpt"]
    fresh = f"ckpt_path='auto': no snapshot in {tmp_path} yet, starting fresh"
    assert lines[0] == f"{fresh}; snapshots every 1000000000 steps"
    assert len(lines) == 2, "and one at the end"


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_scoring_untrained_weights_is_refused(verb: str, tmp_path: Path) -> None:
    """Outside of fit an empty folder is an error, not a silent evaluation of random weights."""
    model = Model(Case(), [])
    model.test_step = model.validation_step  # type: ignore[method-assign]
    model.predict_step = lambda batch: model.net(batch[0])  # type: ignore[method-assign,assignment]
    trainer = make_trainer(Case(val=1.0), [resumer(tmp_path)], False)
    with pytest.raises(ResumeError, match=r"no snapshot in .*untrained weights"):
        getattr(trainer, verb)(model, val_loader(), ckpt_path="auto")


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_other_stages_load_the_newest_weights(verb: str, tmp_path: Path) -> None:
    """They take no lease: a training run may go on writing meanwhile."""
    trained = fit(Case(), [resumer(tmp_path, at_end=True)])
    holder = AdaptiveCheckpoint(str(tmp_path), writer="thread")
    model = Model(Case(), [])
    model.predict_step = lambda batch: model.net(batch[0])  # type: ignore[method-assign,assignment]
    trainer = make_trainer(Case(val=1.0), [holder], False)
    getattr(trainer, verb)(model, val_loader(), ckpt_path="auto")
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_a_store_with_nothing_usable_refuses_to_start_over(tmp_path: Path) -> None:
    """Every snapshot is rejected with its reason; training does not start from scratch."""
    fit(Case(), every_batch(tmp_path))
    for snapshot in saved(tmp_path):
        snapshot.path.write_bytes(snapshot.path.read_bytes()[:-40])
    with pytest.raises(NoUsableSnapshotError, match=r"none of the 1[0-9] snapshots"):
        fit(Case(), [resumer(tmp_path)], ckpt_path="auto")


@pytest.mark.long
def test_a_damaged_snapshot_is_passed_over_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next older one is used, exactly; log and JSON say what was rejected and why."""
    reference = fit(Case())
    fit(Case(), every_batch(tmp_path, at_end=False))
    *_, older, newest = saved(tmp_path)
    data = next((tmp_path / "data").glob(f"{newest.id}*"))
    damaged = bytearray(data.read_bytes())
    damaged[-100] ^= 1
    data.write_bytes(damaged)
    resumed = fit(Case(), [resumer(tmp_path)], ckpt_path="auto", seed=9)
    assert resumed.trace == tail_of(reference.trace, older.epoch, older.batch)
    assert resumed.digest == reference.digest
    report = json.loads((tmp_path / "resume-report.json").read_text())
    assert report["snapshot"] == older.id
    assert [r["id"] for r in report["rejected"]] == [newest.id]
    assert "CKPT401" in caplog.text


def test_the_report_lists_what_was_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After an exact resume nothing is on the list of things that were not restored."""
    caplog.set_level(logging.INFO, logger="lightning_ckpt")
    fit(Case(schedule=("decay", "step", "")), every_batch(tmp_path, at_end=False))
    fit(Case(schedule=("decay", "step", "")), [resumer(tmp_path)], ckpt_path="auto", seed=9)
    report = json.loads((tmp_path / "resume-report.json").read_text())
    names = {part["name"] for part in report["restored"]}
    assert names == {
        "weights",
        "optimizers",
        "schedulers",
        "loop counters",
        "random streams",
        "data position",
        "running means",
    }
    assert report["not_restored"] == []
    assert "continues in epoch 2 after 5 batches" in report["notes"]
    assert "resumed at step 17" in caplog.text


class Batches:
    """Training data that is no DataLoader."""

    def __iter__(self) -> Any:
        return iter(DataLoader(Augmented(), batch_size=BATCH))

    def __len__(self) -> int:
        return BATCHES


def test_data_without_a_position_is_reported(tmp_path: Path) -> None:
    """Anything iterable can be training data; what is not a DataLoader starts again, and the report says so."""
    case = Case(loader=Batches)
    fit(case, every_batch(tmp_path, at_end=False))
    fit(case, [resumer(tmp_path)], ckpt_path="auto")
    missing, repeated = json.loads((tmp_path / "resume-report.json").read_text())["not_restored"]
    assert missing["name"] == "position of training loader 0, a Batches"
    assert "starts again at its beginning" in missing["why"]
    assert repeated["name"] == "repeated steps"


class Fetches(Model):
    """Asks for its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        (x, y, ids), batch_idx, _ = next(dataloader_iter)
        loss = self.scale * ((self.net(x) - y) ** 2).mean()
        self.trace.append(("train", self.current_epoch, batch_idx, tuple(ids.tolist()), float(loss.detach()).hex()))
        return loss


def test_a_model_that_fetches_by_itself_continues(tmp_path: Path) -> None:
    """Exact where it holds no batch between two steps; the report says that this is on the model."""
    outcomes = []
    for callbacks, ckpt_path, seed in (
        ([], None, 0),
        (every_batch(tmp_path, at_end=False), None, 0),
        ([resumer(tmp_path)], "auto", 9),
    ):
        seed_everything(seed)
        trace: list[Any] = []
        train(make_trainer(Case(), callbacks, Recorder(trace)), Fetches(Case(), trace), Case(), ckpt_path)
        outcomes.append(trace)
    reference, watched, resumed = outcomes
    assert watched == reference
    assert resumed == tail_of(reference, 2, 5)
    (missing,) = json.loads((tmp_path / "resume-report.json").read_text())["not_restored"]
    assert missing["name"] == "batches fetched ahead by the model"


class OtherModel(Model):
    """Has a layer more, and another one of other size."""

    def __init__(self, case: Case, trace: list[Any]) -> None:
        super().__init__(case, trace)
        self.net[4] = nn.Linear(8, 2)
        self.head = nn.Linear(2, 1)


def test_another_model_is_named_before_data_is_read(tmp_path: Path) -> None:
    """The manifest is enough: the mismatch is found with all data files gone."""
    fit(Case(), [resumer(tmp_path, at_end=True)])
    for data in (tmp_path / "data").iterdir():
        data.write_bytes(bytes(data.stat().st_size))
    trainer = make_trainer(Case(), [resumer(tmp_path)], False)
    with pytest.raises(MismatchError) as caught:
        train(trainer, OtherModel(Case(), []), Case(), "auto")
    text = str(caught.value)
    assert "head.weight" in text
    assert "net.4.weight: [1, 8] saved, [2, 8] here" in text


def test_a_folder_of_another_trainer_is_named_as_such(tmp_path: Path) -> None:
    """Not as one of another model: no weight of a plain loop's snapshot has the place that Lightning gives it."""
    with checkpointer.Checkpointer(str(tmp_path), writer="thread") as plain:
        plain.save({"model": nn.Linear(2, 1).state_dict()}, step=1).wait(60)
    with pytest.raises(ResumeError, match="was not taken in a Lightning run"):
        fit(Case(), [resumer(tmp_path)], ckpt_path="auto", max_epochs=1)


def test_a_run_that_was_not_closed_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell whose fit failed, and whose callbacks failed with it, is run again: it goes on at once."""
    monkeypatch.setattr(writer_link, "LEASE_WAIT_SECONDS", 0.0)

    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raise KeyError("before others hear of it")

    case = Case(trainer={"max_epochs": 2})
    reference = fit(case, [])
    with pytest.raises(KeyError) as kept:
        fit(case, [Failing(), *every_batch(tmp_path)])
    resumed = fit(case, every_batch(tmp_path), ckpt_path="auto", seed=5)
    trained = [entry for entry in resumed.trace if entry[0] == "train"]
    assert trained[0][3] == 3
    assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :]
    assert kept.tb is not None


def test_a_fit_that_lost_its_run_goes_on_without_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody opens a second Checkpointer on the same folder by mistake, in the same process: that is said."""
    others = []

    class Second(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                others.append(checkpointer.Checkpointer(str(tmp_path), writer="thread"))
                others[0].engine.start()

    outcome = fit(Case(trainer={"max_epochs": 1}), [every_batch(tmp_path)[0], Second()])
    others[0].close()
    assert len([entry for entry in outcome.trace if entry[0] == "train"]) == 6
    assert "was not closed" in caplog.text
    assert saved(tmp_path)[-1].step == 2


def test_a_forgotten_ckpt_path_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fresh start beside existing snapshots is allowed, with a warning that says how to continue instead."""
    fit(Case(), [resumer(tmp_path, at_end=True)])
    fit(Case(), [resumer(tmp_path)])
    assert "To resume from them: pass ckpt_path='auto' to fit" in caplog.text


def test_fast_dev_run_neither_reads_nor_writes(tmp_path: Path) -> None:
    """The callback does nothing in a `fast_dev_run`."""
    fit(Case(), [resumer(tmp_path, at_end=True)])
    before = sorted(tmp_path.rglob("*"))
    outcome = fit(Case(), every_batch(tmp_path)[:1], ckpt_path="auto", fast_dev_run=True)
    assert len([e for e in outcome.trace if e[0] == "train"]) == 1
    assert sorted(tmp_path.rglob("*")) == before


class FindRate(LearningRateFinder):
    """The tuner that runs training loops of its own before training starts."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=6, update_attr=False, early_stop_threshold=None)


def test_the_learning_rate_finder_takes_no_snapshots(tmp_path: Path) -> None:
    """Its batches are not training; the first snapshot is of the first real batch, and the run resumes."""
    case = Case(trainer={"default_root_dir": str(tmp_path / "logs")})
    fit(case, [*every_batch(tmp_path / "run"), FindRate()])
    snapshots = saved(tmp_path / "run")
    assert len(snapshots) <= 19
    assert [(s.epoch, s.batch) for s in snapshots] == sorted((s.epoch, s.batch) for s in snapshots)
    assert snapshots[0].step <= 1


# ---- beside Lightning's own checkpoints


def model_checkpoint(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True, every_n_train_steps=4)


def test_files_of_model_checkpoint_load_without_us(tmp_path: Path) -> None:
    """They contain nothing of ours, and plain Lightning resumes from them."""
    case = Case(val=1, trainer={"enable_checkpointing": True}, needs_epoch_start=False)
    fit(case, [*every_batch(tmp_path / "run"), model_checkpoint(tmp_path / "files")])
    last = tmp_path / "files" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert "ckpt_engine" not in content
    assert not any("AdaptiveCheckpoint" in key or "FenceGuard" in key for key in content["callbacks"])
    assert "combined_loader" not in content["loops"]["fit_loop"]["state_dict"]
    plain = fit(case, [model_checkpoint(tmp_path / "plain")], ckpt_path=str(last))
    assert plain.trainer.global_step == 18


@pytest.mark.long
@pytest.mark.parametrize("which", ["best", "last"])
def test_ckpt_path_best_and_last_are_lightnings(which: str, tmp_path: Path) -> None:
    """With the callback present they mean what they always mean."""
    case = Case(val=1, trainer={"enable_checkpointing": True})
    checkpoint = model_checkpoint(tmp_path / "files")
    trained = fit(case, [*every_batch(tmp_path / "run"), checkpoint])
    results = trained.trainer.validate(trained.model, val_loader(), ckpt_path=which, verbose=False)
    path = checkpoint.best_model_path if which == "best" else checkpoint.last_model_path
    expected = torch.load(path, weights_only=True)["state_dict"]
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, expected[name])
    assert len(results) == 1


def test_save_checkpoint_works_as_before(tmp_path: Path) -> None:
    """`trainer.save_checkpoint` in the middle of training writes a plain file and disturbs nothing."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "mine.ckpt")

    case = Case(needs_epoch_start=False)
    reference = fit(case, [Save()])
    watched = fit(case, [*every_batch(tmp_path / "run"), Save()])
    assert watched.trace == reference.trace
    path = str(tmp_path / "mine.ckpt")
    assert fit(case, [resumer(tmp_path / "new")], ckpt_path=path).trainer.global_step == 18


@pytest.mark.long
@pytest.mark.parametrize("batch", [2, 3])
def test_lightning_alone_resumes_from_the_content_of_a_snapshot(batch: int, tmp_path: Path) -> None:
    """Without our own key it is a Lightning checkpoint: every batch and validation happens once, steps are right."""
    case = Case(val=3, needs_epoch_start=False)
    reference = fit(case, every_batch(tmp_path / "run"))
    snapshot = next(s for s in saved(tmp_path / "run") if (s.epoch, s.batch) == (1, batch))
    engine = checkpointer.Checkpointer(str(tmp_path / "run"))
    state = engine.load(step=snapshot.step)
    assert state is not None
    del state["ckpt_engine"]
    torch.save(state, tmp_path / "exported.ckpt")
    plain = fit(case, ckpt_path=str(tmp_path / "exported.ckpt"))
    expected = tail_of(reference.trace, 1, batch)
    assert [e[:2] for e in plain.trace if e[0] == "log"] == [e[:2] for e in expected if e[0] == "log"]
    assert [e[:3] for e in plain.trace if e[0] == "val"] == [e[:3] for e in expected if e[0] == "val"]


def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_NODEID", "0")


@pytest.mark.parametrize("newer", [True, False])
def test_a_newer_slurm_file_wins(newer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requeue file is used if and only if it is of a later step than our newest snapshot."""
    case = Case(trainer={"default_root_dir": str(tmp_path)})
    short = Case(trainer={"max_epochs": 1})
    long = Case(trainer={"max_epochs": 2})
    ours, theirs = (short, long) if newer else (long, short)
    fit(ours, [resumer(tmp_path / "run", at_end=True)])
    fit(theirs).trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    slurm(monkeypatch)
    resumed = fit(case, [resumer(tmp_path / "run")], ckpt_path="auto", plugins=[])
    assert resumed.trainer.global_step == 18
    used = str(resumed.trainer.ckpt_path)
    assert ("hpc_ckpt_1.ckpt" in used) == newer
    assert len([e for e in resumed.trace if e[0] == "train"]) == 6


def test_two_callbacks_with_two_folders_share_a_trainer(tmp_path: Path) -> None:
    """Both take snapshots; a restart resumes from the one that has some."""
    reference = fit(Case())
    both = [*every_batch(tmp_path / "a"), *every_batch(tmp_path / "b")]
    assert fit(Case(), both, ckpt_path="auto").trace == reference.trace
    assert saved(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    newest = [s for s in saved(tmp_path / "a") if s.kind != "finished"][-1]
    only(tmp_path / "a", newest, tmp_path / "c")
    resumed = fit(Case(), [resumer(tmp_path / "c"), resumer(tmp_path / "b")], ckpt_path="auto", seed=9)
    assert resumed.trace == tail_of(reference.trace, newest.epoch, newest.batch)


def test_two_callbacks_of_one_folder_are_refused(tmp_path: Path) -> None:
    """The error comes before training begins; one that is there twice is two."""
    ckpt = resumer(tmp_path)
    for both in ([ckpt, resumer(tmp_path)], [ckpt, ckpt]):
        with pytest.raises(ConfigError, match="two AdaptiveCheckpoint of this Trainer write"):
            fit(Case(), both, ckpt_path="auto")


def test_the_folder_as_ckpt_path_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """It is no file that Lightning reads."""
    fit(Case(), [resumer(tmp_path)], ckpt_path="auto")
    with pytest.raises(ConfigError, match=r"is a folder of snapshots.*ckpt_path='auto'"):
        fit(Case(), [resumer(tmp_path)], ckpt_path=str(tmp_path))


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies that divide the state in other ways than the supported ones get an error that says so."""

    class Divides(DDPStrategy): ...

    monkeypatch.setattr("lightning.pytorch.trainer.trainer.Trainer.world_size", 2)
    callback = resumer(tmp_path)
    with pytest.raises(ConfigError, match="with DDP, FSDP and ModelParallelStrategy"):
        callback.setup(make_trainer(Case(), [callback], False, strategy=Divides()), Model(Case(), []), "fit")


# ---- what cannot be stored


class WithHyperParameters(Model):
    """Saves a function among its hyper-parameters, as people do."""

    def __init__(self, case: Case, trace: list[Any], activation: Any = torch.relu, width: int = 8) -> None:
        super().__init__(case, trace)
        self.save_hyperparameters("activation", "width")


def test_hyper_parameters_that_need_pickle_are_left_out(tmp_path: Path) -> None:
    """They are not needed to resume; the others are kept and the report names them."""
    for _ in range(2):
        trainer = make_trainer(Case(), [resumer(tmp_path, every_n_steps=7)], Recorder([]))
        train(trainer, WithHyperParameters(Case(), []), Case(), "auto")
    tree = json.loads(saved(tmp_path)[-1].path.read_bytes())["manifest"]["tree"]
    assert tree["hyper_parameters"].keys() == {"width"}
    notes = json.loads((tmp_path / "resume-report.json").read_text())["notes"]
    assert any(note.startswith("hyper_parameters/activation was not stored") for note in notes)


def test_a_callback_state_that_needs_pickle_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error comes before the first batch and names the leaf."""

    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    with pytest.raises(UnstorableLeafError, match=r"callbacks/.*Odd/thing"):
        fit(Case(), [resumer(tmp_path), Odd()])


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    """Nothing foreign is ever written to."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Exception, match="CKPT402"):
        fit(Case(), [resumer(tmp_path)])
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    shutil.rmtree(tmp_path)


def test_an_exact_resume_is_not_called_unreliable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns of every loader without a `state_dict`; ours are put back. Without us the warning is right."""
    fit(Case(), every_batch(tmp_path / "run"))
    middle = next(one for one in saved(tmp_path / "run") if one.epoch == 1 and one.batch == 2)
    always = partial(warnings.simplefilter, "always")
    with warnings.catch_warnings(record=True) as caught:
        monkeypatch.setattr(warnings, "simplefilter", lambda *_, **__: always())
        fit(Case(), [resumer(only(tmp_path / "run", middle, tmp_path / "one"))], ckpt_path="auto")
        assert "not resumable" not in " ".join(str(one.message) for one in caught)
        writes = ModelCheckpoint(tmp_path, every_n_train_steps=8)
        trainer = make_trainer(Case(), [writes], False, max_steps=8, enable_checkpointing=True)
        train(trainer, Case().model(Case(), []), Case(), None)
        plain = next(tmp_path.glob("*.ckpt"))
        model = Case().model(Case(), [])
        model.scale = 1.0  # Lightning by itself leaves out the hook that sets it
        train(make_trainer(Case(), [], False, max_steps=9), model, Case(), str(plain))
        assert "not resumable" in " ".join(str(one.message) for one in caught)
