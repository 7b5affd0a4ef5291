"""All access to undocumented names of Accelerate, each listed with its reason.

Nothing else in this package touches an attribute of Accelerate that starts with an underscore. When an upstream release
renames something, `AcceleratorInternals.probe` says which feature needs it. It also remembers which documented methods
are replaced, and puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.tracking import TensorBoardTracker
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from ckpt_engine.adapter import CkptError, LoaderSource, PrivateName, Replaced, WriterCurve, require_names

ACCELERATE_VERSION: str = version("accelerate")
_FILLED = (
    "dispatch_batches: where an epoch's last batch does not divide, Accelerate fills it with the first samples of the "
    "pass, and in the resumed epoch these are others"
)
LOOKAHEAD = 1
"""Batches that a prepared loader has fetched when it gives one, beyond that one: it must know which is the last."""


ACCELERATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("accelerator", "_models", "the weights of a snapshot"),
    PrivateName("accelerator", "_optimizers", "the optimizer state of a snapshot"),
    PrivateName("accelerator", "_schedulers", "the schedulers of a snapshot"),
    PrivateName("accelerator", "_dataloaders", "the data position of a snapshot"),
    PrivateName("accelerator", "_custom_objects", "objects given to register_for_checkpointing"),
    PrivateName("accelerator", "_save_model_state_pre_hook", "hooks of register_save_state_pre_hook"),
    PrivateName("accelerator", "_load_model_state_pre_hook", "hooks of register_load_state_pre_hook"),
    PrivateName("accelerator", "trackers", "going on with the curves of a resumed run"),
    PrivateName("accelerator", "step", "the position in gradient accumulation"),
    PrivateName("accelerator", "scaler", "the GradScaler of a snapshot"),
    PrivateName("shard", "base_dataloader", "the data position of a snapshot"),
    PrivateName("shard", "iteration", "the epoch of seedable samplers after a resume"),
    PrivateName("dispatcher", "base_dataloader", "the data position of a snapshot"),
    PrivateName("dispatcher", "iteration", "the epoch of seedable samplers after a resume"),
    PrivateName("dispatcher", "end_of_dataloader", "the end of an epoch where another process has the batches"),
    PrivateName("dispatcher", "split_batches", "how many batches one process fetches for all"),
    PrivateName("dispatcher", "state", "which process fetches for all"),
    PrivateName("dispatcher", "_drop_last", "whether a short last batch is filled with other samples"),
    PrivateName("dispatcher", "submesh_tp", "how many batches one process fetches for all"),
)
"""Every such name in use; `tests/accelerate/test_compat.py` has one test for each."""


@dataclass(eq=False)
class AcceleratorInternals(Replaced):
    """Typed, narrow access to the insides of one accelerator; `undo` puts its methods back.

    Args:
        _accelerator: whose objects are reached.
    """

    _accelerator: Any

    # ---- probing

    def owners(self) -> Mapping[str, Any]:
        """The objects that `PrivateName.owner` refers to."""
        return {
            "accelerator": self._accelerator,
            "shard": DataLoaderShard([0]),
            "dispatcher": DataLoaderDispatcher([0]),
        }

    def probe(self) -> None:
        """Raises `CkptError` where this Accelerate lacks a name."""
        require_names(ACCELERATE_NAMES, self.owners(), "Accelerate", ACCELERATE_VERSION, "accelerate_ckpt")

    # ---- what was prepared

    def models(self) -> list[nn.Module]:
        """The prepared models."""
        return list(self._accelerator._models)

    def named_objects(self) -> dict[str, Any]:
        """All else that `save_state` would save, named as the files it would write."""
        accelerator = self._accelerator
        found = numbered("optimizer", accelerator._optimizers) | numbered("scheduler", accelerator._schedulers)
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return found | {f"custom_checkpoint_{i}": value for i, value in enumerate(accelerator._custom_objects)}

    def sources(self) -> dict[str, LoaderSource]:
        """The prepared loaders."""
        return numbered("loader", [source_of(loader) for loader in self._accelerator._dataloaders])

    def count(self) -> int:
        """How many objects were prepared or registered."""
        accelerator = self._accelerator
        groups = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
        return sum(map(len, groups)) + len(accelerator._custom_objects)

    # ---- the hooks of save_state and load_state

    def save_hooks(self) -> list[Callable[..., None]]:
        """What `save_state` would call before it writes."""
        return list(self._accelerator._save_model_state_pre_hook.values())

    def load_hooks(self) -> list[Callable[..., None]]:
        """What `load_state` would call before it reads."""
        return list(self._accelerator._load_model_state_pre_hook.values())

    # ---- trackers

    def curves(self) -> list[WriterCurve]:
        """The trackers that go on after a resume, on the process that logs."""
        if not self._accelerator.is_main_process:
            return []
        writers = [one.writer for one in self._accelerator.trackers if type(one) is TensorBoardTracker]
        return [WriterCurve("tensorboard", one, one.log_dir) for one in writers if is_known(one)]

    # ---- counters

    @property
    def step(self) -> int:
        """Batches since the last end of an accumulation."""
        return int(self._accelerator.step)

    @step.setter
    def step(self, value: int) -> None:
        self._accelerator.step = value


def is_known(writer: Any) -> bool:
    """Whether it is TensorBoard's own, whose files are known."""
    is_installed = find_spec("tensorboard") is not None
    return is_installed and isinstance(writer, import_module("torch.utils.tensorboard").SummaryWriter)


def source_of(loader: Any) -> LoaderSource:
    """A prepared loader and the torch loader inside.

    Raises:
        CkptError: it is of a kind that is not supported.
    """
    base = loader.__dict__.get("base_dataloader")
    if not isinstance(base, DataLoader):
        raise CkptError(
            f"a prepared loader is a {type(loader).__name__}, whose position cannot be followed",
            hint="prepare torch DataLoaders on CPUs or GPUs; for XLA devices use accelerator.save_state",
        )
    if not isinstance(loader, DataLoaderDispatcher):
        return LoaderSource(loader, base, LOOKAHEAD, "iteration")
    # The first process fetches for all.
    size, whole = loader.state.num_processes, loader.split_batches or loader.submesh_tp
    share = 0 if loader.state.process_index else 1 if whole else size
    return LoaderSource(
        loader,
        base,
        LOOKAHEAD * max(share, 1),
        "iteration",
        share,
        "end_of_dataloader",
        dispatched=True,
        inexact=_FILLED if _may_be_filled(loader, base, size) else "",
    )


def _may_be_filled(loader: Any, base: DataLoader[Any], size: int) -> bool:
    """Whether the last batch may not divide; its length is not known where a batch sampler of the user's makes it."""
    if size == 1 or loader._drop_last or loader.submesh_tp:
        return False
    samples = LoaderSource.length_of(base.sampler) if type(base.batch_sampler) is BatchSampler else None
    return samples is None or samples % size != 0


def numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """The values by this name, all but the first one with a number."""
    return {name if i == 0 else f"{name}_{i}": value for i, value in enumerate(values)}
