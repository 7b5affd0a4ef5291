"""What was prepared or registered with an accelerator, as components named like the files of `save_state`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accelerate_ckpt.compat import Internals
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.tracking.fsdp1 import flat_models, is_flat
from ckpt_engine.tracking.parts import NamedParts, Shapes, put_back, state_of, weight_shapes

FILES = "hook_files"
"""The component that holds what hooks of `register_save_state_pre_hook` wrote into their folder."""


class AcceleratedParts:
    """The components of a snapshot, with the same hooks as `save_state` and `load_state`.

    Args:
        accelerator: after `prepare`.
        internals: of the accelerator.
        more: objects that are not known to the accelerator, by component.
        grows: the accelerator may prepare loaders later, which belong to no snapshot.

    Raises:
        ConfigError: an object has no state to save.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        internals: Internals,
        more: Mapping[str, Any] | None = None,
        *,
        grows: bool = False,
    ) -> None:
        self._internals = internals
        self._count = None if grows else internals.count()
        self._models = internals.models()
        # What FSDP1 wraps is part of the model: `unwrap_model` would take off its root.
        plain = [
            model if is_flat(model) else accelerator.unwrap_model(model, keep_torch_compile=False)
            for model in self._models
        ]
        self.modules: Mapping[str, nn.Module] = {_name(index): model for index, model in enumerate(plain)}
        self.flat = flat_models(plain)
        self._others = NamedParts({**internals.named_objects(), **(more or {})}, self.flat)
        self.optimizers: Mapping[str, torch.optim.Optimizer] = self._others.optimizers
        self.objects: Mapping[str, Any] = {**self.modules, **self._others.objects}

    def state(self) -> dict[str, Any]:
        """The components, with references to live tensors.

        Raises:
            ConfigError: an object was prepared after the snapshots began.
        """
        if self._count is not None and self._internals.count() > self._count:
            raise ConfigError(
                "objects were prepared or registered after AdaptiveCheckpoint was made: they would not be resumed",
                hint="make AdaptiveCheckpoint after the last prepare() and register_for_checkpointing()",
            )
        weights = [state_of(module, self.flat) for module in self.modules.values()]
        files: dict[str, torch.Tensor] = {}
        if hooks := self._internals.save_hooks():
            with tempfile.TemporaryDirectory(prefix="ckpt-hooks-") as folder:
                for hook in hooks:
                    hook(list(self._models), weights, folder)
                files = _read(Path(folder))
        state = {_name(index): value for index, value in enumerate(weights)} | self._others.state()
        return state | ({FILES: files} if files else {})

    def shapes(self) -> dict[str, Shapes]:
        """Shapes of the weights; none where hooks decide what is saved."""
        if self._internals.save_hooks() or self._internals.load_hooks():
            return {}
        return {name: weight_shapes(module, self.flat) for name, module in self.modules.items()}

    def load(self, saved: Mapping[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        """Put the components back.

        Raises:
            MismatchError: a component is of another model or optimizer.
        """
        models, missing = list(self._models), []
        if hooks := self._internals.load_hooks():
            with tempfile.TemporaryDirectory(prefix="ckpt-hooks-") as folder:
                _write(Path(folder), saved.get(FILES, {}))
                for hook in hooks:
                    hook(models, folder)
        elif FILES in saved:
            missing.append(NotRestored(FILES, "no hook of register_load_state_pre_hook reads them now"))
        modules = list(self.modules.values())
        left = [modules[next(i for i, mine in enumerate(self._models) if mine is model)] for model in models]
        restored = []
        for index, module in enumerate(left):
            if _name(index) in saved:
                put_back(_name(index), module, saved[_name(index)], self.flat)
                restored.append(Restored(_name(index), type(module).__name__))
            else:
                missing.append(NotRestored(_name(index), "neither the snapshot nor a hook has its weights"))
        if len(left) < len(modules):
            restored.append(Restored("models", f"{len(modules) - len(left)} by hooks of register_load_state_pre_hook"))
        own = [_name(index) for index in range(len(modules))]
        others = {name: value for name, value in saved.items() if name not in (*own, FILES)}
        more, absent = self._others.load(others)
        return restored + more, missing + absent


def _name(index: int) -> str:
    return f"model_{index}" if index else "model"


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Every file below `folder` as bytes, by relative path; empty files hold nothing that a tensor could."""
    return {
        str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    }


def _write(folder: Path, files: Mapping[str, torch.Tensor]) -> None:
    for name, content in files.items():
        path = (folder / name).resolve()
        path.relative_to(folder.resolve())  # a name of the snapshot must not lead out of the folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.numpy().tobytes())
