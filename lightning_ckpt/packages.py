"""Lightning has two packages with the same contents, `lightning` and `pytorch_lightning`: whose objects a trainer uses.

Programs import either, and libraries (darts, neuralforecast) the other one. The adapter is written with the classes of
`lightning`; `both` adds those of `pytorch_lightning` where the program has it, `twin_of` takes a module from the
package that a trainer comes from.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden as _is_overridden

_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
PACKAGES = ("lightning.", *(f"{name}." for name in _NAMES.values()))


def both(*kinds: type[Any]) -> tuple[type[Any], ...]:
    """These classes, and the same ones of the other package where the program uses it."""
    modules = {kind: sys.modules.get(_other(kind.__module__)) for kind in kinds}
    found = [getattr(module, kind.__name__, kind) for kind, module in modules.items() if module is not None]
    return (*kinds, *found)


def twin_of(module: str, trainer: Any) -> Any:
    """A module of Lightning, by its name in `lightning`, of the package that the trainer comes from."""
    return importlib.import_module(_other(module) if isinstance(trainer, both(pl.Trainer)[1:]) else module)


def is_overridden(method: str, instance: Any, parent: type[Any] = pl.LightningModule) -> bool:
    """As Lightning's own function, which knows the classes of one package only."""
    return _is_overridden(method, instance, next((one for one in both(parent) if isinstance(instance, one)), parent))


def _other(module: str) -> str:
    first, second, *rest = module.split(".")
    return ".".join([_NAMES[f"{first}.{second}"], *rest])
