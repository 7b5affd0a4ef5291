"""The state of a Lightning run at one instant, as the tree the engine stores.

Top-level keys are those of a Lightning checkpoint, so that a snapshot exports to a `.ckpt` file by leaving out our own
key, `ckpt_engine`: what Lightning does not save but an exact resume needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from ckpt_engine.audit.audit import Audit
from ckpt_engine.data import rng
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot import sharding
from ckpt_engine.snapshot.flatten import Flattener, problems
from ckpt_engine.tracking import flags, metrics
from ckpt_engine.tracking.ddp_order import GradientOrder
from ckpt_engine.tracking.packed import Packer
from ckpt_engine.tracking.rank_values import own_values
from lightning_ckpt import loop_state
from lightning_ckpt.boundary import Kind
from lightning_ckpt.compat import Internals
from lightning_ckpt.redone import MARK
from lightning_ckpt.sharded import gradient_order, live_states

OWN_KEY = "ckpt_engine"
OWN_VERSION = 1
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_HPARAMS_TYPES = ("hparams_type", "datamodule_hparams_type")


@dataclass(frozen=True, slots=True)
class Instant:
    """What is captured and by whom it is described.

    Args:
        kind: of the boundary.
        loaders: states of the training loaders, in order.
        validation: states of the validation loaders, in order.
        accumulating: gradients wait for an optimizer step.
        gradients: include accumulated gradients.
        undo: takes out of Lightning's part what was done since; None: nothing was.
        extras: more of our own entries, or others in their place.
        hidden: progress bar entries that are not the user's.
        flags_at_start: `flags.dump_flags` when training started.
        audit: what it finds is part of the state.
    """

    kind: Kind
    loaders: list[Any]
    validation: list[Any]
    accumulating: bool
    gradients: bool
    undo: Callable[[dict[str, Any]], None] | None
    extras: Mapping[str, Any]
    hidden: frozenset[str]
    flags_at_start: Mapping[str, list[str]]
    audit: Audit


class Capture:
    """Makes the state tree of one run; also the predicate that says which of its leaves may be copied lazily.

    Args:
        internals: of the trainer.
        trainer: whose state it is.
        module: the LightningModule.
        ranks: of the run; None: it is one process.
    """

    def __init__(
        self, internals: Internals, trainer: pl.Trainer, module: pl.LightningModule, ranks: Ranks | None
    ) -> None:
        self._internals = internals
        self._ranks = ranks
        self.groups_at_start: list[list[int]] = []
        """`loop_state.group_sizes` before training."""
        self._trainer = trainer
        self._module = module
        self._packer = Packer(OWN_KEY)
        self._left_out: dict[str, str] | None = None
        self._weights: Mapping[str, Any] = {}
        self._managed: frozenset[int] | None = None
        self._gradient_order: GradientOrder | None = None

    def state(self, instant: Instant) -> dict[str, Any]:
        """The whole state, with references to live tensors; draws nothing from any global random stream."""
        streams = rng.capture()
        with live_states(self._trainer):
            state = self._internals.dump_checkpoint()
        if rng.capture() != streams:
            # Hooks such as on_save_checkpoint may draw; the run must not notice that it is captured.
            rng.restore(streams)
        state.pop(MARK, None)  # for Lightning's own files
        fit_loop = state["loops"]["fit_loop"]
        # Lightning would restore a loader that has its own state a second time, after we did.
        fit_loop["state_dict"].pop("combined_loader", None)
        if instant.undo is not None:
            instant.undo(state)
        _canonicalise(fit_loop, instant.kind, accumulating=instant.accumulating)
        self._drop_unstorable(state)
        hidden, large = instant.audit.state()
        values = own_values(state, self._ranks)
        state[OWN_KEY] = {
            "version": OWN_VERSION,
            "kind": instant.kind.value,
            "gradients": loop_state.dump_gradients(self._module) if instant.gradients else None,
            "hidden": large,
            "packed": self._packer.pack(
                {
                    "rng": streams,
                    "audit": hidden,
                    "loaders": instant.loaders,
                    "validation": instant.validation,
                    "combined": self._internals.combined_position,
                    "progress": self._internals.progress,
                    "results": loop_state.dump_results(self._internals),
                    "metrics": metrics.dump(self._module),
                    "tables": self._tables(instant),
                    "flags": flags.dump_flags(self._module),
                    "flags_at_start": dict(instant.flags_at_start),
                    "should_stop": bool(self._trainer.should_stop),
                    "reload_epoch": self._internals.reload_epoch,
                    "validation_reload_epoch": self._internals.validation_reload_epoch,
                    "gradient_order": self._order().state(),
                    "left_out": self._left_out or {},
                    "values": values,
                    "groups": loop_state.dump_groups(self._trainer, self._module, self.groups_at_start),
                    **instant.extras,
                }
            ),
        }
        self._weights = {key: state[key] for key in ("state_dict", "current_model_state") if key in state}
        self._managed = None
        return state

    def lazy(self) -> LazyLeaves:
        """A predicate for the engine; one object for the whole run."""
        return LazyLeaves(self)

    def managed(self) -> frozenset[int]:
        """Addresses of the parameters that optimizers manage, as of the last `state`."""
        if self._managed is None:
            self._managed = frozenset(
                sharding.here(parameter).data_ptr()
                for optimizer in self._trainer.optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
        return self._managed

    def _order(self) -> GradientOrder:
        """Lightning wraps the model after this object was made."""
        if self._gradient_order is None:
            self._gradient_order = gradient_order(self._trainer)
        return self._gradient_order

    def _tables(self, instant: Instant) -> dict[str, Any]:
        tables = loop_state.dump_tables(self._internals, instant.hidden)
        if instant.kind is Kind.STOPPED:
            # The logger connector was already told that the epoch is over, which a longer run would not be.
            tables["first_batch"] = self._internals.batches_in_epoch == 1
        return tables

    def _drop_unstorable(self, state: dict[str, Any]) -> None:
        """Hyper-parameters may hold any object; Lightning does not need them to resume, so those are left out."""
        for key in _HPARAMS_TYPES:
            state.pop(key, None)
        if self._left_out is None:
            flattener = Flattener()
            found = {
                f"{key}/{name}": problems(value, (key, name), flattener)
                for key in _HPARAMS
                for name, value in dict(state.get(key) or {}).items()
            }
            self._left_out = {path: problem for path, problem in found.items() if problem}
        for key in _HPARAMS:
            if any(path.startswith(f"{key}/") for path in self._left_out):
                state[key] = {n: v for n, v in dict(state[key]).items() if f"{key}/{n}" not in self._left_out}


def _canonicalise(fit_loop: dict[str, Any], kind: Kind, *, accumulating: bool) -> None:
    """Rewrite the counters to a form that Lightning itself resumes from without repeating or losing anything."""
    if kind is Kind.VALIDATED:
        # As saved in `on_train_batch_end`: otherwise Lightning counts one more logger step after the validation.
        for span in ("total", "current"):
            fit_loop["epoch_loop.batch_progress"][span]["completed"] -= 1
        if not accumulating:
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    elif kind is Kind.STOPPED:
        for span in ("total", "current"):
            fit_loop["epoch_progress"][span]["processed"] -= 1


class LazyLeaves:
    """True for leaves that change in an optimizer step only: its parameters and its state.

    Buffers change in forward, learning rates at the scheduler, and parameters that no optimizer manages whenever their
    owner likes (momentum encoders do it in forward), so these are not lazy.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, path: tuple[Any, ...]) -> bool:
        if path[0] == "optimizer_states":
            return len(path) > 2 and path[2] == "state"
        weights = self._capture._weights.get(path[0])
        if weights is None or len(path) != 2:
            return False
        tensor = weights[path[1]]
        live = sharding.here(tensor)
        return live.numel() > 0 and live.data_ptr() in self._capture.managed()
