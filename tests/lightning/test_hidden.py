"""A Lightning run resumes exactly although model, data module and callbacks carry state that no `state_dict` names."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelPruning
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset

from ckpt_engine.errors import MismatchError
from ckpt_engine.loop import failing_loop
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import HAS_AVERAGING
from tests.support.digests import seed_everything

EPOCHS = 3
BATCHES = 4


class CrashError(Exception):
    """The process dies here."""


class Noisy(Dataset[Any]):
    """Samples with noise from a stream of its own."""

    def __init__(self) -> None:
        self.dice = random.Random(5)

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index + self.dice.random())


class Data(pl.LightningDataModule):
    """Scales its samples by a curriculum that a callback moves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.noisy = Noisy()

    def train_dataloader(self) -> Any:
        return DataLoader(self.noisy, batch_size=2, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch * self.scale


class Curriculum(Callback):
    """Counts batches and epochs, and makes the task harder."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0
        self.began: float | None = time.time()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.began = time.time()
        trainer.datamodule.scale = 1.0 + 0.1 * self.batches + self.epochs
        trainer.gradient_clip_val = 0.01 * self.batches


class Net(pl.LightningModule):
    """A queue of old outputs, a running mean and a dropout rate that grows."""

    def __init__(self, losses: list[str], crash_at: int | None) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 1), nn.Dropout(0.1)
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.ema: dict[str, torch.Tensor] = {}
        self._calls = 0
        self.write = losses.append  # of a list that is no attribute: what this process alone does
        self.crash_at = crash_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.crash_at:
            raise CrashError
        self._calls += 1
        self.drop.p = 0.1 + 0.01 * self._calls
        out = self.layer(self.drop(batch)).squeeze(1)
        self.queue = torch.cat([self.queue[2:], out.detach()])
        for name, parameter in self.layer.named_parameters():
            self.ema[name] = 0.9 * self.ema.get(name, parameter.detach()) + 0.1 * parameter.detach()
        loss = (out - self.queue.mean() - self.ema["weight"].sum()).square().mean() / (1 + self._calls)
        self.write(f"{self.global_step} {loss.item().hex()}")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Durable(Callback):
    """Waits until each snapshot is."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self.ckpt = ckpt

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.ckpt._run is not None
        self.ckpt._run.engine.wait(60)


def fit(folder: Path, seed: int, crash_at: int | None, **options: Any) -> list[str]:
    """One process: the losses of its steps as text, with their step."""
    seed_everything(seed)
    losses: list[str] = []
    ckpt = AdaptiveCheckpoint(folder, **{"every_n_steps": 1, **options})
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[Curriculum(), ckpt, Durable(ckpt)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    try:
        trainer.fit(Net(losses, crash_at), datamodule=Data(), ckpt_path="auto")
    except CrashError:
        assert crash_at is not None
    return losses


class Tally(Callback):
    """Counts for all of its objects, and the model follows."""

    seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        Tally.seen += 1
        pl_module.scale = 1 + Tally.seen / 10


class Rated(pl.LightningModule):
    """Its learning rate is looked for before it trains."""

    def __init__(self, crash_at: int | None) -> None:
        super().__init__()
        self.layer, self.lr, self.scale, self.crash_at = nn.Linear(3, 1), 1e-3, 1.0, crash_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.crash_at:
            raise CrashError
        return (self.layer(batch) * self.scale - 1).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(48.0).view(16, 3) / 48, batch_size=4, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


class LateFinder(LearningRateFinder):
    """Searches when the last epoch begins, as while a model is tuned finer."""

    searched: list[int]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == EPOCHS - 1:
            self.lr_find(trainer, pl_module)

    def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.searched.append(trainer.global_step)
        super().lr_find(trainer, pl_module)


def find_and_fit(
    folder: Path,
    seed: int,
    crash_at: int | None,
    kind: type[LearningRateFinder] = LearningRateFinder,
    model: type[Rated] = Rated,
    *others: Callback,
) -> tuple[list[Any], float, int]:
    """One process: weights, the rate that it found, and what the class of its callback has counted."""
    seed_everything(seed)
    Tally.seen = 0
    ckpt, net = AdaptiveCheckpoint(folder / "run", every_n_steps=1), model(crash_at)
    finder = kind(num_training_steps=4, early_stop_threshold=None)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[*others, finder, Tally(), ckpt, Durable(ckpt)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    try:
        trainer.fit(net, ckpt_path="auto")
    except CrashError:
        assert crash_at is not None
    return [one.tolist() for one in net.parameters()], net.lr, Tally.seen


@pytest.mark.skipif(not HAS_AVERAGING, reason="a run of Lightning 2.5 that looks for a rate starts fresh, and says so")
@pytest.mark.filterwarnings("ignore")
def test_a_found_rate_and_what_a_class_counts_go_on(tmp_path: Path) -> None:
    """The search for a learning rate is no training, and a restart does not begin with it again."""
    whole = find_and_fit(tmp_path / "whole", 1, None)
    find_and_fit(tmp_path, 1, 5)
    find_and_fit(tmp_path, 2, 9)
    assert find_and_fit(tmp_path, 3, None) == whole
    assert report(tmp_path / "run")["not_restored"] == []


@pytest.mark.skipif(not HAS_AVERAGING, reason="a run of Lightning 2.5 that looks for a rate starts fresh, and says so")
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_does_not_search_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its search could be disturbed, and end with another rate; the report says that there is none."""
    searches: list[int] = []
    searched = LearningRateFinder.lr_find
    monkeypatch.setattr(LearningRateFinder, "lr_find", lambda *of: (searches.append(1), searched(*of))[1])
    find_and_fit(tmp_path, 1, 5)
    assert len(searches) == 1
    find_and_fit(tmp_path, 2, None)
    assert len(searches) == 1
    assert any("does not search again" in note for note in report(tmp_path / "run")["notes"])


@pytest.mark.skipif(not HAS_AVERAGING, reason="a run of Lightning 2.5 that looks for a rate starts fresh, and says so")
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_searches_where_the_run_would_have(tmp_path: Path) -> None:
    """A search that is still to come belongs to the run; one that is over does not come again."""
    LateFinder.searched = []
    whole = find_and_fit(tmp_path / "whole", 1, None, LateFinder)
    assert LateFinder.searched == [8]
    find_and_fit(tmp_path, 1, 5, LateFinder)
    find_and_fit(tmp_path, 2, 10, LateFinder)
    assert LateFinder.searched == [8, 8]
    assert find_and_fit(tmp_path, 3, None, LateFinder) == whole
    assert LateFinder.searched == [8, 8]


class Validated(Rated):
    """Makes its loaders itself, each time that it is asked."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.skipif(not HAS_AVERAGING, reason="a run of Lightning 2.5 that looks for a rate starts fresh, and says so")
@pytest.mark.filterwarnings("ignore")
def test_validation_loaders_that_a_search_has_dropped_do_not_end_the_run(tmp_path: Path) -> None:
    """The search makes loaders for itself; the first boundary after it asked those for their position."""
    whole = find_and_fit(tmp_path / "whole", 1, None, model=Validated)
    find_and_fit(tmp_path, 1, 5, model=Validated)
    assert find_and_fit(tmp_path, 3, None, model=Validated) == whole


class Sized(Validated):
    """How many samples a batch has is looked for before it trains."""

    batch_size = 1

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(48.0).view(16, 3) / 48, batch_size=self.batch_size, shuffle=True)


@pytest.mark.skipif(not HAS_AVERAGING, reason="a run of Lightning 2.5 that looks for a rate starts fresh, and says so")
@pytest.mark.filterwarnings("ignore")
def test_a_found_batch_size_goes_on(tmp_path: Path) -> None:
    """The search makes loaders of validation while it trains, and a resumed fit has batches of the size it found."""

    def run(folder: Path, seed: int, crash_at: int | None) -> Any:
        finder = BatchSizeFinder(steps_per_trial=1, max_trials=2)
        found = find_and_fit(folder, seed, crash_at, LearningRateFinder, Sized, finder)
        assert finder.optimal_batch_size == 4
        return found

    whole = run(tmp_path / "whole", 1, None)
    run(tmp_path, 1, 5)
    assert run(tmp_path, 2, None) == whole
    notes = report(tmp_path / "run")["notes"]
    assert "BatchSizeFinder does not search again: batch_size is what it was" in notes


class Renamed(Rated):
    """Its weights have the names of a pruned model from the start."""

    def setup(self, stage: str) -> None:
        prune.identity(self.layer, "weight")


def prune_and_fit(folder: Path, model: type[Rated], crash_at: int | None, **options: Any) -> list[Any]:
    """One process."""
    seed_everything(1)
    net = model(crash_at)
    ckpt = AdaptiveCheckpoint(folder, every_n_steps=1)
    pruning = ModelPruning(
        "l1_unstructured", [(net.layer, "weight")], amount=1, make_pruning_permanent=False, **options
    )
    trainer = pl.Trainer(
        max_epochs=3,
        callbacks=[pruning, ckpt, Durable(ckpt)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    try:
        trainer.fit(net, ckpt_path="auto")
    except CrashError:
        assert crash_at is not None
    return [one.tolist() for one in net.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_a_pruned_run_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Its weights have other names than those of a fresh model: the hint does not ask for the same model again."""
    prune_and_fit(tmp_path, Rated, 6)
    with pytest.raises(MismatchError) as error:
        prune_and_fit(tmp_path, Rated, None)
    assert "pruning has renamed its weights" in str(error.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "resets",
    [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_AVERAGING, reason="Lightning 2.5 resets no weights"))],
)
def test_what_pruning_resets_weights_to_is_said_to_be_lost(tmp_path: Path, resets: bool) -> None:
    """The callback shares weights with the model after its first reset; without resets the resume is exact."""
    whole = prune_and_fit(tmp_path / "whole", Renamed, None, use_lottery_ticket_hypothesis=resets)
    prune_and_fit(tmp_path / "run", Renamed, 6, use_lottery_ticket_hypothesis=resets)
    resumed = prune_and_fit(tmp_path / "run", Renamed, None, use_lottery_ticket_hypothesis=resets)
    assert (resumed == whole) is not resets
    names = [row["name"] for row in report(tmp_path / "run")["not_restored"]]
    assert names == ["weights that ModelPruning keeps"] * resets


def report(folder: Path) -> Any:
    """What the last resume said."""
    return json.loads((folder / "resume-report.json").read_text())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("crashes", [(5,), (2, 7, 10)])
def test_attributes_of_all_objects_go_on(tmp_path: Path, crashes: tuple[int, ...]) -> None:
    """Those of the trainer, too; a reading of the clock is no state."""
    wanted = fit(tmp_path / "whole", 1, None)
    got: dict[str, str] = {}
    for seed, crash_at in enumerate((*crashes, None), 1):
        got |= dict(line.split() for line in fit(tmp_path / "killed", seed, crash_at))
    assert [f"{step} {loss}" for step, loss in got.items()] == wanted
    said = report(tmp_path / "killed")
    assert said["not_restored"] == []
    restored = {row["name"]: row["detail"] for row in said["restored"]}["hidden state"]
    for name in ("model._calls", "model.queue", "model.ema", "model.drop.p", "datamodule.noisy.dice"):
        assert name in restored, restored
    assert "callbacks.Curriculum.batches" in restored
    assert "trainer.gradient_clip_val" in restored


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_fails_leaves_no_snapshot_with_what_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attributes of the boundary before are gone, so that boundary is not saved, and a line says why."""
    monkeypatch.setattr(failing_loop, "affordable", lambda *_: True)  # each step is recorded, whatever that costs here
    fit(tmp_path, 1, 5, every_n_steps=4, overhead=0.9)
    names = [path.name for path in (tmp_path / "snapshots").iterdir()]
    assert all("s0000000004" in name for name in names), names
    assert "has changed in the step that failed" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_with_hidden_off_the_run_differs(tmp_path: Path) -> None:
    """Without hidden state the run differs, so the test above can fail."""
    wanted = fit(tmp_path / "whole", 1, None, hidden="off")
    first = fit(tmp_path / "killed", 1, 5, hidden="off")
    assert first + fit(tmp_path / "killed", 2, None, hidden="off") != wanted


class Checked(pl.LightningModule):
    """Counts what it has validated, and its collate function does so, too; both from the sanity check on."""

    def __init__(self, seen: list[str], crash_at: int | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.validated = 0
        self.write = seen.append
        self.crash_at = crash_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.crash_at:
            raise CrashError
        loss = self.layer(batch).square().mean() * (1 + self.validated)
        self.write(f"{self.global_step} {loss.item().hex()}")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        if not self.trainer.sanity_checking:
            self.write(f"{self.global_step}v{batch_idx} {batch.sum().item().hex()}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counting:
    """A collate function that counts its batches."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        return torch.stack(rows) + 0.01 * self.batches


def check_and_fit(folder: Path, seed: int, crash_at: int | None) -> list[str]:
    """One process, which validates in the middle of an epoch and at its end."""
    seed_everything(seed)
    seen: list[str] = []
    trainer = pl.Trainer(
        max_epochs=2,
        val_check_interval=4,
        callbacks=[AdaptiveCheckpoint(folder, every_n_steps=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    rows = torch.linspace(0, 1, 48).view(16, 3)
    loaders = DataLoader(rows, 2), DataLoader(rows[:6], 2, collate_fn=Counting())
    with suppress(CrashError):
        trainer.fit(Checked(seen, crash_at), *loaders, ckpt_path="auto")
    return seen


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("crash_at", [2, 6])
def test_what_the_sanity_check_has_changed_goes_on(crash_at: int, tmp_path: Path) -> None:
    """A resumed run has no sanity check: what only that has moved, and what it has moved first, is put back."""
    wanted = check_and_fit(tmp_path / "whole", 1, None)
    got: dict[str, str] = {}
    for seed, at in enumerate((crash_at, crash_at + 3, None), 1):
        got |= dict(line.split() for line in check_and_fit(tmp_path / "killed", seed, at))
    assert [f"{step} {value}" for step, value in got.items()] == wanted
    assert report(tmp_path / "killed")["not_restored"] == []
