"""The objects of a run whose states are the components of its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ckpt_engine.errors import ConfigError, MismatchError
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.restore.match import tensor_shapes
from ckpt_engine.snapshot.flat import FlatPart
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tracking.fsdp1 import FlatModels, flat_models
from ckpt_engine.tracking.metrics import without_metrics
from ckpt_engine.tracking.weights import into_own_memory, own_copy

OWN_KEY = "ckpt_engine"
_EXTRA_STATE = "_extra_state"
Shapes = dict[str, tuple[int, ...]]


class Parts(Protocol):
    """What a snapshot of a loop consists of, besides the loop's position."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The models, by component."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The torch optimizers, by component, out of whatever wraps them."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """Whatever takes part in training, by the names that users know it by."""

    @property
    def flat(self) -> FlatModels | None:
        """What of the models FSDP1 divides."""

    def state(self) -> dict[str, Any]:
        """The components, with references to live tensors."""

    def shapes(self) -> Mapping[str, Shapes]:
        """Shapes of the weights that a snapshot must have to fit, by component."""

    def load(self, saved: Mapping[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        """Put the components back.

        Raises:
            MismatchError: a component is of another model or optimizer.
        """


class NamedParts:
    """Objects with `state_dict` and `load_state_dict`, each a component of its own.

    Args:
        objects: by component.

        flat: what FSDP1 divides of models that are not among them; None: what it divides of those that are.

    Raises:
        ConfigError: an object has no state to save, its name is taken, or a model is divided in ways that are not
            supported.
    """

    def __init__(self, objects: Mapping[str, Any], flat: FlatModels | None = None) -> None:
        for name, value in objects.items():
            if name == OWN_KEY:
                raise ConfigError(f"{name!r} is the name of our own component", hint="track it by another name")
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise ConfigError(
                    f"{name!r}, a {type(value).__name__}, has no state_dict() and load_state_dict()",
                    hint="track modules, optimizers, schedulers, scalers, loaders, or give the class these two methods",
                )
        self.objects: Mapping[str, Any] = dict(objects)
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {
            name: unwrapped(value) for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)
        }
        self.flat = flat or flat_models(self.modules.values())
        if self.flat is not None:
            for optimizer in self.optimizers.values():
                self.flat.require_trained(optimizer)

    def state(self) -> dict[str, Any]:
        return {name: state_of(value, self.flat) for name, value in self.objects.items()}

    def shapes(self) -> dict[str, Shapes]:
        return {name: weight_shapes(module, self.flat) for name, module in self.modules.items()}

    def load(self, saved: Mapping[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        restored: list[Restored] = []
        missing: list[NotRestored] = []
        for name, value in self.objects.items():
            if name not in saved:
                missing.append(NotRestored(name, "the snapshot has no such component: it is as the script made it"))
                continue
            put_back(name, value, saved[name], self.flat)
            restored.append(Restored(name, type(value).__name__))
        into_own_memory(self.optimizers.values())
        gone = [name for name in saved if name not in self.objects]
        missing += [NotRestored(name, "nothing of that name is tracked now") for name in gone]
        return restored, missing


def state_of(value: Any, flat: FlatModels | None) -> Any:
    """`value.state_dict()`; what FSDP1 divides as the parts that are here."""
    if flat is not None and isinstance(value, nn.Module):
        return flat.state(value)
    if flat is not None and isinstance(value, torch.optim.Optimizer):
        return flat.optimizer_state(unwrapped(value))
    return value.state_dict()


def put_back(name: str, value: Any, saved: Any, flat: FlatModels | None = None) -> None:
    """`value.load_state_dict(saved)`, the inverse of `state_of`; `name` is for the message.

    Raises:
        MismatchError: the object refuses the state.
    """
    mine = isinstance(value, nn.Module | torch.optim.Optimizer)  # both copy, or are copied afterwards
    saved = own_extra_state(saved) if isinstance(value, nn.Module) else saved
    try:
        if flat is not None and isinstance(value, nn.Module):
            flat.load(value, saved)
        elif flat is not None and isinstance(value, torch.optim.Optimizer):
            flat.load_optimizer(unwrapped(value), saved)
        else:
            value.load_state_dict(saved if mine else own_copy(saved))
    except (ValueError, KeyError) as err:
        raise MismatchError(
            f"component {name!r} of the snapshot does not fit this {type(value).__name__}: {err}",
            hint="use the objects this run was started with, or another folder for the new run",
        ) from err


def own_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state where modules may keep what `set_extra_state` gets: torch hands it on as it is."""
    return {key: own_copy(value) if key.endswith(_EXTRA_STATE) else value for key, value in state.items()}


def weight_shapes(module: nn.Module, flat: FlatModels | None = None) -> Shapes:
    """Shapes of the tensors of a model's state; lazy ones have none yet."""
    found = {
        key: tuple(value.shape)
        for key, value in state_of(module, flat).items()
        if isinstance(value, FlatPart) or (isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value))
    }
    return _without_extra_state(without_metrics(module, found))


def saved_shapes(manifest: Manifest, component: str) -> Shapes:
    """The same of a model in a snapshot."""
    return _without_extra_state(tensor_shapes(manifest, (component,)))


def _without_extra_state(shapes: Shapes) -> Shapes:
    """What `get_extra_state` returns may be of another shape each time; `set_extra_state` decides what fits."""
    return {key: shape for key, shape in shapes.items() if not key.split("/")[0].endswith(_EXTRA_STATE)}


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of the wrappers of Accelerate and Lightning Fabric, whose hooks run."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def managed(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """The parameters that optimizers manage."""
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def device_of(parts: Parts) -> torch.device:
    """Where training computes."""
    parameters = (p for module in parts.modules.values() for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))
