"""The positions of a trainer's training loaders: followed from when Lightning makes them, saved, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from ckpt_engine.data import streams
from ckpt_engine.data.dealing import Dealing
from ckpt_engine.data.exactness import Level
from ckpt_engine.data.position import LoaderPosition, attach
from ckpt_engine.errors import ResumeError, StateError
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.tracking.elastic import Elastic
from lightning_ckpt.compat import Internals


class TrainLoaders:
    """Follows every training loader of one `fit`.

    Args:
        internals: of the trainer.
        trainer: whose loaders these are.
    """

    def __init__(self, internals: Internals, trainer: pl.Trainer) -> None:
        self._internals = internals
        self._trainer = trainer
        self._positions: list[LoaderPosition | None] = []
        self._types: list[str] = []
        self._workers: list[int] = []
        self._saved: Sequence[Any] | None = None
        self._elastic: Elastic | None = None
        self._waiting = 0
        self._before: object = self
        self._others: list[DataLoader[Any]] = []
        self._saved_generators: Sequence[Any] = ()

    def follow(self, loader: Any) -> Any:
        """Called with every loader the strategy has processed; returns it."""
        if self._trainer.training and not self._trainer.sanity_checking:
            if self._internals.fetcher is not self._before:  # loaders are made, or made again, as one group
                self._before = self._internals.fetcher
                self._forget()
            self._types.append(type(loader).__name__)
            self._workers.append(int(getattr(loader, "num_workers", 0)))
            # Whether Lightning fetches one batch ahead depends on all loaders together, which is known later.
            position = attach(loader, lookahead=1) if isinstance(loader, DataLoader) else None
            self._positions.append(position)
            if self._saved is not None:
                self._load(len(self._positions) - 1)
        elif isinstance(loader, DataLoader) and streams.capture_generators(loader):
            # Validation loaders start anew each time, but the generator of a shuffled one goes on.
            self._others.append(loader)
            if len(self._others) <= len(self._saved_generators):
                streams.restore_generators(loader, self._saved_generators[len(self._others) - 1])
        return loader

    def expect(self, saved: Sequence[Any], generators: Sequence[Any], elastic: Elastic | None) -> None:
        """Loaders made from now on continue at these positions, the others with these generators.

        Args:
            elastic: where another number of ranks has saved them.

        Raises:
            ResumeError: another number of ranks has saved the positions of several loaders.
        """
        in_the_middle = any(one is not None and one["phase"] == "within" and one["batches"] for one in saved)
        if elastic is not None and len(saved) > 1 and in_the_middle:
            raise ResumeError(
                f"another number of ranks cannot go on with {len(saved)} training loaders at once",
                hint=f"start it with {elastic.saved_size} ranks",
            )
        self._saved_generators = generators
        self._saved = saved
        self._elastic = elastic
        self._waiting = len(self._positions)

    def settle(self) -> None:
        """All loaders exist. Those that were made before the positions were known are started again at theirs."""
        if self._saved is not None and self._waiting:
            for index in range(self._waiting):
                self._load(index)
            self._waiting = 0
            self._internals.restart_fetcher()

    def measure(self) -> None:
        """All loaders exist: how many batches are fetched ahead is known now. Once per epoch."""
        for position in filter(None, self._positions):
            position.lookahead = self._internals.fetches_ahead

    def dealt(self) -> list[tuple[Dealing, int] | None]:
        """Of each loader that is followed, see `LoaderPosition.dealt`."""
        return [position.dealt for position in self._positions if position is not None]

    def batches_in_epoch(self) -> int | None:
        """Batches of the resumed epoch, if another number of ranks has begun it: not as many as in any other."""
        for dealing, total in filter(None, self.dealt()):
            limit = self._trainer.limit_train_batches
            if isinstance(limit, float) and limit < 1.0:
                left = limit * dealing.origin.samples - dealing.seen
                limit = dealing.first + int(left / (dealing.size * dealing.batch_size))
            return total if isinstance(limit, float) else min(total, max(limit, dealing.first + 1))
        return None

    def load_again(self) -> None:
        """Before the first epoch of a resumed run starts anew: what iterators were made so far does not count."""
        if self._saved is not None:
            for index in range(len(self._positions)):
                self._load(index)

    def resumed(self) -> None:
        """The run goes on; loaders made from now on start by themselves."""
        self._saved = self._elastic = None

    def states(self, *, epoch_is_over: bool) -> list[Any]:
        """One state per loader, for the snapshot instant; None for what is not a torch `DataLoader`."""
        return [None if p is None else p.next_epoch_state() if epoch_is_over else p.state() for p in self._positions]

    def generators(self) -> list[Any]:
        """The generators of validation loaders that have one of their own."""
        return [streams.capture_generators(loader) for loader in self._others]

    def problems(self) -> list[NotRestored]:
        """What is not exact about the loaders' resume. Final once a batch was fetched."""
        found = []
        if self._internals.user_fetches:
            why = "training_step(dataloader_iter) fetches itself; exact if it holds no batch between two steps"
            found.append(NotRestored("batches fetched ahead by the model", why))
        for index, (position, kind) in enumerate(zip(self._positions, self._types, strict=True)):
            name = f"position of training loader {index}, a {kind}"
            if position is None:
                found.append(NotRestored(name, "not a torch DataLoader: it starts again at its beginning"))
            elif position.restoration is not None and position.restoration.exactness.level is not Level.EXACT:
                exactness = position.restoration.exactness
                found.append(NotRestored(name, f"{exactness.level}: {'; '.join(exactness.reasons)}"))
        return found

    @property
    def one_with_workers(self) -> bool:
        """Where a batch that never comes leaves this process as it was: no sample is made here, no loader is ahead."""
        return len(self._workers) == 1 and self._workers[0] > 0

    def release(self) -> None:
        """Give all loaders back as they were."""
        for position in filter(None, self._positions):
            position.detach()
        self._forget()

    def _forget(self) -> None:
        self._positions, self._types, self._workers, self._waiting = [], [], [], 0

    def _load(self, index: int) -> None:
        assert self._saved is not None
        if index >= len(self._saved):
            raise StateError(
                f"the snapshot has {len(self._saved)} training loaders, this run has more",
                hint="use the loaders of the saved run, or start in another folder",
            )
        position, saved = self._positions[index], self._saved[index]
        if position is not None and saved is not None:
            if self._elastic is not None:
                saved = self._elastic.position(position, [own["loaders"][index] for own in self._elastic.own])
            # Iterators of a combination end one by one and are asked again then; a single one never stands at its end.
            position.load_state(saved, at_end="finish_epoch")
