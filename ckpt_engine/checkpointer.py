"""What users call in plain PyTorch loops and under Lightning Fabric."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ckpt_engine.config import Config, Options
from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.walk import walk
from ckpt_engine.engine import Engine
from ckpt_engine.errors import CkptError, ConfigError
from ckpt_engine.loop.components import NamedParts, Surroundings
from ckpt_engine.loop.loader_source import LoaderSource
from ckpt_engine.loop.open_report import folder_of_report, publish, report_of
from ckpt_engine.loop.steps_made import needs_optimizer
from ckpt_engine.loop.tracker import Tracker
from ckpt_engine.observe.events import LOG
from ckpt_engine.observe.run_facts import WithFacts
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.load import Loaded
from ckpt_engine.restore.load_in_place import copy_into
from ckpt_engine.restore.match import require_fit
from ckpt_engine.snapshot import arguments
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.flatten import LazyPredicate, shapes_of
from ckpt_engine.state.wrapped import kinds_of, with_made
from ckpt_engine.store.manifest import SnapshotInfo

T = TypeVar("T")
_FABRIC_LOADER = "_dataloader"
_FABRIC_COUNTER = "_num_iter_calls"
_FOLLOWED = (DataLoader, Optimizer, torch.nn.Module)
_MOST_OBJECTS, _MOST_ITEMS = 200, 16


class Checkpointer(WithFacts):
    """Takes and restores snapshots of one run.

    Nothing is started, written or locked before the first `prepare` or `save`. All methods belong to the training
    thread.

    Args:
        root: folder of the run, or any fsspec URL such as `s3://bucket/run1`; or a YAML file, or a mapping of options.
        ranks: where several processes train together, see docs/many-ranks.md; None: this one is alone.
        options: see docs/configuration.md.

    Attributes:
        engine: what an adapter of a trainer calls.

    Raises:
        ConfigError: an option is unknown or impossible.

    Examples:
        >>> with Checkpointer("/data/run1") as ckpt:
        ...     state = ckpt.load() or state
        ...     ckpt.save(state, step=step).wait()
        >>> newest = Checkpointer("/data/run1").snapshots()[-1].step
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        *,
        ranks: Ranks | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.engine = Engine(root, ranks=ranks, **options)
        self.config: Config = self.engine.config
        """The options."""
        self._tracker: Tracker | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the options, and has not begun: a run belongs to one process."""
        return type(self), (self.config,)

    @property
    def facts(self) -> dict[str, str]:
        """What `repr` and a notebook show of the run."""
        return self.engine.facts

    @property
    def loaded(self) -> Loaded | None:
        """What the last `load` has found."""
        return self.engine.loaded

    def track(self, **objects: Any) -> Tracker:
        """Resume `objects` from the newest snapshot if there is one, and take snapshots while they train from here on.

        The loop's body stays as it is; one without an optimizer of torch ends in `tracker.step()`. See
        docs/plain-loops.md. One call per checkpointer.

        Args:
            **objects: whatever belongs to the run, by name: modules, optimizers, schedulers, scalers, `DataLoader`s,
                and all else with `state_dict` and `load_state_dict`. Names are the snapshot's components. Objects that
                Lightning Fabric has set up work too.

        Returns:
            Where the loop is: `for epoch in range(tracker.epoch, n)`.

        Raises:
            ConfigError: an object has no state to save, an optimizer is only within one, or this is one of several
                processes.
            NoUsableSnapshotError: there are snapshots, and none is usable.
            MismatchError: the newest snapshot is of other objects; names them. Nothing was changed.
            LeaseHeldError, StorageError, WriterError: as `Engine.start`.

        Examples:
            >>> run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            >>> for epoch in range(run.epoch, epochs):
            ...     for batch in loader:
            ...         ...
        """
        self.engine.tenure.require_open()
        if self._tracker is not None:
            raise ConfigError("this Checkpointer tracks objects already", hint="pass all objects in one call")
        self._tracker = track_objects(self.engine, objects)
        return self._tracker

    def prepare(self, state: Any, *, lazy: LazyPredicate | None = None) -> None:
        """Announce the state: the arena is made ready in the background, so that the first snapshot is as fast as any.

        First touch of memory can take seconds of processor time per GB, in idle time only; a `save` that comes before
        it is done takes several times as long as later ones.

        Args:
            state: as later given to `save`; nothing is copied.
            lazy: as later given to `save`.

        Raises:
            UnstorableLeafError: a leaf would need pickle; names it.
            ClosedError, LeaseHeldError, StorageError, WriterError: as `Engine.start`.

        Examples:
            >>> ckpt.prepare({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        """
        self.engine.prepare(state, lazy=lazy)

    def save(
        self,
        state: Any,
        *,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        epoch: int | None = None,
        reason: str = "manual",
        lazy: LazyPredicate | None = None,
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> SaveHandle:
        """Take a snapshot of this instant; returns when training may continue.

        Args:
            state: any nesting of dicts, lists, tuples, dataclasses, tensors, arrays and plain values. Top-level string
                keys are the snapshot's components.
            step: training step; shown, and used by retention. It, `epoch` and metrics may be numbers of numpy or torch.
            metrics: numbers that retention may rank by.
            epoch: shown; None: there is none.
            reason: why it is taken; shown.
            lazy: True for paths of tensors on a GPU that do not change before the next `before_update`; they are copied
                while training continues, and a snapshot whose copy was torn fails. Host memory is always copied first.
                Pass the same function object every time.
            notes: JSON kept in the manifest; paths become texts.
            durable: False: it only stays in memory, until a newer one takes its place; if this process dies first, the
                writer makes it durable. Needs the memory tier.

        Returns:
            A handle; `handle.wait()` returns once the snapshot is durable, or in memory. If earlier snapshots
            still fill the arena this one is skipped (`handle.skipped`): training never waits for storage.

        Raises:
            ArgumentError: an argument means nothing that can be stored; names it, and the leaf in it.
            UnstorableLeafError: a leaf would need pickle, or has no bytes; names it. Nothing was saved.
            SnapshotFailedError: an earlier snapshot failed in the background (only with `on_error: raise`, once).
            ClosedError, LeaseHeldError, StorageError, WriterError: as `Engine.start`.
            ConfigError: not `durable`, and no memory tier among `tiers`.
        """
        return self.engine.save(
            state, step=step, metrics=metrics, epoch=epoch, reason=reason, lazy=lazy, notes=notes, durable=durable
        )

    def before_update(self) -> float:
        """The fence: call right before the state is mutated. Returns the seconds it waited; cheap if nothing stages.

        Raises:
            StateError: a copy failed.

        Examples:
            >>> ckpt.before_update()
            >>> with torch.no_grad():
            ...     weight.mul_(0.5)
        """
        return self.engine.before_update()

    @overload
    def load(self, step: int | None = None, *, into: None = None) -> Any | None: ...

    @overload
    def load(self, step: int | None = None, *, into: T) -> T | None: ...

    def load(self, step: int | None = None, *, into: Any = None) -> Any | None:
        """The state of the newest valid snapshot (of `step`), or None if there are none at all.

        Every byte is checked against its digest, but for what docs/sharded.md says of parts of DTensors. Of several
        tiers the nearest that has the snapshot whole serves it; what is damaged there comes from the next one. With the
        memory tier the nearest one is the writer of a trainer that died on this machine, while it lingers. A damaged
        snapshot is passed over for the next older one. `self.loaded` tells which one it was, from where, and why.

        Args:
            step: that of the snapshot; None: the newest.
            into: live state whose tensors are overwritten in place, without a second copy of the state in memory; None
                in the place of a component takes it as it is read. If an error is raised after reading began, the
                content of the tensors is undefined.

        Raises:
            NoUsableSnapshotError: there are snapshots, and none is usable; says why for each. Or there are none, and a
                tier does not answer.
            ResumeError: no snapshot of `step`.
            MismatchError: `into` has other tensors; names them. Nothing was overwritten. Or it lacks a tensor of other
                tensors, whose class only the live one may have.
        """
        changes = isinstance(self.config.resume, ResumeChanges)
        state = self.engine.load(step, into=None if changes else into)
        loaded = self.engine.loaded
        if changes and loaded is not None:
            state = self._changed(state, into, loaded)
        return with_made(state, kinds_of()) if loaded is not None and loaded.has_wrapped else state

    def _changed(self, state: Any, into: Any, loaded: Loaded) -> Any:
        """The state with the changes of the option `resume`, in the tensors of `into`."""
        changes, url = self.engine.changes, self.engine.root_url
        if isinstance(state, dict):
            changes.change(state, into or {})
            state = {**(into or {}), **state}
        changes.require_used()
        if into is not None:
            require_fit(into, shapes_of(into), shapes_of(state), loaded.info.id)
            state = copy_into(state, into)
        if changes:
            publish(report_of(url, loaded, changes=changes), folder_of_report(url, Path.cwd()), LOG)
        return state

    def snapshots(self) -> list[SnapshotInfo]:
        """All snapshots that any tier has, oldest first.

        Raises:
            StorageError: no tier answers.
        """
        return self.engine.snapshots()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; False if that took too long.

        Args:
            timeout: seconds; None waits up to an hour.

        Raises:
            ArgumentError: `timeout` is no number.

        Examples:
            >>> assert ckpt.wait(timeout=60)
        """
        return self.engine.wait(timeout)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> None:
        """Finish what is in flight, give back the lease and the memory. Idempotent.

        When the nearest tier has everything, further ones are waited for, `wait_at_end` seconds at most. In a fork of
        the process that takes the snapshots this does nothing.

        Args:
            timeout: seconds for all of that; None: 10 min, and `wait_at_end`.
            failed: training did not end normally: ranks with the memory tier leave their newest snapshot there.

        Raises:
            WaitTimeoutError: snapshots are still being written; the writer process finishes them alone. This is
                only logged where a stop leaves less time.
            SnapshotFailedError: the last state that was to be saved is durable nowhere (not with `on_error: warn`, nor
                while another exception is handled); with `on_error: raise`, a failure that was not surfaced yet.

        Examples:
            >>> ckpt.close(timeout=60)  # or `with Checkpointer(...) as ckpt`
        """
        self.engine.begin_close(timeout)
        try:
            if self._tracker is not None and not self.engine.tenure.forked:
                self._tracker.finish()
        finally:
            self.engine.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(failed=kind is not None)
        except CkptError as err:
            if kind is None:
                raise
            # The user must see the exception that stopped training, not this one.
            LOG.error("while handling %s: %s", kind.__name__, err)


def track_objects(engine: Engine, objects: Mapping[str, Any]) -> Tracker:
    """See `Checkpointer.track`.

    Raises:
        ConfigError: as there.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1 and engine.ranks is None:
            raise ConfigError(
                f"this is one of {processes} processes, and this Checkpointer does not know of the others",
                hint="pass ranks=ProcessGroupRanks(), see docs/many-ranks.md",
            )
    for name in objects:
        arguments.text(f"the name {name!a} of a component", name)
    sources = {name: source for name, value in objects.items() if (source := source_of(value)) is not None}
    for name, value in objects.items():
        if name not in sources and not isinstance(value, type) and not is_stateful(value):
            raise ConfigError(
                f"{name!r}, a {type(value).__name__}, has no state_dict() and load_state_dict()",
                hint=_instead(name, value),
            )
    parts = NamedParts({name: value for name, value in objects.items() if name not in sources})
    held = [name + path for name, value in objects.items() for path in _paths(value, (Optimizer,))]
    if held and not parts.optimizers:
        raise needs_optimizer(held[0])
    return Tracker(engine, parts, sources, Surroundings(), trainer="loop", folder=Path.cwd())


def _instead(name: str, value: Any) -> str:
    """What to track in the place of an object without a state."""
    if held := _paths(value, _FOLLOWED):
        return f"track what it holds: {', '.join(name + path for path in held)}"
    if callable(getattr(value, "__iter__", None)):
        return (
            "track the torch DataLoader that it reads, or give the class these two methods; else leave it out and call "
            "run.step() as the last statement of the loop's body: its samples begin again at a resume"
        )
    return (
        "track modules, optimizers, schedulers, scalers, loaders, or give the class these two methods; a loop without "
        "an optimizer of torch calls run.step() as the last statement of its body"
    )


def _paths(value: Any, kinds: tuple[type[Any], ...]) -> list[str]:
    """Where an object holds the first one of each of these kinds, as Python has it: ".optimizer", ".pipeline[0]"."""
    found: dict[type[Any], str] = {}
    for path, one in walk(("", value), partial(_inner, kinds), _MOST_OBJECTS):
        kind = next((kind for kind in kinds if isinstance(one, kind)), None)
        if path and kind is not None:
            found.setdefault(kind, path)
    return list(found.values())


def _inner(kinds: tuple[type[Any], ...], path: str, one: Any) -> list[tuple[str, Any]]:
    if path and isinstance(one, kinds):
        return []
    parts = [(f"{path}.{name}", part) for name, part in getattr(one, "__dict__", {}).items()]
    if isinstance(one, list | tuple):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(one[:_MOST_ITEMS])]
    return [row for row in parts if isinstance(row[1], list | tuple) or hasattr(row[1], "__dict__")]


def source_of(value: Any) -> LoaderSource | None:
    """The loader in `value`, a `DataLoader` or what Fabric's `setup_dataloaders` makes of one; None if it is none.

    Raises:
        ConfigError: the loader was prepared by Accelerate.
    """
    if issubclass(type(value), DataLoader):
        return LoaderSource(value, value)
    if isinstance(value, DataLoader):  # Accelerate's wrappers say that they are one
        raise ConfigError(
            f"a {type(value).__name__} belongs to Accelerate",
            hint="use accelerate_ckpt.AdaptiveCheckpoint(accelerator)",
        )
    inner = getattr(value, "__dict__", {}).get(_FABRIC_LOADER)
    if isinstance(inner, DataLoader) and hasattr(value, _FABRIC_COUNTER):
        return LoaderSource(value, inner, counter=_FABRIC_COUNTER)
    return None
