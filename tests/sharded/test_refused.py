"""Strategies whose state no other strategy can read are refused before anything starts, with a way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate.utils import DistributedType
from torch import nn

from accelerate_ckpt.adaptive import ranks_of as accelerate_ranks_of
from ckpt_engine.errors import ConfigError
from lightning_ckpt.sharded import ranks_of as lightning_ranks_of


class DeepSpeedStrategy:
    """Called as that of Lightning, which needs a library that is not there."""


def test_deepspeed_under_lightning() -> None:
    """Its own checkpoints, or FSDP2."""
    trainer = cast(Any, SimpleNamespace(world_size=2, strategy=DeepSpeedStrategy()))
    with pytest.raises(ConfigError, match="this run has DeepSpeedStrategy") as error:
        lightning_ranks_of(trainer, cast(Any, nn.Linear(2, 2)))
    assert "ModelParallelStrategy" in str(error.value)


def test_deepspeed_under_accelerate() -> None:
    """Its state is in files of its own."""
    accelerator = cast(Any, SimpleNamespace(num_processes=2, distributed_type=DistributedType.DEEPSPEED))
    with pytest.raises(ConfigError, match=r"accelerator\.save_state, or FSDP2"):
        accelerate_ranks_of(accelerator)
