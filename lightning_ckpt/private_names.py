"""The list of private names of Lightning, and of torchmetrics below it, that `compat` uses, each with its purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One private name of Lightning that this package depends on.

    Args:
        owner: the object it belongs to, a key of `Internals.owners`.
        name: the attribute.
        used_for: what stops working without it.
    """

    owner: str
    name: str
    used_for: str


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("trainer", "_checkpoint_connector", "ckpt_path='auto'"),
    PrivateName("trainer", "_logger_connector", "running means of self.log"),
    PrivateName("trainer", "_signal_connector", "finishing the step after a SIGTERM"),
    PrivateName("signal_connector", "received_sigterm", "finishing the step after a SIGTERM"),
    PrivateName("signal_connector", "_sigterm_notifier_fn", "the same for several ranks (wrapped)"),
    PrivateName("connector", "resume_start", "ckpt_path='auto' (wrapped)"),
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
    PrivateName("epoch_loop", "val_loop", "the loaders of validation"),
    PrivateName("val_loop", "_combined_loader", "the loaders of validation"),
    PrivateName("val_loop", "_last_val_dl_reload_epoch", "reload_dataloaders_every_n_epochs after a resume"),
    PrivateName("val_loop", "setup_data", "making the loaders of validation before the streams are put back"),
    PrivateName("logger_connector", "_callback_metrics", "metrics that callbacks and schedulers see"),
    PrivateName("logger_connector", "_logged_metrics", "trainer.logged_metrics after a resume"),
    PrivateName("logger_connector", "_progress_bar_metrics", "the progress bar"),
    PrivateName("logger_connector", "_first_loop_iter", "running means of self.log"),
    PrivateName("logger_connector", "_current_fx", "running means of self.log"),
    PrivateName("logger_connector", "should_update_logs", "logging as often as the trainer does"),
    PrivateName("combined_loader", "_iterator", "resuming with several loaders"),
    PrivateName("combined_iterator", "_idx", "batch_idx of dataloader_iter"),
    PrivateName("combined_iterator", "_consumed", "resuming with several loaders"),
    PrivateName("metric", "_update_count", "state of torchmetrics objects"),
    PrivateName("metric", "_forward_cache", "state of torchmetrics objects"),
    PrivateName("metric", "_computed", "state of torchmetrics objects"),
    PrivateName("results", "_ResultMetric", "running means of self.log"),
    PrivateName("results", "_Metadata", "running means of self.log"),
    PrivateName("results", "_Sync", "running means of self.log"),
)
"""Every private name in use; `tests/lightning/test_compat.py` has one test for each."""
