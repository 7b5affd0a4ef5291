"""`AdaptiveCheckpoint` beside what else an Accelerate script does."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.tracking import GeneralTracker

from accelerate_ckpt import AdaptiveCheckpoint
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import ConfigError, MismatchError, ResumeError
from tests.accelerate.runs import durable, make_accelerator, train_accelerate
from tests.loop.runs import (
    LOADERS,
    Average,
    Case,
    Net,
    every_boundary,
    only,
    report,
    resume_only,
    saved,
    seed_everything,
)


class Script:
    """A script with everything prepared."""

    def __init__(self, *, seed: int = 0, model: Any = None) -> None:
        seed_everything(seed)
        self.accelerator: Accelerator = make_accelerator(Case())
        plain = model or Net()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            plain, torch.optim.Adam(plain.parameters(), lr=1e-2), LOADERS["shuffled"]()
        )
        self.ids: list[tuple[int, ...]] = []
        self.losses: list[str] = []
        self.ckpt: AdaptiveCheckpoint | None = None

    def track(self, options: Any) -> AdaptiveCheckpoint:
        self.ckpt = AdaptiveCheckpoint(self.accelerator, options)
        return self.ckpt

    def train(self, batches: int) -> None:
        """Train on the next batches of a new pass."""
        last = len(self.ids) + batches
        for x, y, ids in self.loader:
            durable(self.ckpt)
            loss = ((self.model(x) - y) ** 2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ids.append(tuple(ids.tolist()))
            self.losses.append(loss.item().hex())
            if len(self.ids) == last:
                break

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_it_comes_after_prepare(tmp_path: Path) -> None:
    """Before `prepare` there is nothing to save: the message says what to do, and that the accelerator comes first."""
    with pytest.raises(ConfigError, match="first argument is a str, not the Accelerator"):
        AdaptiveCheckpoint(str(tmp_path), make_accelerator(Case()))
    with pytest.raises(ConfigError, match=r"no optimizer yet.*after model, optimizer and loaders were prepared"):
        AdaptiveCheckpoint(make_accelerator(Case()), str(tmp_path))


def test_objects_prepared_later_are_refused(tmp_path: Path) -> None:
    """They would be missing after a resume; the first snapshot says so."""
    script = Script()
    ckpt = script.track(every_boundary(tmp_path))
    script.accelerator.register_for_checkpointing(Average(script.model))
    with pytest.raises(ConfigError, match="after AdaptiveCheckpoint was made"):
        script.train(3)
    ckpt.close()


class Remembers(GeneralTracker):
    """A tracker as of a user, without a service."""

    name = "remembers"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((step, values))


@pytest.mark.parametrize(("loggers", "least", "most"), [("on", 6, 6), ("full", 20, 99), ("off", 0, 0)])
def test_trackers_get_our_numbers_with_those_of_the_script(loggers: str, least: int, most: int, tmp_path: Path) -> None:
    """In the same call, for the same step, as many as `log.loggers` asks for; after the end they are gone."""
    script = Script()
    tracker = Remembers()
    script.accelerator.trackers = [tracker]
    ckpt = script.track({**every_boundary(tmp_path), "log": {"loggers": loggers}})
    script.train(3)
    script.accelerator.log({"loss": 0.5}, step=3)
    ckpt.close()
    script.accelerator.log({"loss": 0.4})
    (step, values), last = tracker.logged
    assert (step, values["loss"], last) == (3, 0.5, (None, {"loss": 0.4}))
    ours = [name for name in values if name.startswith("ckpt/")]
    assert least <= len(ours) <= most, ours
    assert ("ckpt/failed" in ours, "ckpt/committed" in ours) == (least > 0, least > 6)


def test_a_copy_has_not_begun(tmp_path: Path) -> None:
    """The copy has the options and leaves the run alone."""
    script = Script()
    ckpt = script.track(every_boundary(tmp_path))
    script.train(3)
    for copied in (copy.deepcopy(ckpt), pickle.loads(pickle.dumps(ckpt))):
        assert copied.config == ckpt._run.config
        assert (copied.epoch, copied.global_step, copied.resumed_batches) == (ckpt.epoch, ckpt.global_step, 0)
        copied.step()
        copied.close()
    script.train(3)
    ckpt.close()
    assert [one.step for one in saved(tmp_path)] == [1, 2, 4, 5]
    again = AdaptiveCheckpoint(Script().accelerator, copied.config)
    assert again.global_step == 5
    again.close()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that divide the state in other ways than DDP and FSDP get an error that says so."""
    script = Script()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ConfigError, match="supported with DDP and FSDP"):
        AdaptiveCheckpoint(script.accelerator, str(tmp_path))


def test_a_wrong_option_is_one_clear_error(tmp_path: Path) -> None:
    """The schema is that of the other adapters."""
    with pytest.raises(ConfigError, match="every_n_steps"):
        AdaptiveCheckpoint(Script().accelerator, str(tmp_path), every_n_step=3)


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """The message names the tensors, and the folder is free again."""
    first = Script()
    ckpt = first.track(every_boundary(tmp_path))
    first.train(4)
    ckpt.close()
    other = Script(model=torch.nn.Sequential(torch.nn.Linear(6, 1)))
    before = other.weights()
    with pytest.raises(MismatchError, match=r"does not fit this model.*\n.*missing in the snapshot"):
        AdaptiveCheckpoint(other.accelerator, resume_only(tmp_path))
    assert same(before, other.weights())
    with Checkpointer(str(tmp_path), writer="thread") as free:
        free.engine.start()


def test_save_state_and_load_state_go_on_working(tmp_path: Path) -> None:
    """A folder of a tracked run equals one of an untracked run, and loads into either."""
    plain = Script()
    plain.train(3)
    plain.accelerator.save_state(str(tmp_path / "plain"))
    tracked = Script()
    ckpt = tracked.track(every_boundary(tmp_path / "run"))
    tracked.train(3)
    tracked.accelerator.save_state(str(tmp_path / "tracked"))
    ckpt.close()
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "tracked").iterdir()) == names
    expected = plain.weights()
    plain.train(6)
    for folder in ("plain", "tracked"):
        loaded = Script(seed=5)
        ckpt = loaded.track(every_boundary(tmp_path / f"run of {folder}"))
        loaded.accelerator.load_state(str(tmp_path / folder))
        assert same(loaded.weights(), expected)
        loaded.train(6)
        assert loaded.losses == plain.losses[3:]
        ckpt.close()


def test_load_state_takes_the_place_of_a_resume(tmp_path: Path) -> None:
    """A script that loads another state by itself gets that state, not the position of our snapshot."""
    first = Script()
    ckpt = first.track(every_boundary(tmp_path / "run"))
    first.accelerator.save_state(str(tmp_path / "begin"))
    first.train(5)
    ckpt.close()
    again = Script(seed=9)
    ckpt = again.track(resume_only(tmp_path / "run"))
    assert ckpt.resumed_batches == 4
    again.accelerator.load_state(str(tmp_path / "begin"))
    assert ckpt.resumed_batches == 0
    again.train(5)
    assert again.losses == first.losses
    ckpt.close()


def hooked(script: Script) -> list[str]:
    """Hooks that save and load the model by themselves, as the scripts of diffusers do."""
    calls: list[str] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        calls.append("save")
        torch.save({"w": weights.pop()}, Path(folder) / "mine.pt")
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub" / "notes.json").write_text(json.dumps({"models": len(models)}))

    def load(models: list[Any], folder: str) -> None:
        calls.append("load")
        assert json.loads((Path(folder) / "sub" / "notes.json").read_text()) == {"models": 1}
        models.pop().load_state_dict(torch.load(Path(folder) / "mine.pt", weights_only=True)["w"])

    script.accelerator.register_save_state_pre_hook(save)
    script.accelerator.register_load_state_pre_hook(load)
    return calls


def test_hooks_of_save_state_and_load_state_are_honoured(tmp_path: Path) -> None:
    """What they write travels in the snapshot, what they take out is not stored, and the resume is exact."""
    reference = Script()
    reference.train(6)
    first = Script()
    calls = hooked(first)
    ckpt = first.track(every_boundary(tmp_path / "run"))
    first.train(4)
    ckpt.close()
    assert "save" in calls
    snapshot = saved(tmp_path / "run")[-1]
    tree = json.loads(snapshot.path.read_bytes())["manifest"]["tree"]
    assert "model" not in tree
    assert "hook_files" in tree
    again = Script(seed=3)
    calls = hooked(again)
    ckpt = again.track(resume_only(only(tmp_path / "run", snapshot, tmp_path / "copy")))
    assert calls == ["load"]
    again.train(6 - snapshot.batch)
    ckpt.close()
    assert again.losses == reference.losses[snapshot.batch :]
    assert same(again.weights(), reference.weights())


def test_end_training_takes_the_final_snapshot(tmp_path: Path) -> None:
    """The script run again has nothing to do; with more epochs it goes on exactly."""
    case = Case(epochs=2)
    finished = train_accelerate(case, every_boundary(tmp_path))
    assert saved(tmp_path)[-1].reason == "end"
    again = train_accelerate(case, every_boundary(tmp_path), seed=5)
    assert again.trace == []
    assert again.digest == finished.digest
    reference = train_accelerate(Case(epochs=3), None)
    longer = train_accelerate(Case(epochs=3), every_boundary(tmp_path), seed=6)
    assert longer.trace == reference.trace[len(finished.trace) :]
    assert longer.digest == reference.digest


def test_no_final_snapshot_while_an_exception_is_handled(tmp_path: Path) -> None:
    """What was to follow the last epoch did not happen: a snapshot that says so would lose it."""
    script = Script()
    ckpt = script.track(every_boundary(tmp_path))
    with pytest.raises(RuntimeError), ckpt:
        script.train(100)
        raise RuntimeError("evaluation failed")
    assert [one.reason for one in saved(tmp_path) if one.reason == "end"] == []
    assert "end_training" not in vars(script.accelerator)


def test_everything_is_given_back(tmp_path: Path) -> None:
    """After close() the objects are as Accelerate made them."""
    script = Script()
    kind = type(script.loader)
    ckpt = script.track(every_boundary(tmp_path))
    assert type(script.loader) is not kind
    script.train(2)
    ckpt.close()
    assert type(script.loader) is kind
    assert "end_training" not in vars(script.accelerator)
    assert list(script.accelerator._load_model_state_pre_hook) == []
    before = len(saved(tmp_path))
    script.train(3)
    assert len(saved(tmp_path)) == before


def test_the_report_says_what_came_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log and a file beside the snapshots have the report; it is final with the first batch."""
    first = Script()
    ckpt = first.track(every_boundary(tmp_path))
    first.train(4)
    ckpt.close()
    again = Script(seed=1)
    with caplog.at_level(logging.INFO, "ckpt_engine.accelerate"):
        ckpt = again.track(resume_only(tmp_path))
        again.train(1)
    ckpt.close()
    found = report(tmp_path)
    names = [one.name for one in found.restored]
    assert names == ["model", "optimizer", "data position", "random streams", "hidden state"]
    assert again.ids[:3] == first.ids[:3]  # its length decides when the script ends a pass
    assert found.not_restored == ()
    assert (found.step, found.epoch) == (3, 0)
    assert "continues in epoch 0 after 3 batches" in found.notes
    assert "resumed at step 3, epoch 0" in caplog.text


def test_a_loop_that_never_asks_a_prepared_loader_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Snapshots need a boundary; `step()` is one."""
    script = Script()
    ckpt = script.track(every_boundary(tmp_path))
    batch = next(iter(script.loader))
    for _ in range(100):
        script.model(batch[0]).mean().backward()
        script.optimizer.step()
    assert "call step() at the end of the loop's body" in caplog.text
    assert ckpt.global_step == 1
    ckpt.step()
    script.optimizer.step()
    assert ckpt.global_step == 2
    ckpt.close()


def test_the_scaler_is_saved_and_skipped_steps_are_not_counted(tmp_path: Path) -> None:
    """With a GradScaler some steps are skipped; the resumed run skips the same ones at the same scale."""

    def train(options: Any, seed: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
        seed_everything(seed)
        accelerator = make_accelerator(Case())
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        model = Net()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=1e-2), LOADERS["shuffled"]()
        )
        ckpt = None if options is None else AdaptiveCheckpoint(accelerator, options)
        trace = []
        for epoch in range(ckpt.epoch if ckpt is not None else 0, 3):
            for x, y, ids in loader:
                durable(ckpt)
                loss = ((model(x) - y) ** 2).mean() * (float("inf") if int(ids[0]) % 5 == 0 else 1.0)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                trace.append((epoch, tuple(ids.tolist()), accelerator.scaler.get_scale(), optimizer.step_was_skipped))
        accelerator.end_training()
        return trace, dict(model.state_dict())

    reference, weights = train(None, 0)
    assert any(entry[3] for entry in reference)
    train(every_boundary(tmp_path / "run"), 0)
    snapshots = saved(tmp_path / "run")[:-1]
    snapshot = snapshots[len(snapshots) // 2]
    resumed, found = train(resume_only(only(tmp_path / "run", snapshot, tmp_path / "copy")), 8)
    assert 0 < len(resumed) < len(reference)
    assert resumed == reference[-len(resumed) :]
    assert same(found, weights)


class Skips(Script):
    """As Accelerate's own examples resume: the first epoch leaves out what was trained."""

    def train_epochs(self, skip: Any) -> None:
        ckpt = self.ckpt
        assert ckpt is not None
        first, done, prepared = ckpt.epoch, ckpt.resumed_batches, self.loader
        for epoch in range(first, 3):
            self.loader = skip(prepared, done) if epoch == first and done else prepared
            self.train(-1)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_script_that_skips_by_itself_skips_once(batch: int, tmp_path: Path) -> None:
    """`accelerator.skip_first_batches` of a loader that stands behind these batches gives the loader."""
    whole = Skips()
    whole.track(every_boundary(tmp_path / "run"))
    whole.train_epochs(None)
    whole.accelerator.end_training()
    snapshot = next(one for one in saved(tmp_path / "run") if (one.epoch, one.batch) == (1, batch))
    root = only(tmp_path / "run", snapshot, tmp_path / "one")
    resumed = Skips(seed=9)
    resumed.track(resume_only(root))
    resumed.train_epochs(resumed.accelerator.skip_first_batches)
    assert resumed.ids == whole.ids  # it decides when a pass ends, so that it is state; `losses` only records
    assert len(resumed.losses) == len(whole.losses) - 6 - batch
    assert resumed.losses == whole.losses[len(whole.losses) - len(resumed.losses) :]
    assert any("skip_first_batches" in note for note in report(root).notes)
    resumed.accelerator.end_training()
    assert "skip_first_batches" not in vars(resumed.accelerator)


def test_a_script_that_skips_behind_our_back_is_stopped(tmp_path: Path) -> None:
    """The function makes a loader that is not followed: no step is done with its batches."""
    first = Script()
    first.track(every_boundary(tmp_path))
    first.train(3)
    resumed = Skips(seed=9)
    ckpt = resumed.track(resume_only(tmp_path))
    before = [one.detach().clone() for one in resumed.model.parameters()]
    with pytest.raises(ResumeError, match=r"not followed.*without skip_first_batches"):
        resumed.train_epochs(skip_first_batches)
    assert all(map(torch.equal, resumed.model.parameters(), before))
    ckpt.release()
