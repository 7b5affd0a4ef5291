"""`pytorch_lightning`, the other name of Lightning: runs of its trainers resume as all others do."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.compat_data import both, is_overridden
from tests.lightning.cases import SWA_IS_PLAIN
from tests.lightning.test_hidden import report
from tests.support.digests import digest, seed_everything

pl = pytest.importorskip("pytorch_lightning")


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.drop = torch.nn.Dropout(0.3)
        self.seen: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.layer(self.drop(batch)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def on_train_epoch_start(self) -> None:
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(
    root: Path | None, folder: Path, *, seed: int = 1, epochs: int = 3, stop: int | None = None, **more: Any
) -> Any:
    """A run of `epochs` epochs; as of a process that ends at batch `stop`."""
    seed_everything(seed)
    more = {"callbacks": [], "logger": False, **more}
    if root is not None:
        options = {"every_n_steps": 3, "at_end": stop is None, "resume": "auto", "writer": "thread"}
        more["callbacks"].append(AdaptiveCheckpoint(str(root), **options))
    if stop is not None:
        more["callbacks"].append(Ends(stop))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet, **more)
    model, rows = Model(), torch.arange(80.0).reshape(20, 4) / 80
    loaders = [DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows[:8], batch_size=4)]
    with suppress(KilledError):
        trainer.fit(model, *loaders)
    trainer.ended = digest(model=model.state_dict(), optimizers=[one.state_dict() for one in trainer.optimizers])
    return trainer, model


class KilledError(Exception):
    """Stands for the end of the process."""


class Ends(pl.Callback):  # type: ignore[misc, name-defined]
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.stop:
            raise KilledError


def made(what: str, folder: Path) -> dict[str, Any]:
    callbacks = pl.callbacks
    return {
        "plain": {},
        "callbacks": {"callbacks": [callbacks.EarlyStopping("val_loss", patience=9), callbacks.Timer()]},
        "averaged": {"callbacks": [callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]},
        "table": {"logger": pl.loggers.CSVLogger(folder, name="table"), "log_every_n_steps": 1},
    }[what]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Mapping[str, Path]]:
    yield {name: tmp_path / name for name in ("whole", "cut", "run")}


AVERAGED = pytest.param(
    *("averaged", 13),
    marks=pytest.mark.skipif(not SWA_IS_PLAIN, reason="SWALR of this torch has a function in its state"),
)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("what", "stop"), [("plain", 4), ("callbacks", 8), AVERAGED, ("table", 8)])
def test_a_run_of_the_other_package_resumes_exactly(what: str, stop: int, folders: Mapping[str, Path]) -> None:
    """Weights, optimizer and losses, in the middle of an epoch; tables of the loggers too."""
    whole = fit(None, folders["whole"], **made(what, folders["whole"]))
    first = fit(folders["run"], folders["cut"], stop=stop, **made(what, folders["cut"]))
    again = fit(folders["run"], folders["cut"], seed=7, **made(what, folders["cut"]))
    assert 0 < len(first[1].seen) < len(whole[1].seen)
    assert again[1].seen == whole[1].seen  # the rest of it, behind what the snapshot has of it
    assert again[0].ended == whole[0].ended
    named = {row["name"] for row in report(folders["run"])["not_restored"]}
    assert named <= {"callback Timer"}
    if what == "table":
        tables = [
            list(csv.DictReader(Path(one[0].log_dir, "metrics.csv").read_text().splitlines())) for one in (whole, again)
        ]
        logged = [[(r["step"], r["loss_step"], r["loss_epoch"], r["val_loss"]) for r in rows] for rows in tables]
        assert [row for row in logged[1] if any(row[1:])] == logged[0]


def test_a_finished_run_of_the_other_package_stays_finished(folders: Mapping[str, Path]) -> None:
    """A second start trains nothing more."""
    first = fit(folders["run"], folders["cut"])
    again = fit(folders["run"], folders["cut"], seed=7)
    assert len(again[1].seen) in (0, len(first[1].seen))
    assert again[0].ended == first[0].ended


def test_classes_of_both_packages_are_known() -> None:
    """Each by its twin; what a class overrides is compared with its own base."""
    for kind in (lp.Callback, lp.LightningModule, lp.callbacks.EarlyStopping, lp.strategies.DDPStrategy):
        assert [one.__name__ for one in both(kind)] == [kind.__name__] * 2
        assert {one.__module__.partition(".")[0] for one in both(kind)} == {"lightning", "pytorch_lightning"}
    assert is_overridden("on_train_batch_end", Ends(1), parent=lp.Callback)
    assert not is_overridden("on_train_end", Ends(1), parent=lp.Callback)
    assert is_overridden("training_step", Model())
    assert not is_overridden("on_load_checkpoint", Model())
