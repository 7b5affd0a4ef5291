"""A model whose `load_state_dict` refuses what its `state_dict` gives is refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.errors import ConfigError
from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.runs import Case, assert_exact, tracked

__all__ = ["arena_at_once", "one_thread"]


class Quantised(nn.Linear):
    """Writes the scale of its weight beside it, as 4-bit layers do, and does not read it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


class Reading(Quantised):
    """Reads it, too."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight.absmax")
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 1))
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}extra": torch.ones(1)})
    )
    return model


REFUSED = {
    "a layer": (lambda: nn.Sequential(Quantised(8, 8), nn.Linear(8, 1)), "0.weight.absmax"),
    "within others": (lambda: nn.Sequential(nn.Sequential(Quantised(8, 8)), nn.Linear(8, 1)), "0.0.weight.absmax"),
    "a hook": (hooked, "extra"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_read_what_it_writes_is_refused_before_it_trains(name: str, tmp_path: Path) -> None:
    model, key = REFUSED[name]
    with pytest.raises(ConfigError, match=f"'model' has '{key}', and its load_state_dict"):
        tracked(Case(model=model), tmp_path)
    assert not (tmp_path / "run" / "snapshots").exists()


def test_a_model_that_reads_in_a_way_of_its_own_is_taken(tmp_path: Path) -> None:
    assert_exact(Case(model=lambda: nn.Sequential(Reading(8, 8), nn.Linear(8, 1))), tmp_path)
