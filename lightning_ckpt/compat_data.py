"""The part of `compat` for loaders and loggers: how Lightning makes and combines loaders, and where loggers write."""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.model_helpers import is_overridden as _is_overridden

from ckpt_engine.adapter import EventFiles, TrackedRun

_ELSEWHERE = "this start gives its loggers another version"
_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
PACKAGES = ("lightning.", *(f"{name}." for name in _NAMES.values()))


def part(path: str) -> Any:
    """A property: what a trainer has at this path."""
    return property(attrgetter(f"_trainer.{path}"))


@dataclass(eq=False)
class DataInternals:
    """Typed, narrow access to the loaders of one trainer.

    Args:
        _trainer: whose loops are reached.
    """

    _trainer: Any
    _usual: tuple[Any, Any] | None = field(default=None, init=False)

    # ---- making loaders

    @property
    def reload_epochs(self) -> tuple[float, float]:
        """The epochs in which the training loader, and those of validation, were last made."""
        fit_loop = self._trainer.fit_loop
        validation = fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch
        return float(fit_loop._last_train_dl_reload_epoch), float(validation)

    @reload_epochs.setter
    def reload_epochs(self, epochs: tuple[float, float]) -> None:
        before = [epoch if epoch == float("-inf") else int(epoch) for epoch in epochs]
        fit_loop = self._trainer.fit_loop
        fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = before

    # ---- fetching

    fetcher: ClassVar[Any] = part("fit_loop._data_fetcher")
    """What fetches training batches; None until loaders are made, another object whenever they are made again."""

    def make_validation_loaders(self) -> None:
        """Make them now, as `fit` does for its progress bar."""
        self._trainer.validating = True
        self._trainer.fit_loop.epoch_loop.val_loop.setup_data()
        self._trainer.training = True

    @property
    def fetches_ahead(self) -> int:
        """Batches that Lightning holds without having trained on them (1 for loaders of unknown length, else 0)."""
        fetcher = self._trainer.fit_loop._data_fetcher
        return 0 if getattr(fetcher, "length", 0) is not None else int(getattr(fetcher, "prefetch_batches", 0))

    def set_epoch_length(self, batches: int) -> None:
        """The epoch that begins now has so many batches, those before the resume included.

        As Lightning computes them where it makes its loaders; `reset_epoch_length` puts back what it has computed.
        """
        fit_loop = self._trainer.fit_loop
        self._usual = (fit_loop.max_batches, self._trainer.val_check_batch)
        fit_loop.max_batches = fit_loop._data_fetcher.length = batches
        share = self._trainer.val_check_interval
        if isinstance(share, float) and self._trainer.val_check_batch not in (None, float("inf")):
            self._trainer.val_check_batch = max(1, int(batches * share))

    def reset_epoch_length(self) -> None:
        """All epochs from here on are of one length again."""
        if self._usual is not None:
            self._trainer.fit_loop.max_batches, self._trainer.val_check_batch = self._usual
            self._usual = None

    @property
    def user_fetches(self) -> bool:
        """True when `training_step(dataloader_iter)` fetches batches itself."""
        return type(self._trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"

    @property
    def batches_given(self) -> int | None:
        """Batches of the epoch that were asked for and came, as a count that only grows; None before the first pass.

        Without a length Lightning asks for one batch more: with the last one no other comes, and `done` is set.
        """
        fit_loop = self._trainer.fit_loop
        iterator = getattr(fit_loop._combined_loader, "_iterator", None)
        return None if iterator is None else int(iterator._idx) + bool(fit_loop._data_fetcher.done)

    @property
    def combined_position(self) -> dict[str, Any] | None:
        """Where the combination of loaders is: batches given, and which loaders of a cycling one have ended once."""
        iterator = getattr(self._trainer.fit_loop._combined_loader, "_iterator", None)
        if iterator is None:
            return None
        consumed = getattr(iterator, "_consumed", None)
        return {"index": int(iterator._idx), "ended": None if consumed is None else [bool(c) for c in consumed]}

    @combined_position.setter
    def combined_position(self, position: dict[str, Any] | None) -> None:
        iterator = getattr(self._trainer.fit_loop._combined_loader, "_iterator", None)
        if iterator is None or position is None:
            return
        iterator._idx = position["index"]
        consumed = getattr(iterator, "_consumed", None)
        if consumed is not None and position["ended"] is not None and len(consumed) == len(position["ended"]):
            consumed[:] = position["ended"]


def beginning() -> tuple[pl.Trainer, Any] | None:
    """The trainer that is about to run something, and the `ckpt_path` it was given, seen from what it calls."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, both(pl.Trainer)) and "ckpt_path" in frame.f_locals:
            return trainer, frame.f_locals["ckpt_path"]
    return None


def curves_of(loggers: Sequence[Logger]) -> list[CsvCurve | TensorBoardCurve | MlflowCurve]:
    """Those that go on after a resume: of each kind of logger that is known."""
    made: list[tuple[type[Any], Callable[[Any], CsvCurve | TensorBoardCurve | MlflowCurve]]] = [
        (CSVLogger, CsvCurve),
        (TensorBoardLogger, TensorBoardCurve),
        (MLFlowLogger, MlflowCurve),
        (WandbLogger, WandbCurve),
    ]
    # A class of the user's may open something else.
    return [
        make(one)
        for one in loggers
        for known, make in made
        if any(getattr(type(one), "experiment", 0) is kind.experiment for kind in both(known))
    ]


class _Table(ExperimentWriter):
    """A table that survives a kill, also in the moment in which a new column makes Lightning write it again.

    Args:
        goes_on: in the table that is there, which Lightning would delete.
    """

    def __init__(self, log_dir: str, *, goes_on: bool) -> None:
        self._goes_on = goes_on
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if goes_on and path.is_file():
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
        self.rows = rows(path)

    def save(self) -> None:
        """As Lightning does, and count: a long table is not read at each snapshot."""
        more = len(self.metrics)
        # Lightning 2.5 writes the hyper-parameters there, and a resumed run has logged none of them again.
        save = super(ExperimentWriter, self).save if self._goes_on and not self.hparams else super().save
        try:
            save()
        except BaseException:
            self.rows = rows(Path(self.metrics_file_path))
            raise
        self.rows += more

    def _check_log_dir_exists(self) -> None:
        if not self._goes_on:
            super()._check_log_dir_exists()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path, whole = self.metrics_file_path, f"{self.metrics_file_path}.whole"
        shutil.copyfile(path, whole)
        self.metrics_file_path = whole
        try:
            super()._rewrite_with_new_header(fieldnames)
        finally:
            self.metrics_file_path = path
        Path(whole).replace(path)


def rows(path: Path) -> int:
    """Whole lines of a table below its header."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0


def cut_rows(path: Path, count: int) -> str:
    """The table keeps so many rows; its header may have become wider since. As `Curve.cut`."""
    if not path.is_file():
        return f"{path} is not there any more" if count else ""
    if not count:
        path.unlink()
        return ""
    end, found = 0, -1
    with path.open("rb") as file:
        for line in file:
            if found == count or not line.endswith(b"\n"):
                break
            end, found = end + len(line), found + 1
    os.truncate(path, end)
    return "" if found == count else f"{count - found} rows at the end of {path} are missing"


class _FolderCurve:
    """Files in the folder of a version."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.home = _folder(logger.root_dir)


class CsvCurve(_FolderCurve):
    """`metrics.csv` in the folder of a version."""

    name = "CSVLogger"

    @property
    def _table(self) -> Path:
        return Path(self._logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE

    def place(self) -> Mapping[str, Any] | None:
        return None if "://" in self.home else {"version": self._logger.version}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        logger = self._logger
        if logger._experiment is not None or "://" in self.home:
            return ""
        goes_on = place is not None and _takes(logger, place["version"])
        logger._experiment = _Table(logger.log_dir, goes_on=goes_on)
        return "" if goes_on or place is None else _ELSEWHERE

    def marks(self) -> Mapping[str, int]:
        self._logger.save()
        table = self._logger.experiment
        return {"rows": table.rows if isinstance(table, _Table) else rows(self._table)}

    def cut(self, marks: Mapping[str, int]) -> str:
        table = self._logger.experiment
        table.metrics.clear()
        complaint = cut_rows(self._table, marks["rows"])
        if isinstance(table, _Table):
            table.rows = rows(self._table)
        return complaint


class TensorBoardCurve(_FolderCurve):
    """Event files in the folder of a version."""

    name = "TensorBoardLogger"
    _files: EventFiles | None = None

    def place(self) -> Mapping[str, Any] | None:
        files = self._files
        return None if files is None or "://" in self.home else {"version": self._logger.version, "tag": files.tag}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        logger, why = self._logger, ""
        if place is not None and logger._experiment is None and not _takes(logger, place["version"]):
            place, why = None, _ELSEWHERE
        suffix = logger._kwargs.get("filename_suffix", "")
        tag = EventFiles.tag_of(suffix)
        if tag is None and logger._experiment is None:
            tag = EventFiles.new_tag() if place is None else str(place["tag"])
            logger._kwargs = {**logger._kwargs, "filename_suffix": suffix + tag}
        if tag is not None:
            self._files = EventFiles(logger.log_dir, tag)
        return why

    def marks(self) -> Mapping[str, int]:
        self._logger.experiment.flush()
        return {} if self._files is None else self._files.sizes()

    def cut(self, marks: Mapping[str, int]) -> str:
        return "" if self._files is None else self._files.cut(marks)


class MlflowCurve:
    """One run of MLflow, with a file for each metric where its store is a folder."""

    name = "MLFlowLogger"

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.home = f"{logger._tracking_uri} {logger._experiment_name}"

    @property
    def _run(self) -> TrackedRun:
        store, run = self._logger.save_dir, self._logger.run_id
        folder = None if store is None else Path(store, self._logger.experiment_id, run, "metrics")
        return TrackedRun(self.name, self.home, run, folder, lambda: None)

    def place(self) -> Mapping[str, Any] | None:
        return {"run": self._logger.run_id}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        logger = self._logger
        if place is None or logger._initialized:
            return ""
        if logger._run_id not in (None, place["run"]):
            return _ELSEWHERE
        logger._run_id = place["run"]
        return ""

    def marks(self) -> Mapping[str, int]:
        return self._run.marks()

    def cut(self, marks: Mapping[str, int]) -> str:
        return self._run.cut(marks)


class WandbCurve(MlflowCurve):
    """One run of W&B, by its id. Only its server could cut something off, and few may ask it to."""

    name = "WandbLogger"

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.home = str(logger.name)

    @property
    def _run(self) -> TrackedRun:
        return TrackedRun(self.name, self.home, "", None, lambda: None)

    def place(self) -> Mapping[str, Any] | None:
        return None if self._logger.version is None else {"run": self._logger.version}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        logger = self._logger
        if place is None or logger._experiment is not None:
            return ""
        if logger._id not in (None, place["run"]):
            return _ELSEWHERE
        logger._id = place["run"]
        logger._wandb_init.pop("fork_from", None)  # it was asked for at the first start, and W&B takes one of the two
        logger._wandb_init.update(id=place["run"], resume="allow")
        return ""


def _folder(path: str | os.PathLike[str]) -> str:
    text = os.path.expandvars(path)
    return text if "://" in text else str(Path(text).expanduser().resolve())


def _takes(logger: Any, version: Any) -> bool:
    """Whether the logger writes into the folder of this version; where the user leaves it open it does."""
    if logger._version is None:
        logger._version = version
    return bool(logger._version == version)


# Lightning has two packages with the same contents, and programs import either: whose objects a trainer uses.


def both(*kinds: type[Any]) -> tuple[type[Any], ...]:
    """These classes, and the same ones of the other package where the program uses it."""
    modules = {kind: sys.modules.get(_other(kind.__module__)) for kind in kinds}
    found = [getattr(module, kind.__name__, kind) for kind, module in modules.items() if module is not None]
    return (*kinds, *found)


def twin_of(module: str, trainer: Any) -> Any:
    """A module of Lightning, by its name in `lightning`, of the package that the trainer comes from."""
    return importlib.import_module(_other(module) if isinstance(trainer, both(pl.Trainer)[1:]) else module)


def is_overridden(method: str, instance: Any, parent: type[Any] = pl.LightningModule) -> bool:
    """As Lightning's own function, which knows the classes of one package only."""
    return _is_overridden(method, instance, next((one for one in both(parent) if isinstance(instance, one)), parent))


def _other(module: str) -> str:
    first, second, *rest = module.split(".")
    return ".".join([_NAMES[f"{first}.{second}"], *rest])
