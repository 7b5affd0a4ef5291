"""The state of a loop at one instant, as the tree the engine stores: one component per object, and one of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt_engine.audit.audit import Audit
from ckpt_engine.data import rng
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.flat import FlatPart
from ckpt_engine.snapshot.sharding import here
from ckpt_engine.tracking import metrics
from ckpt_engine.tracking.ddp_order import GradientOrder, wrappers_of
from ckpt_engine.tracking.gradients import stored
from ckpt_engine.tracking.packed import Packer
from ckpt_engine.tracking.parts import OWN_KEY, Parts, managed
from ckpt_engine.tracking.rank_values import alike, own_values

OWN_VERSION = 1


class Capture:
    """Makes the state tree of one run; also the predicate that says which of its leaves may be copied lazily.

    Args:
        parts: the components.
        ranks: this one is one of them.
    """

    def __init__(self, parts: Parts, ranks: Ranks | None = None) -> None:
        self._parts = parts
        self._ranks = ranks
        if isinstance(ranks, ProcessGroupRanks):
            ranks.divide(alike(parts))
        self._packer = Packer(OWN_KEY)
        self._state: Mapping[str, Any] = {}
        self._managed: frozenset[int] | None = None
        self._order: GradientOrder | None = None

    def state(
        self,
        own: Mapping[str, Any],
        gradients: Mapping[str, Any],
        audit: Audit,
        before: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The whole state, with references to live tensors; draws nothing from any global random stream.

        Args:
            own: small values that an exact resume needs besides the components; with `before`, streams and metrics too.
            gradients: of optimizers that wait for more, by component and parameter name.
            audit: what it finds is part of the state.
            before: makes of the components those of an earlier moment.
        """
        hidden, large = audit.state()
        streams = rng.capture()
        state = self._parts.state()
        if rng.capture() != streams:
            rng.restore(streams)  # a state_dict of the user may draw; the run must not notice that it is captured
        if before is not None:
            state = before(state)
        self._state, self._managed = state, None
        return state | {
            OWN_KEY: {
                "version": OWN_VERSION,
                "gradients": dict(gradients),
                "hidden": large,
                "packed": self._packer.pack(
                    {
                        "rng": streams,
                        "metric_states": metrics.dump_all(self._parts.objects),
                        **own,
                        "audit": hidden,
                        "gradient_order": self._gradient_order(),
                        "values": own_values(state, self._ranks),
                    }
                ),
            }
        }

    def _gradient_order(self) -> list[bytes]:
        if self._order is None:
            self._order = GradientOrder(wrappers_of(self._parts.modules.values()))
        return self._order.state()

    def gradients(self, stepped: set[int]) -> dict[str, dict[str, Any]]:
        """Gradients that wait for an optimizer step.

        Args:
            stepped: ids of optimizers that have used up theirs.
        """
        waiting = [optimizer for optimizer in self._parts.optimizers.values() if id(optimizer) not in stepped]
        if not waiting:
            return {}
        ids = {id(parameter) for parameter in managed(waiting) if parameter.grad is not None}
        return {
            name: found
            for name, module in self._parts.modules.items()
            if (
                found := {
                    key: stored(p.grad) for key, p in module.named_parameters() if id(p) in ids and p.grad is not None
                }
            )
        }

    def is_lazy(self, path: tuple[Any, ...]) -> bool:
        """Whether this leaf changes in an optimizer step only: an optimizer's parameter or state.

        Buffers change in forward, learning rates at the scheduler, and parameters that no optimizer manages whenever
        their owner likes (averaged weights), so these are not lazy.
        """
        if len(path) < 2:
            return False
        if path[0] in self._parts.optimizers:
            return bool(path[1] == "state")
        if path[0] not in self._parts.modules or len(path) != 2:
            return False
        tensor = self._state[path[0]][path[1]]
        if self._managed is None:
            self._managed = frozenset(here(p).data_ptr() for p in managed(self._parts.optimizers.values()))
        if not isinstance(tensor, torch.Tensor | FlatPart):
            return False
        live = here(tensor)
        return live.numel() > 0 and live.data_ptr() in self._managed
