"""The objects of a run whose states are the components of its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ckpt_engine.errors import ConfigError, MismatchError
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.tracking.weights import into_own_memory, own_copy

OWN_KEY = "ckpt_engine"
Shapes = dict[str, tuple[int, ...]]


class Parts(Protocol):
    """What a snapshot of a loop consists of, besides the loop's position."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The models, by component."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The torch optimizers, by component, out of whatever wraps them."""

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

    Raises:
        ConfigError: an object has no state to save, or its name is taken.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
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
        self._objects = dict(objects)
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {
            name: unwrapped(value) for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)
        }

    def state(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self._objects.items()}

    def shapes(self) -> dict[str, Shapes]:
        return {name: weight_shapes(module) for name, module in self.modules.items()}

    def load(self, saved: Mapping[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        restored: list[Restored] = []
        missing: list[NotRestored] = []
        for name, value in self._objects.items():
            if name not in saved:
                missing.append(NotRestored(name, "the snapshot has no such component: it is as the script made it"))
                continue
            put_back(name, value, saved[name])
            restored.append(Restored(name, type(value).__name__))
        into_own_memory(self.optimizers.values())
        gone = [name for name in saved if name not in self._objects]
        missing += [NotRestored(name, "nothing of that name is tracked now") for name in gone]
        return restored, missing


def put_back(name: str, value: Any, saved: Any) -> None:
    """`value.load_state_dict(saved)`; `name` is for the message.

    Raises:
        MismatchError: the object refuses the state.
    """
    mine = isinstance(value, nn.Module | torch.optim.Optimizer)  # both copy, or are copied afterwards
    try:
        value.load_state_dict(saved if mine else own_copy(saved))
    except (ValueError, KeyError) as err:
        raise MismatchError(
            f"component {name!r} of the snapshot does not fit this {type(value).__name__}: {err}",
            hint="use the objects this run was started with, or another folder for the new run",
        ) from err


def weight_shapes(module: nn.Module) -> Shapes:
    """Shapes of the tensors of a model's state; lazy ones have none yet."""
    return {
        key: tuple(value.shape)
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)
    }


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
