"""The tracker of an Accelerate loop, which `AdaptiveCheckpoint` is.

It takes from the accelerator what the engine needs: the prepared and registered objects as components with the names
of `save_state`'s files (`AcceleratedParts`), the processes that train together (`ranks_of`), and the position in
gradient accumulation (`Accumulation`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_ckpt.private import AcceleratorInternals, numbered
from ckpt_engine.adapter import (
    ConfigError,
    Counters,
    Engine,
    LiveModel,
    NamedParts,
    NotRestored,
    Options,
    ProcessGroupRanks,
    Restored,
    ResumeError,
    Surroundings,
    Tracker,
    on_failure,
)

FILES = "hook_files"
"""The component that holds what hooks of `register_save_state_pre_hook` wrote into their folder."""
_ASKS_WITHIN = "the loop asks within accumulate(), and its first batch gets no gradients of other ranks: ask before it"


class AcceleratedLoop(Tracker):
    """What an `AdaptiveCheckpoint` becomes when it is made; see there."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ConfigError(
                f"the first argument is a {type(accelerator).__name__}, not the Accelerator",
                hint="AdaptiveCheckpoint(accelerator, 'ckpt.yaml')",
            )
        engine = Engine(config, ranks=ranks_of(accelerator), **options)
        internals = AcceleratorInternals(accelerator)
        internals.probe()
        parts = AcceleratedParts(accelerator, internals)
        if not parts.optimizers:
            raise ConfigError(
                "accelerator.prepare() was given no optimizer yet",
                hint="make AdaptiveCheckpoint after model, optimizer and loaders were prepared",
            )
        sources = internals.sources()
        for source in sources.values():
            # With `use_stateful_dataloader`, `prepare` has made an iterator already, in which no position was recorded.
            source.reset()
        with on_failure(engine.close):
            super().__init__(
                engine,
                parts,
                sources,
                Accumulation(accelerator, internals),
                trainer="accelerate",
                folder=Path(accelerator.project_dir or "."),
            )

        def init_trackers(original: Callable[..., None], *arguments: Any, **more: Any) -> None:
            """Runs where the accelerator makes its trackers."""
            original(*arguments, **more)
            self.continue_curves(internals.curves)

        self.continue_curves(internals.curves)
        internals.around(accelerator, "init_trackers", init_trackers)
        internals.around(accelerator, "end_training", self._end_accelerated)
        internals.around(accelerator, "skip_first_batches", self._skip_first_batches)
        if engine.config.log.loggers != "off":
            internals.around(accelerator, "log", self._log_too)
        self._hooks.callback(internals.undo)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_first_step).remove)
        self._hooks.callback(accelerator.register_load_state_pre_hook(lambda *_: self.abandon_resume()).remove)

    def _end_accelerated(self, original: Callable[[], None]) -> None:
        """Runs where the accelerator ends training."""
        try:
            self.close()
        finally:
            original()

    def _skip_first_batches(self, original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        """A script that skips what was trained, as one had to do before: after a resume the loader does that itself."""
        feed = next((one for one in self._feeds if self._sources[one.name].outer is dataloader), None)
        if feed is None or not self._life.awaits(feed):
            return original(dataloader, num_batches)
        skips = f"skip_first_batches(loader, {num_batches}) skips nothing"
        self._resume.report.notes.append(f"{skips}: the loader continues after {feed.delivered} batches")
        return dataloader

    def _log_too(self, original: Callable[..., None], values: Mapping[str, Any], *arguments: Any, **more: Any) -> None:
        """Runs where the accelerator logs: our numbers come with its own, for the same step."""
        original({**self.numbers(), **values}, *arguments, **more)

    def _before_first_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A loader that the function `skip_first_batches` has made is not followed, and what it gave is not ours."""
        feed = self._life.resumed
        if feed is None or not self._life.awaits(feed) or self._turns.asked_feeds:
            return
        if self._loops.untracked.tracked(optimizer) is not None:
            raise ResumeError(
                f"the resumed run trains on batches of a loader that is not followed: {feed.name!r}, whose next pass "
                f"starts after {feed.delivered} batches, was not asked for any",
                hint="iterate the loader itself: a resumed epoch starts in its middle, without skip_first_batches",
            )


class AcceleratedParts(NamedParts):
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
        internals: AcceleratorInternals,
        more: Mapping[str, Any] | None = None,
        *,
        grows: bool = False,
    ) -> None:
        self._internals = internals
        self._count = None if grows else internals.count()
        self._models = internals.models()
        models = numbered("model", [_unwrapped(accelerator, model) for model in self._models])
        super().__init__({**models, **internals.named_objects(), **(more or {})})
        self.modules, self._own = models, list(models)

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
        state = super().state()
        weights = [state[name] for name in self._own]
        files: dict[str, torch.Tensor] = {}
        if hooks := self._internals.save_hooks():
            with tempfile.TemporaryDirectory(prefix="ckpt-hooks-") as folder:
                for hook in hooks:
                    hook(list(self._models), weights, folder)
                files = _read(Path(folder))
        left = numbered("model", weights)
        others = {name: value for name, value in state.items() if name not in self._own}
        return {**left, **others, **({FILES: files} if files else {})}

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of the weights; none where hooks decide what is saved."""
        return {} if self._internals.save_hooks() or self._internals.load_hooks() else super().shapes()

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
        mine = [
            next(name for name, one in zip(self._own, self._models, strict=True) if one is model) for model in models
        ]
        left = numbered("model", [self.modules[name] for name in mine])
        others = {name: one for name, one in self.objects.items() if name not in self._own}
        wanted = {name: one for name, one in saved.items() if name not in {FILES, *self._own} - left.keys()}
        restored, absent = NamedParts({**left, **others}, self.flat).load(wanted)
        if len(left) < len(self._own):
            restored.append(
                Restored("models", f"{len(self._own) - len(left)} by hooks of register_load_state_pre_hook")
            )
        return restored, missing + absent


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


def ranks_of(accelerator: Accelerator) -> ProcessGroupRanks | None:
    """All ranks of `accelerator`; None: it is one process. Streams and positions are each rank's own.

    Raises:
        ConfigError: the processes divide the state in ways that are not supported.
    """
    if accelerator.num_processes == 1:
        return None
    if accelerator.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP):
        raise ConfigError(
            f"several processes are supported with DDP and FSDP, and this run has {accelerator.distributed_type.value}",
            hint="use accelerator.save_state for this run, or FSDP2",
        )

    return ProcessGroupRanks()


def _unwrapped(accelerator: Accelerator, model: Any) -> Any:
    """The model without what `prepare` put around it, but FSDP1: what that wraps is part of the model."""
    if LiveModel(model, model).flat is not None:
        return model
    try:
        return accelerator.unwrap_model(model, keep_torch_compile=False)
    except KeyError:  # Accelerate 1.10, where some of its modules are compiled and it is not
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@dataclass(eq=False)
class Accumulation(Surroundings):
    """The accelerator's counter of `accumulate()`.

    Args:
        accelerator: whose it is.
        internals: of the accelerator.
    """

    _accelerator: Accelerator
    _internals: AcceleratorInternals

    def accumulating(self) -> bool:
        return not self._accelerator.sync_gradients

    def now(self) -> Counters:
        step = self._internals.step
        return Counters(lambda: {"step": step}, self.curves.note)

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        self._internals.step = int(saved["step"])
        if not self.accumulating():
            return []
        # `accumulate()` was entered before the batch was asked for: it has counted from another step than it did then.
        self._accelerator.sync_gradients = True
        return [] if self._accelerator.num_processes == 1 else [NotRestored("accumulation", _ASKS_WITHIN)]
