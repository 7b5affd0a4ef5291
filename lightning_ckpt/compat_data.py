"""The part of `compat` that is about loaders: how Lightning makes, combines and fetches from them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class DataInternals:
    """Typed, narrow access to the loaders of one trainer.

    Args:
        trainer: whose loops are reached.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self._usual: tuple[Any, Any] | None = None

    # ---- making loaders

    @property
    def reload_epoch(self) -> float:
        """The epoch in which the training loader was last made."""
        return float(self._trainer.fit_loop._last_train_dl_reload_epoch)

    @reload_epoch.setter
    def reload_epoch(self, epoch: float) -> None:
        self._trainer.fit_loop._last_train_dl_reload_epoch = epoch if epoch == float("-inf") else int(epoch)

    @property
    def validation_reload_epoch(self) -> float:
        """The epoch in which the validation loaders were last made."""
        return float(self._trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch)

    @validation_reload_epoch.setter
    def validation_reload_epoch(self, epoch: float) -> None:
        before = epoch if epoch == float("-inf") else int(epoch)
        self._trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = before

    # ---- fetching

    @property
    def fetcher(self) -> object:
        """What fetches training batches; None until loaders are made, another object whenever they are made again."""
        fetcher: object = self._trainer.fit_loop._data_fetcher
        return fetcher

    @property
    def validation_loaders(self) -> object:
        """What combines the validation loaders; None until they are made, another object when they are made again."""
        combined: object = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return combined

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

    def restart_fetcher(self) -> None:
        """Makes the iterator over the training loaders again."""
        iter(self._trainer.fit_loop._data_fetcher)

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
