"""All access to private names of Lightning: each use is named here and probed when a run starts.

Nothing else in this package touches an attribute of Lightning that starts with an underscore, or replaces a method of
a Lightning object. When an upstream release renames something, `LightningInternals.probe` says which feature needs it.
By themselves Lightning's loops would end a training in the middle of a validation, or on one of several ranks by a
broadcast that the others do not expect: `defer_sigterm` hides a SIGTERM from them until the next boundary.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelPruning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr
from torchmetrics import Metric, SumMetric

from ckpt_engine.adapter import CkptError, LiveModel, NotRestored, PrivateName, Replaced, require_names
from lightning_ckpt.compat_data import PACKAGES, DataInternals, both, part, twin_of

VERSION: str = version("lightning")
MINIMUM_VERSION = (2, 5)
_RESULT_MODULE = "lightning.pytorch.trainer.connectors.logger_connector.result"
_HOOKS_OF_STEPS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
)
_NOT_RESUMABLE = r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not"
PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("trainer", "_accelerator_connector", "running means of self.log"),
    PrivateName("trainer", "_checkpoint_connector", "ckpt_path='auto'"),
    PrivateName("trainer", "_logger_connector", "running means of self.log"),
    PrivateName("trainer", "_signal_connector", "finishing the step after a SIGTERM"),
    PrivateName("signal_connector", "received_sigterm", "finishing the step after a SIGTERM"),
    PrivateName("signal_connector", "_sigterm_notifier_fn", "the same for several ranks (wrapped)"),
    PrivateName("connector", "resume_start", "ckpt_path='auto' (wrapped)"),
    PrivateName("connector", "restore_training_state", "restoring after a search for a learning rate (wrapped)"),
    PrivateName("connector", "dump_checkpoint", "the content of a snapshot"),
    PrivateName("connector", "_ckpt_path", "the path Lightning reports after a resume"),
    PrivateName("connector", "_loaded_checkpoint", "handing the restored state to Lightning"),
    PrivateName("connector", "_hpc_resume_path", "preferring a newer Slurm hpc_ckpt file"),
    PrivateName("fit_loop", "on_advance_start", "restoring what a new epoch needs (wrapped)"),
    PrivateName("fit_loop", "epoch_progress", "telling a finished epoch from an unfinished one"),
    PrivateName("fit_loop", "_restarting", "plateau schedulers in the resumed epoch"),
    PrivateName("fit_loop", "_data_fetcher", "batches fetched ahead of training"),
    PrivateName("fit_loop", "_combined_loader", "which of several loaders has ended"),
    PrivateName("fit_loop", "_skip_backward", "gradients in the last epoch of StochasticWeightAveraging"),
    PrivateName("fit_loop", "_last_train_dl_reload_epoch", "reload_dataloaders_every_n_epochs after a resume"),
    PrivateName("epoch_loop", "advance", "the snapshot instant (wrapped)"),
    PrivateName("epoch_loop", "reset", "no false warning about loaders at an exact resume (wrapped)"),
    PrivateName("epoch_loop", "batch_progress", "the position in the epoch"),
    PrivateName("epoch_loop", "_restarting", "validation and plateau schedulers after a resume"),
    PrivateName("epoch_loop", "_should_accumulate", "waiting for the end of gradient accumulation"),
    PrivateName("epoch_loop", "_num_ready_batches_reached", "telling a finished epoch from an unfinished one"),
    PrivateName("epoch_loop", "_results", "running means of self.log"),
    PrivateName("epoch_loop", "_batches_that_stepped", "the step axis of loggers"),
    PrivateName("module", "_current_fx_name", "logging in on_train_epoch_start of a resumed epoch"),
    PrivateName("epoch_loop", "automatic_optimization", "counting optimizer steps"),
    PrivateName("epoch_loop", "val_loop", "the loaders of validation"),
    PrivateName("val_loop", "_last_val_dl_reload_epoch", "reload_dataloaders_every_n_epochs after a resume"),
    PrivateName("val_loop", "setup_data", "making the loaders of validation before the streams are put back (wrapped)"),
    PrivateName("logger_connector", "_callback_metrics", "metrics that callbacks and schedulers see"),
    PrivateName("logger_connector", "_logged_metrics", "trainer.logged_metrics after a resume"),
    PrivateName("logger_connector", "_progress_bar_metrics", "the progress bar"),
    PrivateName("logger_connector", "_first_loop_iter", "running means of self.log"),
    PrivateName("logger_connector", "_current_fx", "running means of self.log"),
    PrivateName("logger_connector", "should_update_logs", "logging when the trainer does"),
    PrivateName("combined_loader", "_iterator", "resuming with several loaders"),
    PrivateName("combined_iterator", "_idx", "batch_idx of dataloader_iter"),
    PrivateName("combined_iterator", "_consumed", "resuming with several loaders"),
    PrivateName("metric", "_update_count", "state of torchmetrics objects"),
    PrivateName("metric", "_forward_cache", "state of torchmetrics objects"),
    PrivateName("metric", "_computed", "state of torchmetrics objects"),
    PrivateName("callback_connector", "_attach_model_logging_functions", "loggers, before they write"),
    PrivateName("csv_logger", "_version", "the version folder of a resumed run"),
    PrivateName("csv_logger", "_experiment", "continuing in metrics.csv"),
    PrivateName("size_finder", "_batch_arg_name", "a batch size that a search has found"),
    PrivateName("pruning", "_use_lottery_ticket_hypothesis", "saying what pruning resets weights to after a resume"),
    PrivateName("csv_writer", "_rewrite_with_new_header", "a metrics.csv that survives kills (in our class)"),
    PrivateName("csv_writer", "_check_log_dir_exists", "continuing in metrics.csv (replaced in our class)"),
    PrivateName("results", "_ResultMetric", "running means of self.log"),
    PrivateName("results", "_Metadata", "running means of self.log"),
    PrivateName("results", "_Sync", "running means of self.log"),
)
"""Every private name in use; `tests/lightning/test_compat.py` has one test for each."""
WRAPPED: Mapping[str, str] = {
    "resume_start": "_checkpoint_connector",
    "restore_training_state": "_checkpoint_connector",
    "load_optimizer_state_dict": "strategy",
    "process_dataloader": "strategy",
    "convert_input": "precision_plugin",
    "on_advance_start": "fit_loop",
    "advance": "fit_loop.epoch_loop",
    "reset": "fit_loop.epoch_loop",
    "setup_data": "fit_loop.epoch_loop.val_loop",
}
"""The methods that a `fit` with snapshots runs something around, and which part of the trainer has each."""
_LOOPS = ("lightning.pytorch.loops.", "pytorch_lightning.loops.")


def installed_version() -> tuple[int, ...]:
    """Major and minor version of the Lightning in use."""
    return tuple(int(part) for part in VERSION.split(".")[:2])


def metric_progress(metric: Metric) -> tuple[int, torch.Tensor | None]:
    """How often a metric object was updated, and what its last update returned if that is a tensor."""
    cache = metric._forward_cache
    return metric._update_count, cache if isinstance(cache, torch.Tensor) else None


def set_metric_progress(metric: Metric, update_count: int, cache: torch.Tensor | None) -> None:
    """Put `metric_progress` back; a value computed before is forgotten."""
    state: Any = metric
    state._update_count, state._forward_cache, state._computed = update_count, cache, None


def callbacks_of(trainer: Any) -> list[Callback]:
    """The trainer's callbacks (public, but set where type checkers do not see it)."""
    return cast("list[Callback]", trainer.callbacks)


def is_lightnings(what: Any) -> bool:
    """Whether a class or function is Lightning's or ours."""
    return str(what.__module__).startswith((*PACKAGES, "lightning_ckpt."))


@dataclass(eq=False)
class LightningInternals(DataInternals, Replaced):
    """Typed, narrow access to the insides of one trainer.

    Args:
        _trainer: whose loops and connectors are reached.

    What is replaced is a method on the instance, never on the class; `unwrap` puts everything back.
    """

    _undo_sigterm: Callable[[], None] = lambda: None

    # ---- probing

    def owners(self) -> Mapping[str, Any]:
        """The objects that `PrivateName.owner` refers to; None where the object itself is missing."""
        trainer = self._trainer
        fit_loop = getattr(trainer, "fit_loop", None)
        combined = iter(CombinedLoader([[0]], "max_size_cycle"))
        return {
            "combined_loader": combined,
            "combined_iterator": getattr(combined, "_iterator", None),
            "metric": SumMetric(),
            "trainer": trainer,
            "module": pl.LightningModule(),
            "connector": getattr(trainer, "_checkpoint_connector", None),
            "logger_connector": getattr(trainer, "_logger_connector", None),
            "signal_connector": getattr(trainer, "_signal_connector", None),
            "fit_loop": fit_loop,
            "epoch_loop": getattr(fit_loop, "epoch_loop", None),
            "val_loop": getattr(getattr(fit_loop, "epoch_loop", None), "val_loop", None),
            "results": twin_of(_RESULT_MODULE, trainer),
            "callback_connector": getattr(trainer, "_callback_connector", None),
            "csv_logger": CSVLogger("."),
            "csv_writer": ExperimentWriter,
            "pruning": ModelPruning("l1_unstructured"),
            "size_finder": BatchSizeFinder(),
        }

    def probe(self) -> None:
        """Raises where this Lightning is too old or lacks a name.

        Raises:
            CkptError
        """
        if installed_version() < MINIMUM_VERSION:
            raise CkptError(
                f"Lightning {VERSION} is too old for lightning_ckpt, which needs 2.5 or later",
                hint="pip install 'lightning>=2.5'",
            )
        require_names(PRIVATE_NAMES, self.owners(), "Lightning", VERSION, "lightning_ckpt")

    # ---- wrapping

    def wrap(self, around: Mapping[str, Callable[..., Any]]) -> None:
        """Run functions in the place of methods; each gets as its first argument what was called there before.

        Args:
            around: by the names of the methods, which `WRAPPED` has.
        """
        for name, do in around.items():
            self.around(attrgetter(WRAPPED[name])(self._trainer), name, do)

    def restore_training(self, forgotten: Callable[[], dict[str, Any] | None], original: Callable[[], None]) -> None:
        """For `restore_training_state`: what `forgotten()` gives is restored where Lightning has nothing.

        A callback may load a file of its own.
        """
        connector = self._trainer._checkpoint_connector
        if not connector._loaded_checkpoint:
            connector._loaded_checkpoint = forgotten() or {}
        original()

    @property
    def batch_sizes(self) -> dict[str, Any]:
        """Those that are searched for, as they are now, by the attribute that has each."""
        names = [one._batch_arg_name for one in self._trainer.callbacks if isinstance(one, both(BatchSizeFinder))]
        return {name: lightning_getattr(self._trainer.lightning_module, name) for name in names}

    def skip_searches(self, restoring: Callable[[], bool], sizes: Mapping[str, Any]) -> list[str]:
        """While `restoring()`, a `fit` does not search: optimizers go on with their rates, loaders with `sizes`."""
        notes = []
        for one in self._trainer.callbacks:
            if isinstance(one, both(LearningRateFinder)):
                name, goes_on = "lr_find", "optimizers keep theirs, the model may name another"
            elif isinstance(one, both(BatchSizeFinder)) and one._batch_arg_name in sizes:
                name, goes_on = "scale_batch_size", f"{one._batch_arg_name} is what it was"
                one.optimal_batch_size = sizes[one._batch_arg_name]
                lightning_setattr(self._trainer.lightning_module, one._batch_arg_name, one.optimal_batch_size)
            else:
                continue
            search = getattr(one, name)
            self.replace(one, name, lambda *of, search=search: None if restoring() else search(*of))
            notes.append(f"{type(one).__name__} does not search again: {goes_on}")
        return notes

    def lost_tickets(self, module: torch.nn.Module) -> list[NotRestored]:
        """Of `ModelPruning` that has pruned: its first reset makes the weights that it keeps those of the model.

        From then on they are trained too, and a later reset changes nothing. No state has which ones these are.
        """
        masks = [buffer for name, buffer in module.named_buffers() if name.endswith("_mask")]
        resets = any(
            isinstance(one, both(ModelPruning)) and one._use_lottery_ticket_hypothesis
            for one in self._trainer.callbacks
        )
        if not resets or all(bool(mask.all()) for mask in masks):
            return []
        why = (
            "it resets weights to those that this process began with when it prunes next, and the uninterrupted run "
            "may have trained them on: use_lottery_ticket_hypothesis=False resumes exactly"
        )
        return [NotRestored("weights that ModelPruning keeps", why)]

    @staticmethod
    def reset_silently(is_exact: Callable[[], bool], original: Callable[[], None]) -> None:
        """For `reset`: where `is_exact()`, it does not warn that a plain loader starts again at its beginning."""
        with warnings.catch_warnings():
            if is_exact():
                warnings.filterwarnings("ignore", _NOT_RESUMABLE)
            original()

    def skip_idle_hooks(self, *callbacks: Callback) -> None:
        """Lightning does not enter hooks of these callbacks that do nothing.

        It opens a profile around each hook of each callback, which takes longer than most boundaries. Names that are
        not callable are left out.
        """
        for callback in callbacks:
            for name in _HOOKS_OF_STEPS:
                if getattr(type(callback), name) is getattr(Callback, name) and name not in vars(callback):
                    self.replace(callback, name, None)

    def defer_sigterm(self, deferred: Callable[[], bool], *, relays: bool) -> None:
        """See `compat.defer_sigterm`; `relays`: and `compat.relayed`, of several ranks."""
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        self._undo_sigterm = defer_sigterm(connector, deferred)
        if relays:
            self.replace(connector, "_sigterm_notifier_fn", relayed(connector, launcher))

    def unwrap(self) -> None:
        """Puts back every method that was wrapped, and the length of epochs."""
        self.reset_epoch_length()
        self._undo_sigterm()
        self.undo()

    # ---- checkpoint connector

    def dump_checkpoint(self) -> dict[str, Any]:
        """What Lightning itself puts into a full checkpoint; references to live tensors."""
        return cast("dict[str, Any]", self._trainer._checkpoint_connector.dump_checkpoint(False))

    def hand_over(self, checkpoint: dict[str, Any], shown_path: str) -> None:
        """Lets Lightning restore `checkpoint` as if it had loaded it from a file called `shown_path`."""
        own = twin_of("lightning.pytorch", self._trainer).__version__
        if checkpoint.get("pytorch-lightning_version", own) != own:
            migration = twin_of("lightning.pytorch.utilities.migration.utils", self._trainer)
            checkpoint, _ = migration.migrate_checkpoint(checkpoint)
        connector = self._trainer._checkpoint_connector
        connector._ckpt_path = shown_path
        connector._loaded_checkpoint = checkpoint

        def load_weights(original: Callable[..., None], checkpoint: Any, **options: Any) -> None:
            with LiveModel(self._trainer.lightning_module).in_place(checkpoint.get("state_dict", {})) as rest:
                original({**checkpoint, "state_dict": rest}, **options)

        self.around(self._trainer.strategy, "load_model_state_dict", load_weights)

    hpc_path: ClassVar[str | None] = part("_checkpoint_connector._hpc_resume_path")
    """The newest Slurm `hpc_ckpt_N.ckpt` in the default root folder."""

    # ---- loops

    automatic_steps: ClassVar[int] = part(
        "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed"
    )
    """What `trainer.global_step` is where Lightning steps the optimizers, with a tenth of the calls."""
    batches_in_epoch: ClassVar[int] = part("fit_loop.epoch_loop.batch_progress.current.ready")
    """Training batches that the current epoch has asked for."""
    batches_in_total: ClassVar[int] = part("fit_loop.epoch_loop.batch_progress.total.ready")
    """Training batches of all epochs."""
    batches_that_stepped: ClassVar[int] = part("fit_loop.epoch_loop._batches_that_stepped")
    """The step that loggers use."""
    skips_backward: ClassVar[bool] = part("fit_loop._skip_backward")
    """True where the optimizer will step on gradients of an earlier epoch (the last one of weight averaging)."""

    def in_whole_steps(self, batches: int) -> int:
        """So many batches, or a few more, that no accumulation of gradients is cut in two."""
        per_step = int(self._trainer.accumulate_grad_batches)
        return -(-batches // per_step) * per_step

    def skip_batches(self, count: int) -> int:
        """At the fetch boundary: fetch at most `count` batches and throw them away; how many that were.

        They count as batches of the epoch, and not as steps. The last batch of an epoch of known length is not skipped.
        """
        progress, fetcher = self._trainer.fit_loop.epoch_loop.batch_progress, self._trainer.fit_loop._data_fetcher
        most = min(count, self._trainer.num_training_batches - 1 - progress.current.ready)
        skipped = 0
        while skipped < most and not fetcher.done:
            next(fetcher)
            progress.increment_ready()
            progress.increment_started()
            progress.increment_processed()
            progress.increment_completed()
            skipped += 1
        return skipped

    @property
    def between_batches(self) -> bool:
        """True when the last batch is completely finished."""
        batch = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(batch.ready == batch.started == batch.processed == batch.completed)

    @property
    def in_epoch(self) -> bool:
        """True between the start of an epoch and its end."""
        epoch = self._trainer.fit_loop.epoch_progress.current
        return bool(epoch.started != epoch.processed)

    @property
    def accumulating(self) -> bool:
        """True when gradients of finished batches still wait for an optimizer step."""
        return bool(self._trainer.fit_loop.epoch_loop._should_accumulate())

    @property
    def ends_mid_epoch(self) -> bool:
        """In `on_train_epoch_end`: training stops here although the epoch has more batches."""
        trainer = self._trainer
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            return False
        limit_reached = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        return bool(limit_reached or trainer.should_stop)

    def clear_restart(self) -> None:
        """Tells the loops that they continue, not restart, so that nothing of the last batch is done again."""
        fit_loop = self._trainer.fit_loop
        fit_loop._restarting = False
        fit_loop.epoch_loop._restarting = False

    def begin_epoch_again(self) -> None:
        """No batch of the current epoch counts any more."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        steps = epoch_loop.automatic_optimization.optim_progress
        for progress in (epoch_loop.batch_progress, epoch_loop.scheduler_progress, steps):
            progress.reset_on_run()
        if hasattr(epoch_loop, "reset_restart_stage"):  # else it would count a batch as completed
            epoch_loop.reset_restart_stage()

    @property
    def progress(self) -> dict[str, Any]:
        """The position in the epoch and the loggers' step, exactly."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        progress = vars(epoch_loop.batch_progress)  # `state_dict` takes ten times as long
        batch = {name: dict(vars(one)) if hasattr(one, "__dict__") else one for name, one in progress.items()}
        return {"batch": batch, "stepped": epoch_loop._batches_that_stepped}

    @progress.setter
    def progress(self, saved: dict[str, Any]) -> None:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        epoch_loop.batch_progress.load_state_dict(saved["batch"])
        epoch_loop._batches_that_stepped = saved["stepped"]

    def clear_resuming(self) -> None:
        """Lets the next epoch start as any other does, with a new iterator over its loaders."""
        fit_loop = self._trainer.fit_loop
        if hasattr(fit_loop, "_resuming_from_checkpoint"):  # Lightning 2.6 and later
            fit_loop._resuming_from_checkpoint = False

    @contextmanager
    def in_hook(self, name: str) -> Iterator[None]:
        """The model's and callbacks' hook `name` runs, and may log."""
        module = self._trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, name
        try:
            yield
        finally:
            module._current_fx_name = before

    @property
    def validates_by_time(self) -> bool:
        """True where `val_check_interval` is a duration (Lightning 2.6 and later)."""
        return getattr(self._trainer, "_val_check_time_interval", None) is not None

    # ---- metrics

    @property
    def metric_tables(self) -> dict[str, dict[str, Any]]:
        """The live tables behind `callback_metrics`, `logged_metrics` and `progress_bar_metrics`."""
        connector = self._trainer._logger_connector
        return {
            "callback": connector._callback_metrics,
            "logged": connector._logged_metrics,
            "progress_bar": connector._progress_bar_metrics,
        }

    results: ClassVar[dict[str, Any]] = part("fit_loop.epoch_loop._results")
    """The training loop's `self.log` accumulators by key."""
    logs_now: ClassVar[bool] = part("_logger_connector.should_update_logs")
    """True on steps on which the trainer logs."""
    reduces: ClassVar[bool] = part("_accelerator_connector.is_distributed")
    """Whether `sync_dist` of `self.log` has an effect: else it counts as False, whatever the script says."""

    @property
    def log_position(self) -> tuple[bool | None, str | None]:
        """Where the logger connector is in the epoch: (first batch?, the hook that logged last)."""
        connector = self._trainer._logger_connector
        return connector._first_loop_iter, connector._current_fx

    @log_position.setter
    def log_position(self, position: tuple[bool | None, str | None]) -> None:
        connector = self._trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = position

    def result_types(self) -> tuple[Any, Any, Any]:
        """The classes `_ResultMetric`, `_Metadata`, `_Sync`."""
        module = twin_of(_RESULT_MODULE, self._trainer)
        return module._ResultMetric, module._Metadata, module._Sync


def defer_sigterm(connector: Any, deferred: Callable[[], bool]) -> Callable[[], None]:
    """Hide `connector.received_sigterm` from Lightning's loops as long as `deferred()`; returns what undoes it."""
    kind = type(connector)

    class Deferring(kind):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> Any:
            return kind.__new__, (kind,), dict(vars(self))

        @property
        def received_sigterm(self) -> bool:
            return bool(self.__dict__["received_sigterm"]) and not (deferred() and _a_loop_asks())

        @received_sigterm.setter
        def received_sigterm(self, received: bool) -> None:
            self.__dict__["received_sigterm"] = received

    def undo() -> None:
        if type(connector) is Deferring:
            connector.__class__ = kind

    connector.__class__ = Deferring
    return undo


def relayed(connector: Any, launcher: Any) -> Callable[[int, object], None]:
    """A handler that hands a SIGTERM on by the launcher, without Lightning's broadcast amid whatever runs (2.6)."""

    def notify(number: int, _: object) -> None:
        if launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    return notify


def _a_loop_asks() -> bool:
    """A loop reads `trainer.received_sigterm`, which reads the connector's."""
    return str(sys._getframe(3).f_globals.get("__name__", "")).startswith(_LOOPS)
