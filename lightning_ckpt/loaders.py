"""The positions of all loaders of one `fit`: followed from when Lightning makes them, saved, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from ckpt_engine.adapter import LoaderPosition, NotRestored, OnChange, ResumeError, attach
from lightning_ckpt.compat import LightningInternals


@dataclass(eq=False)
class FitLoaders:
    """Follows every loader of one `fit`: those of training, and those of validation and its sanity check.

    Args:
        _internals: of the trainer.
        _trainer: whose loaders these are.
        _on_change: what becomes of an epoch that is resumed in its middle with changed loaders.
    """

    _internals: LightningInternals
    _trainer: pl.Trainer
    _on_change: OnChange = OnChange.REFUSE
    _positions: list[LoaderPosition | None] = field(default_factory=list)
    _types: list[str] = field(default_factory=list)
    _saved: Sequence[Any] | None = None
    _waiting: int = 0
    _before: object = ()
    _validation: list[LoaderPosition | None] = field(default_factory=list)
    _makes_validation: bool = False
    _validation_before: object = ()
    _saved_validation: Sequence[Any] = ()

    def make_validation(self, original: Callable[[], None]) -> None:
        """Runs where Lightning makes the loaders of validation: a search for a batch size does so while it trains."""
        self._makes_validation = True
        try:
            original()
        finally:
            self._makes_validation = False

    def follow(self, original: Callable[[Any], Any], loader: Any) -> Any:
        """Runs where the strategy processes a loader of any kind; returns what comes of it."""
        loader = original(loader)
        if self._makes_validation:
            self._follow_validation(loader)
        else:
            self._follow_training(loader)
        return loader

    def _follow_training(self, loader: Any) -> None:
        if self._internals.fetcher is not self._before:  # loaders are made, or made again, as one group
            self._before = self._internals.fetcher
            self._forget()
        self._types.append(type(loader).__name__)
        # Whether Lightning fetches one batch ahead depends on all loaders together, which is known later.
        position = attach(loader, lookahead=1) if isinstance(loader, DataLoader) else None
        self._positions.append(position)
        if position is not None and position in self._validation:
            position.aside = self._validates
            self._validation[self._validation.index(position)] = None
        if self._saved is not None:
            self._load(len(self._positions) - 1)

    def _follow_validation(self, loader: Any) -> None:
        made = self._trainer.num_val_batches  # another list each time that the loaders are made, as after a Tuner
        if made is not self._validation_before:
            self._validation_before, self._validation = made, []
        position = attach(loader) if isinstance(loader, DataLoader) else None
        if position is not None and position in self._positions:
            position.aside = self._validates  # the state of the training loader has all that is to be known
            position = None
        self._validation.append(position)
        if len(self._validation) <= len(self._saved_validation):
            self._load_validation(len(self._validation) - 1)

    def _validates(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
        return make() if not self._trainer.training or self._trainer.sanity_checking else None

    def expect(
        self,
        saved: Sequence[Any],
        validation: Sequence[Any],
        others: int | None,
        resplit: Callable[..., Any],
        announce: Callable[[str], None],
    ) -> None:
        """Loaders made from now on continue at these positions.

        Args:
            saved: of the training loaders.
            validation: of the validation loaders, between two passes; empty if the saved run had not made them.
            others: how many ranks have saved them, where it is another number.
            resplit: makes the position of this rank of those, see `TrainerResume`.
            announce: what may take long.

        Raises:
            ResumeError: another number of ranks has saved the positions of several loaders.
        """
        in_the_middle = any(one is not None and one["phase"] == "within" and one["batches"] for one in saved)
        if others is not None and len(saved) > 1 and in_the_middle:
            raise ResumeError(
                f"another number of ranks cannot resume {len(saved)} training loaders at once",
                hint=f"start it with {others} ranks",
            )
        self._saved_validation = validation
        self._saved = saved
        self._resplit, self._announce = resplit, announce
        self._waiting = len(self._positions)

    def settle(self) -> None:
        """All loaders exist. Those that were made before the positions were known are started again at theirs.

        Validation loaders that the saved run had are made now: what that draws must not move the streams later.
        """
        if self._saved_validation and not self._validation:
            self._internals.make_validation_loaders()
        late = self._waiting > 0
        for index in range(self._waiting):
            self._load(index)
        self._waiting = 0
        if again := self.epoch_restarts:
            self.load_again(restart=True)
        if late or again:
            iter(self._internals.fetcher)  # makes the iterator over the training loaders again

    @property
    def epoch_restarts(self) -> bool:
        """A training loader has changed, and the interrupted epoch starts again: with all loaders."""
        found = [position.restoration for position in self._positions if position is not None]
        return any(one is not None and one.restarted for one in found)

    def measure(self) -> None:
        """All loaders exist: how many batches are fetched ahead is known now. Once per epoch."""
        for position in filter(None, self._positions):
            position.lookahead = self._internals.fetches_ahead

    def dealt(self) -> list[tuple[Any, int] | None]:
        """Of each loader that is followed, see `LoaderPosition.dealt`."""
        return [position.dealt for position in self._positions if position is not None]

    def batches_in_epoch(self) -> int | None:
        """Batches of the resumed epoch, if other ranks or another loader have begun it: not as many as in any other."""
        for dealing, total in filter(None, self.dealt()):
            limit = self._trainer.limit_train_batches
            if isinstance(limit, float) and limit < 1.0:
                left = limit * dealing.origin.samples - dealing.seen
                limit = dealing.first + int(left / (dealing.size * dealing.batch_size))
            return total if isinstance(limit, float) else min(total, max(limit, dealing.first + 1))
        return None

    def load_again(self, *, restart: bool = False) -> None:
        """Before the first epoch of a resumed run starts again: what iterators were made so far does not count."""
        for index in range(len(self._positions)):
            self._load(index, restart=restart)

    def resumed(self) -> None:
        """The run goes on; loaders made from now on start by themselves."""
        self._saved = None
        self._saved_validation = ()

    def states(self, *, epoch_is_over: bool) -> list[Any]:
        """One state per training loader, for the snapshot instant; None for what is not a torch `DataLoader`."""
        return [
            None if p is None else p.next_epoch_state() if epoch_is_over else p.state(asked_again=True)
            for p in self._positions
        ]

    def validation_states(self) -> list[Any]:
        """One state per validation loader: each of their passes is complete at a snapshot instant."""
        if any(position is not None and position.dropped for position in self._validation):
            self._validation = []  # a search for a batch size has made them, and the run makes others
        return [None if position is None else position.next_epoch_state() for position in self._validation]

    def problems(self, inexact: Callable[[str, Any], list[NotRestored]]) -> list[NotRestored]:
        """What is not exact about the loaders' resume. Final once a batch was fetched.

        Args:
            inexact: what is not exact about one of them.
        """
        found = []
        if self._internals.user_fetches:
            why = "training_step(dataloader_iter) fetches itself; exact if it holds no batch between two steps"
            found.append(NotRestored("batches fetched ahead by the model", why))
        for index, (position, kind) in enumerate(zip(self._positions, self._types, strict=True)):
            name = f"position of training loader {index}, a {kind}"
            if position is None:
                found.append(NotRestored(name, "not a torch DataLoader: it starts again at its beginning"))
            else:
                found += inexact(name, position.restoration)
        for index, position in enumerate(self._validation):
            if position is not None:
                found += inexact(f"validation loader {index}", position.restoration)
        return found

    def notes(self) -> list[str]:
        """What is done for loaders in the middle of an epoch whose data set cannot say where it is."""
        found = [(index, one.restoration) for index, one in enumerate(self._positions) if one is not None]
        return [f"training loader {index}: {one.again}" for index, one in found if one is not None and one.again]

    @property
    def one_with_workers(self) -> bool:
        """Where a batch that never comes leaves this process as it was: no sample is made here, no loader is ahead."""
        first = self._positions[0] if len(self._positions) == 1 else None
        return first is not None and first.loader.num_workers > 0

    def release(self) -> None:
        """Give all loaders back as they were."""
        for position in filter(None, [*self._positions, *self._validation]):
            position.detach()
        self._validation = []
        self._forget()

    def _forget(self) -> None:
        self._positions, self._types, self._waiting = [], [], 0

    def _load(self, index: int, *, restart: bool = False) -> None:
        assert self._saved is not None
        if index >= len(self._saved):
            raise ResumeError(
                f"the snapshot has {len(self._saved)} training loaders, this run has more",
                hint="use the loaders of the saved run, or start in another folder",
            )
        position, saved = self._positions[index], self._saved[index]
        if position is not None and saved is not None:
            saved = self._resplit(position, "loaders", index) or saved
            # Iterators of a combination end one by one and are asked again then; a single one never stands at its end.
            alone = len(self._saved) == 1 or self._on_change is not OnChange.CONTINUE
            on_change = self._on_change if alone else OnChange.REFUSE  # several loaders would not be in step
            found = position.load_state(saved, at_end="finish_epoch", on_change=on_change, restart=restart)
            if found.again:
                self._announce(f"training loader {index}: {found.again}")  # now, as that may take long

    def _load_validation(self, index: int) -> None:
        position, saved = self._validation[index], self._saved_validation[index]
        if position is not None and saved is not None:
            saved = self._resplit(position, "validation", index) or saved
            position.load_state(saved, on_change=self._on_change)
