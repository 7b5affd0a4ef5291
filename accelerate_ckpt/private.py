"""All access to undocumented names of Accelerate and transformers, each listed with its reason.

Nothing else in this package touches an attribute of Accelerate that starts with an underscore, or replaces a method of
an Accelerate object. When an upstream release renames something, `AcceleratorInternals.probe` says which feature needs
it.

All access to names of transformers that its documentation does not promise; each is listed with its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length

from ckpt_engine.data import exactness
from ckpt_engine.data import private_names as undocumented
from ckpt_engine.data.private_names import PrivateName
from ckpt_engine.errors import CkptError
from ckpt_engine.loop.feed import LoaderSource

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


class AcceleratorInternals:
    """Typed, narrow access to the insides of one accelerator.

    Args:
        accelerator: whose objects are reached.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator: Any = accelerator
        self._wrapped: dict[str, Any] = {}

    # ---- probing

    def owners(self) -> Mapping[str, Any]:
        """The objects that `PrivateName.owner` refers to."""
        return {
            "accelerator": self._accelerator,
            "shard": DataLoaderShard([0]),
            "dispatcher": DataLoaderDispatcher([0]),
        }

    def missing(self) -> list[PrivateName]:
        """The names that this version of Accelerate does not have."""
        return undocumented.lacking(ACCELERATE_NAMES, self.owners())

    def probe(self) -> None:
        """Raises `CkptError` where this Accelerate lacks a name."""
        undocumented.require(ACCELERATE_NAMES, self.owners(), "Accelerate", ACCELERATE_VERSION, "accelerate_ckpt")

    # ---- what was prepared

    def models(self) -> list[nn.Module]:
        """The prepared models."""
        return list(self._accelerator._models)

    def named_objects(self) -> dict[str, Any]:
        """All else that `save_state` would save, named as the files it would write."""
        accelerator = self._accelerator
        found = _numbered("optimizer", accelerator._optimizers) | _numbered("scheduler", accelerator._schedulers)
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return found | {f"custom_checkpoint_{i}": value for i, value in enumerate(accelerator._custom_objects)}

    def sources(self) -> dict[str, LoaderSource]:
        """The prepared loaders."""
        return _numbered("loader", [source_of(loader) for loader in self._accelerator._dataloaders])

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

    # ---- counters

    @property
    def step(self) -> int:
        """Batches since the last end of an accumulation."""
        return int(self._accelerator.step)

    @step.setter
    def step(self, value: int) -> None:
        self._accelerator.step = value

    # ---- wrapping

    def before_end_training(self, call: Callable[[], None]) -> None:
        """`call()` runs before `accelerator.end_training()`; undone by `unwrap`."""
        original = self._accelerator.end_training

        def end_training() -> None:
            try:
                call()
            finally:
                original()

        self._wrap("end_training", end_training)

    def instead_of_skipping(self, goes_on: Callable[[Any, int], bool]) -> None:
        """`accelerator.skip_first_batches(loader, n)` returns the loader itself where `goes_on(loader, n)`."""
        original = self._accelerator.skip_first_batches

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            return dataloader if goes_on(dataloader, num_batches) else original(dataloader, num_batches)

        self._wrap("skip_first_batches", skip_first_batches)

    def _wrap(self, name: str, replacement: Callable[..., Any]) -> None:
        self._wrapped[name] = vars(self._accelerator).get(name)
        setattr(self._accelerator, name, replacement)

    def unwrap(self) -> None:
        """Put the methods back."""
        while self._wrapped:
            name, before = self._wrapped.popitem()
            if before is not None:
                setattr(self._accelerator, name, before)
            else:
                vars(self._accelerator).pop(name, None)


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
    known = type(base.batch_sampler) is BatchSampler and exactness.known_length(base) is not None
    samples = exactness.length_of(base.sampler) if known else None
    return samples is None or samples % size != 0


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    return {name if i == 0 else f"{name}_{i}": value for i, value in enumerate(values)}


TRANSFORMERS_VERSION: str = version("transformers")

TRANSFORMERS_NAMES: tuple[PrivateName, ...] = (
    PrivateName("module", "skip_first_batches", "resuming without drawing the trained samples again (replaced)"),
    PrivateName("Trainer", "_load_from_checkpoint", "resuming without a second copy of the weights (replaced)"),
    PrivateName("Trainer", "_load_rng_state", "resuming without a file of random streams (its absence is allowed)"),
    PrivateName("Trainer", "_maybe_log_save_evaluate", "the running loss where it is a local variable (wrapped)"),
    PrivateName("trainer", "set_initial_training_values", "the steps of an epoch, with another batch size (wrapped)"),
    PrivateName("trainer", "callback_handler", "the state of callbacks"),
    PrivateName("trainer", "control", "the state of callbacks"),
    PrivateName("trainer", "current_flos", "the count of floating point operations"),
    PrivateName(
        "method", "self", "resume='auto', and training without resume_from (the trainer is found on the stack)"
    ),
)
"""Those that all supported versions have; `tests/accelerate/test_transformers_compat.py` has a test for each."""

_MODULE: Any = transformers.trainer
_RUNNING_LOSS = "_tr_loss"  # 5.0 and later; a local variable of the loop before
_LAST_LOGGED = "_globalstep_last_logged"
_TOTAL_LOSS = "_total_loss_scalar"
_FIRST_STEP = "_initial_global_step"
_COUNTS = "_init_training_state"  # 5.0 and later; a part of the loop before


def trainer_above() -> Trainer | None:
    """The trainer whose method calls this, through whatever: it hands itself to none of its callbacks."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None


class TrainerInternals:
    """Typed, narrow access to the insides of one trainer.

    Args:
        trainer: whose insides are reached.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._skip_first_batches: Any = None
        self._before: dict[str, Any] = {}
        self._shown: torch.Tensor | None = None
        self._carried: torch.Tensor | None = None

    def owners(self) -> dict[str, Any]:
        """The objects that `PrivateName.owner` refers to."""
        methods = filter(inspect.isfunction, vars(Trainer).values())
        receivers = SimpleNamespace(**{one.__code__.co_varnames[0]: one for one in methods if one.__code__.co_argcount})
        return {"module": _MODULE, "Trainer": Trainer, "trainer": self._trainer, "method": receivers}

    def missing(self) -> list[PrivateName]:
        """The names that this version of transformers does not have."""
        return undocumented.lacking(TRANSFORMERS_NAMES, self.owners())

    def probe(self) -> None:
        """Raises `CkptError` where this version lacks a name."""
        undocumented.require(TRANSFORMERS_NAMES, self.owners(), "transformers", TRANSFORMERS_VERSION, "accelerate_ckpt")

    # ---- what the trainer does when it resumes, and we do instead

    def train_with(self, checkpoint: Callable[[], str | None], failed: Callable[[BaseException], None]) -> None:
        """`train()` of no trial resumes from `checkpoint()` where it is given no `resume_from_checkpoint`, and what it
        raises goes through `failed`. Stays for good, and is done once.
        """
        original = self._trainer.train
        if getattr(original, "_ckpt", None) == failed:
            return

        def train(resume_from_checkpoint: Any = None, trial: Any = None, *arguments: Any, **more: Any) -> Any:
            try:
                if resume_from_checkpoint is None and trial is None:
                    resume_from_checkpoint = checkpoint()
                return original(resume_from_checkpoint, trial, *arguments, **more)
            except BaseException as err:
                failed(err)
                raise

        train._ckpt = failed  # type: ignore[attr-defined]
        self._trainer.train = train

    def keep_weights(self) -> None:
        """The folder that the trainer resumes from has no weights; they come from the snapshot. Undone by `unwrap`."""

        def load_nothing(*_: Any, **__: Any) -> None:
            return None

        self._replace("_load_from_checkpoint", load_nothing)

    def count_from(self, epoch: int, batches: int) -> None:
        """Training goes on in this pass over the data after so many of its batches. Undone by `unwrap`.

        Where their number is not known the trainer takes all steps for one epoch, and would skip those of the passes
        before in this one. Before 5.0 there is no place to tell it.
        """
        if has_length(self._trainer.train_dataset) or not hasattr(self._trainer, _COUNTS):
            return
        original = getattr(self._trainer, _COUNTS)

        def init_training_state(*arguments: Any, **more: Any) -> tuple[int, int]:
            original(*arguments, **more)
            return epoch, batches

        self._replace(_COUNTS, init_training_state)

    def skip_with(self, skip: Callable[[Any, int], Any]) -> None:
        """`skip(loader, batches)` runs instead of `skip_first_batches`, once. Undone by `unwrap`."""
        original = _MODULE.skip_first_batches

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            self.unskip()
            return skip(dataloader, num_batches)

        self._skip_first_batches = original
        _MODULE.skip_first_batches = skip_first_batches

    @property
    def skips(self) -> bool:
        """Whether the next call of `skip_first_batches` is ours."""
        return self._skip_first_batches is not None

    def unskip(self) -> None:
        """Put `skip_first_batches` back."""
        if self._skip_first_batches is not None:
            _MODULE.skip_first_batches = self._skip_first_batches
            self._skip_first_batches = None

    def unwrap(self) -> None:
        """Leave the trainer and its module as they were found."""
        self.unskip()
        while self._before:
            self._put_back(next(iter(self._before)))

    def recount_with(self, recount: Callable[[Any, int], int]) -> None:
        """`recount(loader, steps_of_an_epoch)` runs before the trainer reads where it resumes. Undone by `unwrap`.

        It returns by how many steps the trainer counts more than it trains: so many more are in the epochs that it
        needs for its `max_steps`.
        """

        def set_initial_training_values(args: Any, dataloader: Any, *more: Any, **named: Any) -> Any:
            epochs, steps, *others = original(args, dataloader, *more, **named)
            shift = recount(dataloader, int(steps))
            if shift and args.max_steps > 0:
                epochs = -(-(args.max_steps + shift) // steps)
            return epochs, steps, *others

        original = self._replace("set_initial_training_values", set_initial_training_values)

    def follow_evaluations(self, after: Callable[[str, Any], None]) -> None:
        """`after(name, loader)` gets every loader that is made or kept for an evaluation. Undone by `unwrap`."""

        def get_eval_dataloader(eval_dataset: Any = None) -> Any:
            loader = original(eval_dataset)
            after(eval_dataset if isinstance(eval_dataset, str) else "eval", loader)
            return loader

        original = self._replace("get_eval_dataloader", get_eval_dataloader)

    def _replace(self, name: str, method: Any) -> Any:
        """Put `method` on the instance; what was called before. Undone by `unwrap`."""
        original = getattr(self._trainer, name)
        self._before.setdefault(name, vars(self._trainer).get(name))
        setattr(self._trainer, name, method)
        return original

    def _put_back(self, name: str) -> None:
        before = self._before.pop(name)
        if before is None:
            vars(self._trainer).pop(name, None)
        else:
            setattr(self._trainer, name, before)

    # ---- counters

    @property
    def callbacks(self) -> list[Any]:
        """The trainer's callbacks and its control, in order."""
        return [*self._trainer.callback_handler.callbacks, self._trainer.control]

    def follow_running_loss(self) -> None:
        """Before 5.0 the loss since the last log is a local variable: seen when the loop hands it on to be logged."""
        if hasattr(self._trainer, _RUNNING_LOSS):
            return

        def maybe_log(tr_loss: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            result = original(tr_loss, *arguments, **more)
            self._shown = tr_loss.detach().clone()  # it was emptied if it was logged
            return result

        original = self._replace("_maybe_log_save_evaluate", maybe_log)

    def running_loss(self) -> dict[str, Any]:
        """The loss since the last log and the step of that log, all loss and the step it counts from, and the
        operations that are not counted yet.
        """
        trainer = self._trainer
        loss = getattr(trainer, _RUNNING_LOSS, self._shown)
        return {
            "loss": None if loss is None else loss.detach().clone(),
            "total": float(getattr(trainer, _TOTAL_LOSS)),
            "first": int(getattr(trainer, _FIRST_STEP, 0)),
            "last_logged": int(getattr(trainer, _LAST_LOGGED)),
            "flos": float(trainer.current_flos),
        }

    def restore_running_loss(self, saved: dict[str, Any]) -> bool:
        """Put `running_loss` back; False if the saved run could not see the loss."""
        trainer = self._trainer
        trainer.current_flos = saved["flos"]
        if saved["loss"] is None:
            return False
        loss = getattr(trainer, _RUNNING_LOSS, None)
        if loss is not None:
            setattr(trainer, _RUNNING_LOSS, saved["loss"].to(loss.device))
        else:
            self._carry(saved["loss"])
        setattr(trainer, _LAST_LOGGED, saved["last_logged"])
        setattr(trainer, _TOTAL_LOSS, saved["total"])
        if hasattr(trainer, _FIRST_STEP):  # the final mean is over the steps since there
            setattr(trainer, _FIRST_STEP, saved["first"])
        return True

    def _carry(self, loss: torch.Tensor) -> None:
        """Add what was left of the loss to that of the first step, which the loop adds to nothing."""
        self._shown = self._carried = loss
        if "training_step" in self._before:
            return

        def training_step(*arguments: Any, **more: Any) -> Any:
            self._put_back("training_step")
            first = original(*arguments, **more)
            return first + self._carried.to(first.device) if self._carried is not None else first

        original = self._replace("training_step", training_step)
