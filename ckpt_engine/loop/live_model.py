"""The model of a trainer as snapshots have it: its state, and what no `state_dict` names of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ckpt_engine.loop import components
from ckpt_engine.loop.distributed_models import flat_models, units
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.restore.match import require_match
from ckpt_engine.state.module_names import canonical, for_live, renamed
from ckpt_engine.state.sharding import optimizer_shell
from ckpt_engine.state.wrapped import in_place
from ckpt_engine.store.manifest import Manifest


class LiveModel:
    """The one model of a trainer that saves and restores it under names of its own.

    Args:
        module: the model.
        root: what FSDP1 wraps around it; None: the trainer does not use FSDP1.

    Attributes:
        flat: what FSDP1 divides, or None.
        root: the outermost module that has parameters of the model.
    """

    saved_shapes, shapes_in = staticmethod(components.saved_shapes), staticmethod(components.shapes_in)

    def __init__(self, module: nn.Module, root: nn.Module | None = None) -> None:
        self._module = module
        self.flat = None if root is None else flat_models([root])
        self.root = module if root is None or self.flat is None else root

    def state(self, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The live `state_dict` of the model, or of one of its optimizers; of a divided one the parts of this rank."""
        return components.state_of(optimizer or self.root, self.flat)

    def shells(self, optimizers: Iterable[torch.optim.Optimizer], manifest: Manifest, component: str) -> list[Any]:
        """What the states of the optimizers of a divided model are read into.

        Args:
            component: the list of their states in the snapshot.
        """
        nodes, divided = manifest.tree.get(component, []), {} if self.flat is None else self.flat.parts()
        pairs = zip(optimizers, nodes, strict=False)
        shells = [optimizer_shell(optimizer, node, manifest.entries, divided) for optimizer, node in pairs]
        return shells + [{"state": {}} for _ in nodes[len(shells) :]]

    def load(self, weights: Any, optimizers: Iterable[torch.optim.Optimizer], states: Sequence[Any]) -> None:
        """Put a divided model back, as far as its trainer does not: the weights of FSDP1, and all optimizers.

        Raises:
            MismatchError: the model or an optimizer refuses the state.
        """
        if self.flat is not None:
            components.put_back("state_dict", self.root, weights, self.flat)
        for optimizer, saved in zip(optimizers, states, strict=False):
            components.put_back("optimizer_states", optimizer, saved, self.flat)

    def canonical(self, state: Any) -> Any:
        """A `state_dict` that the trainer has made of the model, under the names that snapshots have."""
        return renamed(components.without_lazy(state), canonical(self._module))

    def require_fits(self, saved: components.Shapes, snapshot: str, *, strict: bool) -> None:
        """Compare names and shapes of the weights with those of a snapshot.

        Args:
            saved: those of the snapshot, as of `saved_shapes` or `shapes_in`.
            snapshot: its id.
            strict: False: weights that only one of both has are left alone.

        Raises:
            MismatchError: names the keys.
        """
        found = components.without_metrics(self._module, saved)
        expected = components.weight_shapes(self.root, self.flat)
        if not strict:
            common = expected.keys() & found.keys()
            expected, found = ({name: one[name] for name in common} for one in (expected, found))
        require_match(expected, found, what="model", snapshot=snapshot)

    def entries(self) -> dict[str, Any]:
        """What a snapshot has of the model besides its `state_dict`: `restore` takes it."""
        return {"metrics": components.dump(self._module), "flags": components.dump_flags(self._module)}

    def gradients(self) -> dict[str, Any]:
        """The gradients, by the name of their parameter."""
        return components.gradients_of(self._module)

    def prepare(self, own: Mapping[str, Any], state: dict[str, Any], weights: Iterable[str]) -> None:
        """Before the trainer loads the weights: as many metrics as the saved model had, which keeps what it is given,
        and the names that its modules have here.

        Args:
            own: has `entries`.
            state: of the snapshot.
            weights: its components that are weights of the model.
        """
        components.grow(self._module, own.get("metrics", {}))
        for key in state.keys() & set(weights):
            saved = components.own_extra_state(state[key])
            # A module of FSDP1 that is asked for its `state_dict` before the first forward takes itself for the root.
            state[key] = saved if units(self._module) else for_live(self._module, saved)

    def in_place(self, saved: Mapping[str, Any]) -> AbstractContextManager[Mapping[str, Any]]:
        """Inside, the trainer loads the rest of `saved`: tensors of other tensors are filled where they are."""
        return in_place(self._module, saved)

    def restore(self, own: Mapping[str, Any]) -> list[NotRestored]:
        """Put metrics, gradients and flags back, flags only where the script begins with those of the saved run.

        Args:
            own: has `entries`, `gradients`, and the flags at the start of the saved process as `flags_at_start`.
        """
        missing = components.restore(self._module, own["metrics"]) if own["metrics"] else []
        missing += components.put_back_gradients(self._module, own["gradients"] or {})
        now, saved = components.dump_flags(self._module), own["flags"]
        if saved != own["flags_at_start"]:
            if now == own["flags_at_start"]:
                components.restore_flags(self._module, saved)
            elif now != saved:
                missing.append(NotRestored("frozen parameters and eval modes", "the script sets others now"))
        return missing
