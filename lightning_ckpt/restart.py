"""What a `fit` finds of earlier ones, and what a resumed run sets right that Lightning leaves inexact.

Hooks run once more than in a run that is not interrupted: Lightning calls `on_train_start` in every process, and
`replay` calls `on_train_epoch_start` in an epoch that resumes in the middle, because callbacks and models set up
per-epoch things there (an accumulation factor, SWA's scheduler, progress bars, a curriculum). A hook that resets an
optimizer or steps a scheduler there has done so before the snapshot. So `Kept` puts back what a hook changes of the
restored state, and what else it sets up stays. `allow_restart` lets a LightningCLI job start again in its log folder;
`load_again_where_changed` repairs weights that have changed since Lightning loaded them.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from torch.optim import Optimizer

from ckpt_engine.adapter import CkptError, ConfigError, Engine, LiveModel, NotRestored, TrainerResume, parts_of
from lightning_ckpt.compat import LightningInternals, callbacks_of, is_lightnings
from lightning_ckpt.compat_data import both, is_overridden
from lightning_ckpt.run_state import Groups

_log = logging.getLogger("lightning_ckpt")
AUTO = "auto"
HOOK = "on_train_epoch_start"


class EarlierFit:
    """What an earlier `fit` of a callback has left in memory.

    Args:
        trainer, module: that were fitted.
        attempt: of the snapshots that were taken meanwhile.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, attempt: str) -> None:
        self._trainer, self._module = weakref.ref(trainer), weakref.ref(module)
        self.attempt = attempt

    def goes_on(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Whether another `fit` of them trains on from there, without any file."""
        return self._trainer() is trainer and self._module() is module and trainer.global_step > 0


class FreshStart(TrainerResume):
    """The part of a resume that finds out whether a `fit` resumes at all.

    Args:
        trainer, module: that is fitted.
        engine: opens the run's folder.

    `fitted` is what an earlier `fit` has left.
    """

    fitted: EarlierFit | None = None
    _asked = False

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, engine: Engine) -> None:
        self._trainer = trainer
        self._module = module
        super().__init__(engine, _log, lambda: trainer.log_dir or trainer.default_root_dir)

    def path_of(self, path: Any) -> Any:
        """What the argument `ckpt_path` comes to with the option `resume`; if that is not `auto`, the run is begun."""
        self._asked, option = True, self._engine.config.resume_word
        if path == AUTO and option == "off":
            path = None
        elif path is None and option == AUTO:
            path = AUTO
        if path != AUTO:
            if isinstance(path, str | os.PathLike) and TrainerResume.is_run(path):
                raise ConfigError(
                    f"ckpt_path: {os.fspath(path)} is a folder of snapshots, and Lightning takes a file there",
                    hint=f"AdaptiveCheckpoint({os.fspath(path)!r}) and ckpt_path='auto' go on from its newest "
                    f"snapshot; `ckpt export {os.fspath(path)} out.ckpt --to lightning` makes a file of it",
                )
            self._begin(path)
        return path

    def go_on_beside(self) -> None:
        """Where the run resumes from the folder of another callback: what is in this one goes on too."""
        if not self._asked and (candidate := self._engine.choose()) is not None:
            self._engine.go_on_after(candidate.info)

    def _begin(self, path: Any) -> None:
        """Training begins afresh, from a file of Lightning, or with what the trainer holds since its last `fit`."""
        engine, fitted = self._engine, self.fitted
        engine.start()
        if path is None and fitted is not None and fitted.goes_on(self._trainer, self._module):
            found = next(reversed(engine.snapshots(nearest=True)), None)
            if found is not None and found.line.attempt == fitted.attempt:
                engine.go_on_after(found)
                return
        off = engine.config.resume_word == "off"
        how = (
            "leave out resume='off'" if off else "pass ckpt_path='auto' to fit, or resume='auto' to AdaptiveCheckpoint"
        )
        self.start_fresh(how)


def allow_restart(trainer: pl.Trainer, engine: Engine) -> None:
    """Let LightningCLI overwrite the configuration file that the first start of this run has written.

    Its `SaveConfigCallback` refuses to, and would end every restart with the same log folder.

    Args:
        engine: where the nearest tier has snapshots it is a restart even if the command line does not say so.
    """
    # Slow to import, and a program that has not has no such callback.
    clis = [sys.modules[name] for name in ("lightning.pytorch.cli", "pytorch_lightning.cli") if name in sys.modules]
    kinds: tuple[type[Any], ...] = tuple(cli.SaveConfigCallback for cli in clis)
    for callback in callbacks_of(trainer):
        if isinstance(callback, kinds):
            asked = getattr(callback.config, "ckpt_path", None) == AUTO
            callback.overwrite = callback.overwrite or asked or bool(engine.snapshots(nearest=True))


class Kept:
    """All that hooks may change of the restored state, as it is now.

    Args:
        trainer: that resumes.
        module: the LightningModule.
        hook: that is about to run.
        saved: callbacks' states in the snapshot, by `state_key`.
        regrouped: optimizers whose groups of parameters were made again, and the groups of this process, in which the
            hook finds them: it may add one that was added before.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        hook: str,
        saved: Mapping[str, Any],
        regrouped: Sequence[tuple[torch.optim.Optimizer, Groups]] = (),
    ) -> None:
        self._trainer, self._module = trainer, module
        self._hook, self._saved = hook, saved
        self._should_stop = trainer.should_stop
        self._optimizers = list(trainer.optimizers)
        self._options = [[_options(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._weights: dict[str, _Tensor] = {}
        self._states: list[Mapping[Any, Any]] = []
        self._schedules: list[tuple[Any, Any]] = []
        self._callbacks: list[tuple[Callback, Any]] = []
        if calls_the_users(trainer, module, hook):
            self._weights = {name: _keep(tensor) for name, tensor in _tensors(module)}
            self._states = [_keep(dict(optimizer.state)) for optimizer in self._optimizers]
            schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
            self._schedules = [(one, copy.deepcopy(one.state_dict())) for one in schedulers]
            found = [one for one in callbacks_of(trainer) if one.state_key in saved and not is_lightnings(type(one))]
            self._callbacks = [(one, _state(one)) for one in found]
        self._groups = [(optimizer, optimizer.param_groups) for optimizer, _ in regrouped]
        for optimizer, groups in regrouped:
            optimizer.param_groups = [{**group, "params": list(group["params"])} for group in groups]

    def put_back(self) -> list[NotRestored]:
        """After the hooks; what could not be."""
        for optimizer, groups in self._groups:
            optimizer.param_groups = groups
        with torch.no_grad():
            for name, tensor in _tensors(self._module):
                if name in self._weights:
                    for part, kept in zip(parts_of(tensor), self._weights[name].parts, strict=False):
                        if part.shape == kept.shape:
                            part.copy_(kept)
            for optimizer, state in zip(self._optimizers, self._states, strict=False):
                optimizer.state.clear()
                optimizer.state.update(_put_back(state))
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                group.update(options)
        self._put_back_schedules()
        self._trainer.should_stop = self._should_stop
        return self._move_to_other_optimizers() + self._put_back_callbacks()

    def _put_back_schedules(self) -> None:
        averaged = averages(self._trainer)
        for (scheduler, kept), config in zip(self._schedules, self._trainer.lr_scheduler_configs, strict=False):
            if config.scheduler is scheduler or (not averaged and type(config.scheduler) is type(scheduler)):
                config.scheduler.load_state_dict(kept)

    def _move_to_other_optimizers(self) -> list[NotRestored]:
        missing = []
        for number, (old, new) in enumerate(zip(self._optimizers, self._trainer.optimizers, strict=False)):
            if new is old:
                continue
            try:
                LiveModel(self._module).load({}, [new], [old.state_dict()])
            except CkptError as err:
                missing.append(NotRestored(f"optimizer {number}", f"{self._hook} makes another one: {err.__cause__}"))
        return missing

    def _put_back_callbacks(self) -> list[NotRestored]:
        missing = []
        for callback, before in self._callbacks:
            now, saved = _state(callback), self._saved[callback.state_key]
            # Some put what they have loaded in place only in the hook: then it has the saved state now.
            if TrainerResume.same(now, before) or TrainerResume.same(now, _in_parts(saved)):
                continue
            callback.load_state_dict(TrainerResume.own_copy(saved))
            if TrainerResume.same(_state(callback), now):
                why = f"its {self._hook} changes what was restored, and load_state_dict() does not put it back"
                missing.append(NotRestored(f"callback {type(callback).__name__}", why))
        return missing


def averages(trainer: pl.Trainer) -> bool:
    """Whether weight averaging has a scheduler of its own, which it restores."""
    return any(isinstance(one, both(StochasticWeightAveraging)) for one in callbacks_of(trainer))


def calls_the_users(trainer: pl.Trainer, module: pl.LightningModule, *hooks: str) -> bool:
    """Whether code that is neither Lightning's nor ours runs in one of the hooks."""
    return any(
        is_overridden(hook, module)
        or any(
            is_overridden(hook, one, parent=Callback) and not is_lightnings(getattr(one, hook))
            for one in callbacks_of(trainer)
        )
        for hook in hooks
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A live tensor, and what it was, or those in it. In host memory: beside the state its device may have no room."""

    live: torch.Tensor
    parts: Sequence[torch.Tensor]


def _keep(value: Any) -> Any:
    return TrainerResume.mapped(value, _kept)


def _kept(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return _Tensor(one, [part.detach().to("cpu", copy=True) for part in parts_of(one)])
    return copy.deepcopy(one)


def _put_back(kept: Any) -> Any:
    """The value that `_keep` has seen, with the same tensors."""
    return TrainerResume.mapped(kept, lambda one: _filled(one) if isinstance(one, _Tensor) else one)


def _filled(kept: _Tensor) -> torch.Tensor:
    for live, part in zip(parts_of(kept.live), kept.parts, strict=True):
        if live.shape != part.shape:
            return part.to(live.device)
        live.copy_(part)
    return kept.live


def _in_parts(state: Any) -> Any:
    """What compares with a later state: in the place of each tensor the parts of it that are here, in host memory."""
    return TrainerResume.mapped(_keep(state), lambda one: one.parts if isinstance(one, _Tensor) else one)


def _state(callback: Callback) -> Any:
    try:
        return _in_parts(callback.state_dict())
    except Exception:  # noqa: BLE001 - the user's code: what it saves may exist only after its hook
        return None


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if not torch.nn.parameter.is_lazy(tensor)]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


class _InEpoch:
    """A trainer in another epoch."""

    def __init__(self, trainer: pl.Trainer, epoch: int) -> None:
        self._trainer, self.current_epoch = trainer, epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def begin_averaging(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What `StochasticWeightAveraging` sets up in this hook, but not in its extra epoch after the last one.

    Its scheduler and its count are part of a checkpoint only once they are set up.
    """
    found = [one for one in callbacks_of(trainer) if isinstance(one, both(StochasticWeightAveraging))]
    late = [one for one in found if trainer.current_epoch > one.swa_end]
    if late:
        kept = Kept(trainer, module, HOOK, {})
        for callback in late:
            earlier: Any = _InEpoch(trainer, callback.swa_end)
            callback.on_train_epoch_start(earlier, module)
        kept.put_back()


def replay(
    internals: LightningInternals,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    saved: Mapping[str, Any],
    regrouped: Sequence[tuple[Optimizer, Groups]],
) -> list[NotRestored]:
    """Call the hooks of callbacks and model as Lightning would, and keep the restored state as it is; see `Kept`."""
    callbacks = [
        callback
        for callback in callbacks_of(trainer)
        if is_overridden(HOOK, callback, parent=Callback)
        and not isinstance(callback, both(BaseFinetuning))  # its saved state already contains what its hook did
    ]
    in_module = is_overridden(HOOK, module)
    if not callbacks and not in_module:
        return []
    kept = Kept(trainer, module, HOOK, saved, regrouped)
    with internals.in_hook(HOOK):
        for callback in callbacks:
            callback.on_train_epoch_start(trainer, module)
        if in_module:
            module.on_train_epoch_start()
    return kept.put_back()


def dtypes_of(module: torch.nn.Module) -> dict[str, torch.dtype]:
    """The dtype of every parameter and buffer that is saved with the model."""
    return {name: value.dtype for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def load_again_where_changed(
    module: torch.nn.Module, saved: Mapping[str, Any], loaded_as: Mapping[str, torch.dtype], *, buffers: bool
) -> None:
    """Copy weights again that have changed since Lightning loaded them.

    With `precision="64-true"` it loads the weights into the float32 model and converts the model afterwards, so that
    half of each saved number is lost. And it wraps the model after it has loaded it: then DDP gives all ranks the
    buffers of rank 0.

    Args:
        module: as it trains.
        saved: its weights in the snapshot, with what this rank has of its own.
        loaded_as: `dtypes_of` when they were loaded.
        buffers: DDP has been around it since.
    """
    again = {name for name, _ in module.named_buffers()} if buffers else set()
    for name, live in module.state_dict().items():
        value = saved.get(name)
        are_tensors = isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor)
        if are_tensors and (live.dtype is not loaded_as[name] or name in again):
            live.copy_(value)


def finish_again(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """A rerun of a finished run trains nothing: let averaging callbacks put their weights in place once more.

    The final snapshot is from before they did, because a longer run goes on from there.
    """
    for callback in callbacks_of(trainer):
        if _replaces_weights(callback, module):
            callback.on_train_end(trainer, module)


def _replaces_weights(callback: Callback, module: pl.LightningModule) -> bool:
    averaging = getattr(callbacks, "WeightAveraging", None)  # Lightning 2.5.5 and later
    if averaging is not None and isinstance(callback, both(averaging)):
        return True
    # With batch norm it replaced them one epoch before the end, and its hook only undoes counters it never raised here.
    return isinstance(callback, both(StochasticWeightAveraging)) and not callback.pl_module_contains_batch_norm(module)
