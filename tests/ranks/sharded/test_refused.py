"""Strategies whose state no other strategy can read are refused before anything starts, with a way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from accelerate_ckpt.adaptive import ranks_of as accelerate_ranks_of
from ckpt_engine.errors import ConfigError
from ckpt_engine.loop.components import NamedParts
from lightning_ckpt.sharded import ranks_of as lightning_ranks_of
from tests.ranks.sharded.pretend import pretended


class DeepSpeedStrategy:
    """Called as that of Lightning, which needs a library that is not there."""


def test_deepspeed_under_lightning() -> None:
    """Its own checkpoints, or FSDP2."""
    trainer = cast(Any, SimpleNamespace(world_size=2, strategy=DeepSpeedStrategy()))
    with pytest.raises(ConfigError, match="this run has DeepSpeedStrategy") as error:
        lightning_ranks_of(trainer)
    assert "ModelParallelStrategy" in str(error.value)


def test_deepspeed_under_accelerate() -> None:
    """Its state is in files of its own."""
    accelerator = cast(Any, SimpleNamespace(num_processes=2, distributed_type=DistributedType.DEEPSPEED))
    with pytest.raises(ConfigError, match=r"accelerator\.save_state for this run, or FSDP2"):
        accelerate_ranks_of(accelerator)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_optimizer_that_has_a_part_of_its_state_on_each_rank() -> None:
    """Its own error is about a call that a user does not make."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pretended(2), pytest.raises(ConfigError, match="'opt', a ZeroRedundancyOptimizer, has a part of its state"):
        NamedParts({"opt": ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)})
