"""What one process takes over from an earlier one, of any trainer."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.config import Config
from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Level, Restoration
from ckpt_engine.data.position import LoaderPosition
from ckpt_engine.data.rng import Teams
from ckpt_engine.data.streams import same
from ckpt_engine.engine import Engine
from ckpt_engine.errors import CkptError, MismatchError
from ckpt_engine.loop.capture import (
    STRICT,
    Elastic,
    numbers_of,
    own_part,
    require_whole_gradients,
)
from ckpt_engine.loop.components import made_otherwise
from ckpt_engine.loop.distributed_models import GradientOrder
from ckpt_engine.loop.open_report import OpenReport
from ckpt_engine.observe.resume_report import (
    NotRestored,
)
from ckpt_engine.observe.units import count
from ckpt_engine.restore import choose
from ckpt_engine.restore.changes import is_due, restarts
from ckpt_engine.restore.far_storage import storage_of
from ckpt_engine.restore.load import Loaded
from ckpt_engine.restore.match import require_size
from ckpt_engine.state import optimizers as stored
from ckpt_engine.state.wrapped import mapped
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.names import RECORD
from ckpt_engine.store.repository import Repository

_ONE_RANK = "leave the model out of the section; or make the change in a run of one process, and export its snapshot"


class Resume(ABC):
    """What one process takes over from an earlier one, of any trainer.

    Args:
        engine: opens the run's folder.
        log: of the adapter.
        folder: where the report is written if the run's own place is not a local folder.

    Attributes:
        report: of what is taken over.
    """

    def __init__(self, engine: Engine, log: logging.Logger, folder: Callable[[], str | Path]) -> None:
        self._engine = engine
        self._own: Mapping[str, Any] = {}
        self._elastic: Elastic | None = None
        self.report = OpenReport(engine, log, folder)

    def _open(self, state: dict[str, Any], loaded: Loaded) -> dict[str, Any] | None:
        """Begin the report, and take our own entries out of the state of a snapshot; None: others have made it."""
        self.report.is_open = True
        found = own_part(state, loaded, numbers_of(self._engine.ranks), self._engine.config.rng)
        if found is None:
            return None
        own, notes, self._elastic, differing = found
        self.report.notes += notes
        self.report.missing += differing
        own["parameters"] = stored.read_order(own.get("parameters"))
        self._engine.expect_replay(loaded, self._other_way)
        if (recorder := self._engine.recorder) is not None:
            recorder.proof.told = self.report.add_replay
        if self._engine.changes.new_streams:
            own["rng"] = rng.capture()
        if self._engine.changes.restarts:
            self._elastic, self._own = None, {"parameters": own["parameters"]}
            self.report.notes.append(f"training begins at step 0 with parts of step {loaded.info.step:,}")
            return None
        return own

    @property
    def _other_way(self) -> str:
        """Why training is to go another way from the snapshot than it did before; "": it is not."""
        return ""

    @staticmethod
    def newest_notes(config: Config) -> Mapping[str, Any]:
        """The notes of the snapshot that a run is likely to resume from: further tiers are not waited for twice."""
        for tiers in (config.tiers[:1], config.tiers[1:]):
            with suppress(CkptError):  # the resume itself finds the same, and raises it
                found = choose.choose([Repository(storage_of(tier)) for tier in tiers]) if tiers else None
                if found is not None:
                    notes = found.manifest.notes
                    return {} if restarts(config.resume, notes) else notes
        return {}

    def start_fresh(self, how: str) -> None:
        """Training begins from none of the snapshots in the run's place.

        Args:
            how: what the user does to resume from them; "": that is known already.
        """
        if how:
            self._engine.start_fresh(how)
        self.report.announce(
            f"snapshots go to {self._engine.root_url}, nothing is resumed from there; {self._engine.rhythm}"
        )

    # ---- what resumes of all trainers have in common

    def _require_ranks(self, manifest: Manifest) -> None:
        """Raises ResumeError where another number of ranks has taken the snapshot, and the user wants the same."""
        if self._engine.config.rng == STRICT:
            require_size(manifest, numbers_of(self._engine.ranks)[1])

    def _note_place(self, own: Mapping[str, Any], complete: int | None) -> None:
        """The place of the snapshot, for the report; `complete`: the epoch whose end it is."""
        self.report.notes.insert(
            0,
            f"continues in epoch {own['epoch']} after {count(own['batch'], 'batch')}"
            if complete is None
            else f"epoch {complete} was complete",
        )

    def _restore_streams(self) -> list[NotRestored]:
        return [NotRestored("random streams", problem) for problem in rng.restore(self._own["rng"])]

    def _restore_gradient_order(
        self, wrappers: Iterable[torch.nn.Module], *, last: bool
    ) -> tuple[list[NotRestored], bool]:
        """See `GradientOrder.put_back`."""
        assert self._engine.loaded is not None
        step, same = self._engine.loaded.info.step, self._elastic is None
        return GradientOrder(wrappers).put_back(self._own, self._engine, step, last=last, same=same)

    def _match_optimizers(
        self, parts: stored.Parts, order: dict[str, stored.Groups], schedulers: Mapping[str, Any], *, divided: bool
    ) -> list[NotRestored]:
        """Give the optimizers their parameters in the saved order, and name what the script makes otherwise now.

        Args:
            order: see `put_in_order`.
            schedulers: by name, among any other objects.

        Raises:
            MismatchError: the optimizers are not those of the saved run.
        """
        moved = stored.put_in_order(order, parts, divided=divided)
        self.report.notes += [f"{name}: {stored.MOVED}" for name in moved]
        optimizers, schedulers = (
            {name: one for name, one in objects.items() if not self._engine.changes.touches(self._component(name))}
            for objects in (parts.optimizers, schedulers)
        )
        return made_otherwise(self._own.get("made"), optimizers, schedulers)

    def _changes_are_due(self, manifest: Manifest) -> bool:
        """Whether the option `resume` changes this snapshot, which then need not fit as it is."""
        return is_due(self._engine.config.resume, manifest.notes)

    def _require_whole(self, *components: str, divided: bool) -> None:
        """Raises MismatchError where ranks have parts of these models, and they are changed."""
        if divided and any(map(self._engine.changes.touches, components)):
            raise MismatchError("resume: weights that are divided over ranks cannot be changed", hint=_ONE_RANK)

    @staticmethod
    def _component(name: str) -> str:
        """The component of an optimizer or scheduler in the section `resume`."""
        return name

    def _fit_optimizers(self, parts: stored.Parts, states: dict[str, Any], order: dict[str, stored.Groups]) -> None:
        """Where a resume changes weights, give each parameter of the optimizers its own state, or none.

        Args:
            states, order: by component; the order becomes that of the live optimizers.
        """
        changes = self._engine.changes
        if not changes:
            return
        order |= stored.as_named_here(order, parts)
        order |= {changes.renamed(key): order.pop(key) for key in tuple(order)}
        for key, now in stored.names_of(parts).items():
            before = [[changes.renamed(name) for name in names] for names in order.pop(key, [])]
            known = set(chain.from_iterable(before))
            if key in states and before:
                unknown = [one for names in now for one in names if one not in known and not changes.leaves(one)]
                order[key] = now if changes.loose or not unknown else before
                if order[key] is now:
                    live = parts.optimizers[key].state_dict()
                    states[key] = stored.matched(states[key], before, live, now, changes.leaves)

    def publish(self) -> None:
        """Log and write the report, once."""
        if self.report.is_open:
            self._conclude()
            self.report.publish()

    @abstractmethod
    def _conclude(self) -> None:
        """Add to the lists what is known last."""


def inexact(name: str, restoration: Restoration | None) -> list[NotRestored]:
    """What is not exact about the position of a loader."""
    if restoration is None or restoration.exactness.level is Level.EXACT:
        return []
    exactness = restoration.exactness
    return [NotRestored(name, f"{exactness.level}: {'; '.join(exactness.reasons)}")]


class TrainerResume(Resume):
    """What a trainer that restores models and optimizers itself leaves to the engine."""

    count, restarts = staticmethod(count), staticmethod(restarts)
    own_copy, mapped, same = staticmethod(stored.own_copy), staticmethod(mapped), staticmethod(same)
    inexact = staticmethod(inexact)

    @staticmethod
    def mark_of(root_url: str) -> str:
        """What names the run of this place in the files of others."""
        return digest(root_url.encode())

    @staticmethod
    def is_run(path: str | os.PathLike[str]) -> bool:
        """Whether a local folder has the snapshots of a run."""
        return (Path(path) / RECORD).is_file()

    def _resplit(self, position: LoaderPosition, *path: Any) -> dict[str, Any] | None:
        """The position of a loader for this rank; None: as many ranks have saved it.

        Args:
            path: where each saved rank has it among its own entries.
        """
        them = self._elastic
        return None if them is None else them.position(position, [reduce(getitem, path, one) for one in them.own])

    def _set_teams(self, before: int, now: int) -> None:
        """Another number of ranks has saved the snapshot: so many ranks share a model, then and now."""
        old = self._elastic
        self._elastic = old and replace(old, teams=Teams.of_sizes(old.saved_size, before, old.rank, now))

    def _merged_gradients(self, module: torch.nn.Module, root: torch.nn.Module) -> dict[str, Any]:
        """Those of all saved ranks together, where another number of ranks has saved them.

        Args:
            module: whose they are.
            root: what wraps it, if its parameters are divided.

        Raises:
            ResumeError: they are parts that fit nowhere.
        """
        assert self._elastic is not None
        require_whole_gradients([root], self._elastic.saved_size)
        found, missing = self._elastic.gradients([one["gradients"] or {} for one in self._elastic.own], module)
        self.report.add([], missing if self.report.rank == 0 else [])
        return found

    def _load_optimizers(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Sequence[Any],
        load: Callable[[list[Any]], object],
        *,
        divided: bool,
    ) -> None:
        """The trainer loads the states; what that damages is mended."""
        with stored.linked(optimizers):
            load(list(map(stored.guarded, states)))
        for optimizer, state in zip(() if divided else optimizers, states, strict=False):
            stored.put_exactly(optimizer, state)

    _settle_optimizers = staticmethod(stored.into_own_memory)

    @contextmanager
    def _fitting(self, what: str, hint: str) -> Iterator[None]:
        """Inside, the optimizers are restored.

        Raises:
            MismatchError: `what`, and why.
        """
        try:
            yield
        except (ValueError, KeyError, MismatchError) as err:
            why, own = (err.message, err.hint) if isinstance(err, MismatchError) else (str(err), "")
            raise MismatchError(f"{what}: {why}", hint=own or hint) from err
