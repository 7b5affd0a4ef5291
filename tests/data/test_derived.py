"""Random streams of ranks that did not exist."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt_engine.data import rng
from ckpt_engine.data.derived import derive


def streams(seed: int) -> rng.RngState:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.capture()


def draws(state: rng.RngState) -> tuple[float, float, float]:
    rng.restore(state)
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_every_new_rank_draws_something_else_and_always_the_same() -> None:
    """Of all three streams, for many ranks; rank 0 goes on with its own."""
    saved = [streams(1), streams(2)]
    found = [draws(derive(saved, rank)) for rank in range(64)]
    assert found == [draws(derive(saved, rank)) for rank in range(64)]
    assert all(len(set(one)) == 64 for one in zip(*found, strict=True))
    assert found[0] == draws(saved[0])


def test_they_follow_from_rank_0_alone() -> None:
    """How many others there were, and what they had, does not matter."""
    first = streams(1)
    assert derive([first], 3) == derive([first, streams(2)], 3) == derive([first, streams(5), streams(6)], 3)
    assert derive([streams(9)], 3) != derive([first], 3)


def test_what_was_the_same_on_all_ranks_stays_the_same() -> None:
    """Ranks that decide something by a stream in common go on deciding alike; of one rank nobody knows that."""
    first, second = streams(1), streams(2)
    common = {**second, "python": first["python"]}
    (a, *_), (b, *_) = draws(derive([first, common], 1)), draws(derive([first, common], 2))
    assert a == b == draws(first)[0]
    assert draws(derive([first, common], 1))[1:] != draws(derive([first, common], 2))[1:]
    assert draws(derive([first], 1))[0] != a


def test_streams_of_devices_that_are_not_here_are_left_alone() -> None:
    """Putting them back says so."""
    saved: dict[str, Any] = {**streams(1), "cuda": [b"a", b"b"]}
    if not torch.cuda.is_available():
        assert derive([saved], 1)["cuda"] == [b"a", b"b"]
