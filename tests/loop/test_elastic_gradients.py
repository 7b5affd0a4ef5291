"""Gradients that wait for a step when the number of ranks changes."""

from __future__ import annotations

import torch

from ckpt_engine.loop.capture import Elastic


def elastic(saved: int) -> Elastic:
    return Elastic(0, 1, [{} for _ in range(saved)], "derive")


def test_the_new_ranks_take_the_mean_of_the_gradients_of_the_saved_ones() -> None:
    """That is what DDP would have made of them at the step: each new rank adds its own, and the mean keeps them."""
    module = torch.nn.Linear(3, 2)
    saved = [{"weight": torch.full((2, 3), 1.0)}, {"weight": torch.full((2, 3), 4.0)}]
    found, missing = elastic(2).gradients(saved, module)
    assert missing == []
    assert list(found) == ["weight"] and torch.equal(found["weight"], torch.full((2, 3), 2.5))
    assert torch.equal(saved[0]["weight"], torch.full((2, 3), 1.0))


def test_gradients_that_cannot_be_put_together_are_named() -> None:
    """Parts of a sharded model, and what one rank only had: the report says that the next step goes without them."""
    module = torch.nn.Linear(3, 2)
    saved = [{"weight": torch.ones(1, 3), "bias": torch.ones(2)}, {"weight": torch.ones(1, 3)}]
    found, missing = elastic(2).gradients(saved, module)
    assert found == {}
    assert [one.name for one in missing] == ["gradient of 'weight'", "gradient of 'bias'"]
