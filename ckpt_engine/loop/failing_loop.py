"""A loop that ends by an exception: saves its last boundary, if that can be had exactly.

Parameters that an optimizer manages, and its state, change behind the fence only: until a step passes the fence they
are those of the boundary. `LastBoundary` records everything else at each boundary, or compares it with what it was.
Where a change cannot be seen, nothing is saved and the reason is said.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import torch

from ckpt_engine.data import rng
from ckpt_engine.errors import CkptError, ConfigError, WaitTimeoutError
from ckpt_engine.loop import components
from ckpt_engine.loop.boundary import RunInstant, TrainingRun
from ckpt_engine.loop.components import Components, managed
from ckpt_engine.loop.distributed_models import is_flat
from ckpt_engine.loop.halt import EXCEPTION_WAIT_SECONDS
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.module_names import canonical, renamed
from ckpt_engine.state.sharding import here, is_sharded, parts_of
from ckpt_engine.state.wrapped import duplicate
from ckpt_engine.whose_code import of_framework

_EACH_ELEMENTS = 16


Undo = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes of components, as they are now, those of the boundary."""
TakeLast = Callable[[], SaveHandle | None]
"""Takes the snapshot of a boundary. What finds it raises ImpossibleError where that boundary cannot be had."""
R = TypeVar("R")
MOST_BYTES = 1 << 20
_MOST_VALUES = 256
_PLAIN = (float, int, str, bool, type(None), bytes, PurePath)
_SHARE = 0.5
AGAIN = 64
"""Boundaries after which what was found out about a run is looked at again."""
_SMOOTH = 0.9


@dataclass(frozen=True, slots=True)
class BoundaryRecord:
    """What an adapter knows of a boundary, as far as a step changes it before its optimizers do.

    Args:
        own: our own entries of a snapshot, those of each trainer (epoch, batch) among them.
        state: makes the state tree of these entries and more; no `Undo`: only the loader has run since.
        metrics: numbers that retention may rank snapshots by.
        notes: for the manifest, besides the batch.
        obstacle: why nothing can be saved once a batch is there, or "".
    """

    own: Mapping[str, Any]
    state: Callable[[dict[str, Any], Undo | None], dict[str, Any]]
    metrics: Callable[[], Mapping[str, float]]
    notes: Callable[[], dict[str, Any]]
    obstacle: str


def save_last(step: int, find: Callable[[], TakeLast], run: TrainingRun) -> str:
    """An exception has ended the loop: save its last boundary unless that is done; what came of it. Never raises.

    Of several ranks each saves its part.

    Args:
        step: of that boundary.
        find: returns what takes the snapshot; both raise ImpossibleError where that boundary cannot be had.
        run: of the loop.
    """
    engine, saved = run.engine, run.saved
    run.stopping.halt.fail()
    try:
        take = find()
        if saved is not None and saved.step == step:
            found = _outcome(saved, run)
            if saved.error is None:
                return found
        if not engine.ready() and not engine.wait(run.stopping.halt.seconds_left(EXCEPTION_WAIT_SECONDS)):
            engine.miss(step, "busy")
            return f"step {step} is not saved: earlier snapshots are still being written"
        handle = take()
        engine.before_update()
        return f"step {step} is not saved" if handle is None else _outcome(handle, run)
    except ImpossibleError as err:
        engine.miss(step, str(err))
        return f"the last boundary is not saved: {err}"
    except Exception as err:  # noqa: BLE001 - a device may be unusable; the user must see what stopped training
        return f"the last boundary is not saved: {type(err).__name__}: {err}"


def _outcome(handle: SaveHandle, run: TrainingRun) -> str:
    """What comes of the snapshot of the last boundary, which is waited for as long as there is time.

    A snapshot of several ranks exists once the writer of one of them has found the parts of all. That one may find the
    last of them when its trainer is gone; and what it does not find in time is found at the next start.
    """
    step, ranks = handle.step, run.engine.ranks
    try:
        handle.wait(run.stopping.halt.seconds_left(EXCEPTION_WAIT_SECONDS))
    except CkptError as err:
        if ranks is None or not isinstance(err, WaitTimeoutError):
            return str(err)
    else:
        if ranks is None or ranks.rank == 0:
            return "that is the last step"
    return f"step {step} is saved once the parts of all ranks are there"


class FailingRun:
    """Training thread only.

    Args:
        run: takes the snapshot.

    Attributes:
        waits: the loop waits for the first batch after the boundary: no code but the loader's has run since.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._parts, self._audit, self._run = run.capture.parts, run.capture.audit, run
        self.last: LastBoundary[Callable[[], TakeLast]] = LastBoundary(self._make, run.config.overhead)
        self._step = 0
        self._around = sys.exception()
        """Being handled while all of this trains: it does not end the loop."""
        self._ended = self.waits = False
        self._tensors: _Tensors
        self._left: list[list[float]] | None = None
        self._count = 0

    def reached(self, step: int, know: Callable[[], BoundaryRecord]) -> None:
        """A boundary where a snapshot can be taken; the next step begins when this returns.

        Args:
            step: of the run; the same on all ranks that are at the same boundary.
            know: makes the adapter's record. Raises ImpossibleError where there can be no snapshot after all.
        """
        self._step, self._know, self._left, self.waits = step, know, None, False
        self.last.reached()

    def missed(self, step: int, why: str) -> None:
        """A boundary where no snapshot can be taken."""
        self._step = step
        self.last.missed(f"no snapshot can be taken there: {why}")

    def left(self) -> None:
        """The loop over a loader was left: by an exception, or the script goes on and may exchange the weights."""
        if self._left is None and self.last.holds:
            self._left = self._tensors.samples()

    def end(self, error: BaseException | None) -> None:
        """An exception ends the loop: save its last boundary where that is exact, and say what is durable.

        Never raises: `error` is what the user must see.

        Args:
            error: None: the process ends, and the loop was not closed.
        """
        stopping, expected = self._run.stopping, error is not None and error is self._around
        if self._ended or expected or isinstance(error, CkptError) or stopping.halt.over:
            return
        self._ended = True
        found = save_last(self._step, lambda: self.last.record()(), self._run)
        self.last.missed("an exception has ended the loop")
        stopping.failed(error, found)

    def _make(self) -> Callable[[], TakeLast]:
        """At every boundary: what finds it later."""
        known = self._know()
        if self._count % AGAIN == 0 or self._tensors.grouped != _grouped(self._parts):
            self._tensors = _Tensors(self._parts)
        self._count += 1
        tensors, streams = self._tensors, rng.capture_later()
        obstacle, compared, others = tensors.obstacle or known.obstacle, dict[str, Any](), self._others()
        if not obstacle:
            try:
                compared = self._seen(others)
            except ImpossibleError as err:
                obstacle = str(err)
        if not all(of_framework(type(one)) for one in others.values()) and rng.capture() != (now := streams()):
            rng.restore(now)  # a state_dict of the user may draw
        modes, versions, attributes = (
            tensors.modes(),
            tensors.versions(),
            self._audit.hidden.frozen(quick=True),
        )
        metrics = {} if obstacle else tensors.metric_states()
        copies = [] if obstacle else tensors.copies()

        def find() -> TakeLast:
            require_unmoved(attributes, self._audit.hidden.frozen())
            if tensors.identity() != _Tensors(self._parts).identity():
                raise ImpossibleError("the model has other parameters or buffers than at that boundary")
            if tensors.versions() != versions or self._left not in (None, tensors.samples()):
                raise ImpossibleError("weights have changed since that boundary")
            if not self.waits:
                if obstacle:
                    raise ImpossibleError(obstacle)
                require_unmoved(compared, self._seen(self._others()))
            require_finite(self._parts.optimizers.values())
            if self._run.stopping.suspicious():
                raise ImpossibleError(f"the loss of step {self._step} is far above the median of the steps before")
            undo = None if self.waits else partial(tensors.put, copies)
            own = {**known.own, "rng": streams(), "flags": tensors.flags(modes)}
            own |= {} if undo is None else {"metric_states": metrics}
            instant = RunInstant(
                step=self._step,
                epoch=own["epoch"],
                state=lambda: known.state(own, undo),
                metrics=known.metrics(),
                notes=lambda: {"batch": own["batch"], **known.notes()},
            )
            return lambda: self._run.take(instant, "exception")

        return find

    def _others(self) -> dict[str, Any]:
        models, optimizers = self._parts.modules, self._parts.optimizers
        return {k: v for k, v in self._parts.objects.items() if k not in models and k not in optimizers}

    def _seen(self, others: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: fingerprint(name, [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups])
            for name, optimizer in self._parts.optimizers.items()
        }
        for name, value in others.items():
            if isinstance(value, torch.amp.GradScaler):  # its state_dict waits for the device
                tensors = (one for one in vars(value).values() if isinstance(one, torch.Tensor))
                found[name] = [(id(one), one._version) for one in tensors]
            else:
                found[name] = fingerprint(name, value.state_dict())
        return found


class _Tensors:
    """The tensors of the models, and the modules they are in, found once for many boundaries.

    Attributes:
        grouped: how many parameters each group of each optimizer has.
        obstacle: why what changes in forward cannot be copied, or "".
    """

    def __init__(self, parts: Components) -> None:
        self._models, optimizers = parts.modules, parts.optimizers.values()
        self.grouped = _grouped(parts)
        self._weights = [part for one in managed(optimizers) for part in parts_of(one)]
        self._modules = [(name, path, one) for name, m in self._models.items() for path, one in m.named_modules()]
        self._parameters = [(name, path, p) for name, m in self._models.items() for path, p in m.named_parameters()]
        self._metrics = [(name, components.topmost(one)) for name, one in components.those_with(parts.objects)]
        self._loose: list[tuple[str, Loose]] = []
        self.obstacle = ""
        if parts.flat is not None or any(map(is_sharded, managed(optimizers))):
            self.obstacle, self._weights = "the model is divided", []
        try:
            found = {name: loose_tensors(module, optimizers) for name, module in self._models.items()}
            self._loose = [(name, one) for name, rows in found.items() for one in rows]
        except ImpossibleError as err:
            self.obstacle = str(err)

    def identity(self) -> list[Any]:
        """The same as long as nothing is added to the models or optimizers, or taken away."""
        named = [(name, path, id(one)) for name, path, one in (*self._modules, *self._parameters)]
        return [named, self._loose, [id(one) for one in self._weights], self.obstacle]

    def versions(self) -> list[tuple[int, int]]:
        """Of the weights: others where something was written, but for what torch does not count."""
        return [(one.data_ptr(), one._version) for one in self._weights]

    def samples(self) -> list[list[float]]:
        """A few elements of each weight."""
        flat = (one.detach().reshape(-1) for one in self._weights)
        return [one[:: max(1, one.numel() // _EACH_ELEMENTS)].tolist() for one in flat]

    def modes(self) -> tuple[list[bool], list[bool]]:
        """Which modules train, and which parameters are trained."""
        return [one.training for _, _, one in self._modules], [one.requires_grad for _, _, one in self._parameters]

    def flags(self, modes: tuple[list[bool], list[bool]]) -> dict[str, dict[str, list[str]]]:
        """As `dump_flags` of each model at the moment of `modes`."""
        rows: dict[str, list[Any]] = {
            "frozen": list(zip(self._parameters, modes[1], strict=True)),
            "eval": list(zip(self._modules, modes[0], strict=True)),
        }
        return {
            name: {
                kind: [path for (model, path, _), trains in pairs if model == name and not trains]
                for kind, pairs in rows.items()
            }
            for name in self._models
        }

    def copies(self) -> list[torch.Tensor]:
        """Of what changes in forward."""
        return [duplicate(one.tensor) for _, one in self._loose]

    def metric_states(self) -> dict[str, components.States]:
        """As `components.dump_all`, in memory of its own."""
        return {name: components.dump_below(found, own=True) for name, found in self._metrics}

    def put(self, copies: list[torch.Tensor], state: dict[str, Any]) -> dict[str, Any]:
        """Components with these copies in the place of the live tensors.

        Raises:
            ImpossibleError: a model's has what only its own code knows.
        """
        new = dict(state)
        for name, module in self._models.items():
            new[name] = copy.copy(state.get(name, {}))
            if not new[name].keys() <= {one.key for one, _ in keys_of(module)}:
                raise ImpossibleError(f"only the state_dict of {name} knows what of it the step has changed")
        for (name, one), saved in zip(self._loose, copies, strict=True):
            if one.key not in new[name]:
                continue  # a state_dict may leave out what is frozen
            if new[name][one.key].data_ptr() != one.tensor.data_ptr():
                raise ImpossibleError(f"only the state_dict of {name} knows what of {one.key} the step has changed")
            new[name][one.key] = saved
        return new


def _grouped(parts: Components) -> list[int]:
    return [len(group["params"]) for one in parts.optimizers.values() for group in one.param_groups]


def affordable(cost_seconds: float, step_seconds: float, budget: float) -> bool:
    """Whether a record may be made at every boundary: of the budget for snapshots it takes half at most."""
    return cost_seconds <= _SHARE * budget * step_seconds


class ImpossibleError(Exception):
    """The state of the last boundary cannot be had; the message says why."""


class LastBoundary(Generic[R]):
    """The record of the last boundary, while nothing was changed that is not in it. Training thread only.

    Where records cost too much, one is tried at powers of two from `AGAIN` on, to see whether that is still so: what
    trials take together is next to nothing, however long the run is.

    Args:
        make: makes a record.
        budget: the share of training time that snapshots may cost.
        now: the source of moments.
    """

    def __init__(self, make: Callable[[], R], budget: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._make, self._budget, self._now = make, budget, now
        self._record: R | None = None
        self._why = "no step was begun"
        self._cost: float | None = None
        self._step: float | None = None
        self._ended: float | None = None
        self._count = 0

    def reached(self) -> None:
        """A boundary; the next step begins when this returns."""
        began = self._now()
        if self._ended is not None:
            taken = began - self._ended
            self._step = taken if self._step is None else _SMOOTH * self._step + (1.0 - _SMOOTH) * taken
        self._count += 1
        cost, step = self._cost, self._step
        looks_again = self._count >= AGAIN and self._count.bit_count() == 1
        if cost is None or step is None or looks_again or affordable(cost, step, self._budget):
            try:
                self._record = self._make()
            except ImpossibleError as err:
                self._record, self._why = None, str(err)
            self._ended = self._now()
            took = self._ended - began
            self._cost = took if cost is None else min(took, _SMOOTH * cost + (1.0 - _SMOOTH) * took)
        else:
            self._ended = began
            self._record, self._why = None, "steps are too short to record what each of them changes"

    @property
    def holds(self) -> bool:
        """Whether there is a record."""
        return self._record is not None

    def missed(self, why: str) -> None:
        """A boundary that no snapshot can be taken at."""
        self._record, self._why = None, why
        self._ended = None

    def changes(self) -> None:
        """Weights may change from here on."""
        if self._record is not None:
            self._record, self._why = None, "weights may have changed since that boundary"

    def record(self) -> R:
        """The record of the last boundary.

        Raises:
            ImpossibleError: more has changed since, or there is none.
        """
        if self._record is None:
            raise ImpossibleError(self._why)
        return self._record


@dataclass(frozen=True, slots=True)
class Loose:
    """A tensor of a model that a forward or a hook may change at any time.

    Args:
        key: its name in the model's `state_dict`.
        owner: the module that has it, as a buffer or a parameter.
        name: its name there.
    """

    key: str
    owner: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """As it is now: some modules make a new one in each step."""
        found = self.owner._buffers.get(self.name)
        return self.owner._parameters[self.name] if found is None else found  # type: ignore[return-value]


def keys_of(module: torch.nn.Module) -> Iterator[tuple[Loose, torch.Tensor]]:
    """What a `state_dict` has where no class has changed what it does; tied tensors under each of their names."""
    key = canonical(module)
    for path, owner in module.named_modules(remove_duplicate=False):
        left_out = owner._non_persistent_buffers_set
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and name not in left_out:
                yield Loose(key(f"{path}.{name}" if path else name), owner, name), tensor


def require_loadable(modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise where a model writes what it refuses to read (4-bit weights): the keys are compared, before it trains.

    Modules that read in a way of their own are left out: what they accept is unknown.

    Raises:
        ConfigError: names the key.
    """
    for name, module in modules.items():
        kind, plain = type(module), torch.nn.Module
        overridden = kind.state_dict is not plain.state_dict or kind.load_state_dict is not plain.load_state_dict
        if overridden or is_flat(module):  # FSDP1 gathers all of it
            continue
        name_of = canonical(module)
        own = [
            f"{name_of(path)}." if name_of(path) else ""
            for path, one in module.named_modules(remove_duplicate=False)
            if type(one)._load_from_state_dict is not plain._load_from_state_dict or one._load_state_dict_pre_hooks
        ]
        if "" in own or not any(
            one._state_dict_hooks or type(one)._save_to_state_dict is not plain._save_to_state_dict
            for one in module.modules()
        ):
            continue
        known = {one.key for one, _ in keys_of(module)}
        for key in renamed(module.state_dict(), name_of):
            if key not in known and not key.endswith("_extra_state") and not key.startswith(tuple(own)):
                raise ConfigError(
                    f"the state_dict() of {name!r} has {key!r}, and its load_state_dict() refuses that",
                    hint="track only what is trained (an adapter, a head), or give the class a load_state_dict() "
                    "that takes what its state_dict() gives",
                )


def buffers_of(module: torch.nn.Module) -> list[Loose]:
    """Those that its `state_dict` has."""
    return [one for one, _ in keys_of(module) if one.name in one.owner._buffers]


def loose_tensors(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Loose]:
    """Buffers, and parameters that no optimizer manages.

    Raises:
        ImpossibleError: they are too large to be copied at every step.
    """
    behind_the_fence = {id(parameter) for parameter in managed(optimizers)}
    found = [
        (one, tensor)
        for one, tensor in keys_of(module)
        if id(tensor) not in behind_the_fence and not torch.nn.parameter.is_lazy(tensor)
    ]
    size = sum(here(tensor).numel() * tensor.element_size() for _, tensor in found)
    if size > MOST_BYTES:
        raise ImpossibleError(f"what changes in forward is too large to be copied at every step: {size / 1e6:.0f} MB")
    return [one for one, _ in found]


def require_unmoved(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Nothing has moved since the boundary.

    Raises:
        ImpossibleError: something has; names it.
    """
    for name in before.keys() | now.keys():
        if now.get(name) != before.get(name):
            raise ImpossibleError(f"{name} has changed in the step that failed")


def fingerprint(name: str, value: Any) -> Any:
    """A value that equals that of an equal state, of small states; `name` is for the message.

    Raises:
        ImpossibleError: `value` holds what cannot be compared at every step.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() > _MOST_VALUES:
            raise ImpossibleError(f"{name} has a tensor that is too large to be compared at every step")
        return (tuple(value.shape), value.detach().tolist())
    if kind is dict or isinstance(value, Mapping):
        return [(key, item if type(item) in _PLAIN else fingerprint(name, item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else fingerprint(name, item) for item in value]
    raise ImpossibleError(f"{name} has a {type(value).__name__}, which cannot be compared at every step")


def require_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """No weight and no state of an optimizer is NaN or infinite.

    Raises:
        ImpossibleError: one is: training has diverged.
    """
    for optimizer in optimizers:
        states = (value for state in optimizer.state.values() for value in state.values())
        found = (value for value in (*managed([optimizer]), *states) if isinstance(value, torch.Tensor))
        if not all(_is_finite(part) for value in found for part in parts_of(value)):
            raise ImpossibleError("the weights or the optimizer's state are not finite: training has diverged")


def _is_finite(value: torch.Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    # A mask of all elements would need memory that a device may not have now.
    wide = value.dtype if value.is_complex() or value.dtype is torch.float64 else torch.float32
    return bool(torch.isfinite(value.detach().sum(dtype=wide)))
