"""Which processes train together under an accelerator, and what of their states is the same."""

from __future__ import annotations

from functools import cache
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from accelerate_ckpt.compat import Internals
from ckpt_engine.errors import ConfigError
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.tracking.fsdp1 import clean_name
from ckpt_engine.tracking.parts import OWN_KEY

_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_HINTS = {
    "DEEPSPEED": "it keeps its state to itself: use accelerator.save_state, or FSDP2",
}


def ranks_of(accelerator: Accelerator, internals: Internals) -> Ranks | None:
    """All ranks of `accelerator`; None: it is one process. What was prepared is looked at when a snapshot is.

    Parameters and what optimizers know of them are the same on all ranks of DDP; DTensors and FSDP1 tell who has what.
    Everything else is that of rank 0, and streams and positions are each rank's own.

    Raises:
        ConfigError: the processes divide the state in ways that are not supported.
    """
    if accelerator.num_processes == 1:
        return None
    if accelerator.distributed_type not in (*_DDP, DistributedType.FSDP):
        kind = accelerator.distributed_type.value
        raise ConfigError(
            f"several processes are supported with DDP and FSDP, and this run has {kind}",
            hint=_HINTS.get(kind, "use accelerator.save_state for this run"),
        )

    @cache
    def names() -> frozenset[str]:
        models = (accelerator.unwrap_model(model, keep_torch_compile=False) for model in internals.models())
        return frozenset(
            clean_name(name) for model in models for name, _ in model.named_parameters(remove_duplicate=False)
        )

    def alike(path: tuple[Any, ...]) -> bool:
        component = str(path[0])
        if component.startswith("model"):
            return len(path) == 2 and path[1] in names()
        return component.startswith("optimizer") and len(path) > 1 and path[1] == "state"

    return ProcessGroupRanks(own={OWN_KEY}, divides=alike)
