"""Random streams of ranks that did not exist."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt_engine.data import rng
from ckpt_engine.data.rng import Teams, derive, repeat


def streams(seed: int) -> rng.RngState:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.capture()


def draws(state: rng.RngState) -> tuple[float, float, float]:
    rng.restore(state)
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_every_new_rank_draws_something_else_and_always_the_same() -> None:
    """All three streams differ between many ranks; rank 0 goes on with its own."""
    saved = [streams(1), streams(2)]
    found = [draws(derive(saved, rank)) for rank in range(64)]
    assert found == [draws(derive(saved, rank)) for rank in range(64)]
    assert all(len(set(one)) == 64 for one in zip(*found, strict=True))
    assert found[0] == draws(saved[0])


def test_they_follow_from_rank_0_alone() -> None:
    """The number of the other ranks and their streams do not matter."""
    first = streams(1)
    assert derive([first], 3) == derive([first, streams(2)], 3) == derive([first, streams(5), streams(6)], 3)
    assert derive([streams(9)], 3) != derive([first], 3)


def test_what_was_the_same_on_all_ranks_stays_the_same() -> None:
    """Ranks that decide by a common stream go on deciding alike; with one rank no stream is known to be common."""
    first, second = streams(1), streams(2)
    common = {**second, "python": first["python"]}
    (a, *_), (b, *_) = draws(derive([first, common], 1)), draws(derive([first, common], 2))
    assert a == b == draws(first)[0]
    assert draws(derive([first, common], 1))[1:] != draws(derive([first, common], 2))[1:]
    assert draws(derive([first], 1))[0] != a


def test_ranks_that_share_a_model_draw_alike() -> None:
    """Two teams of two become three of two: each team has one stream, and the first one goes on with its own."""
    saved = [streams(1), streams(1), streams(2), streams(2)]
    found = [draws(derive(saved, rank, Teams.of_sizes(4, 2, rank, 2))) for rank in range(6)]
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 3
    assert found[0] == draws(saved[0])
    repeated = [draws(repeat(saved, rank, Teams.of_sizes(4, 2, rank, 2))) for rank in range(6)]
    assert repeated == [draws(saved[0])] * 2 + [draws(saved[2])] * 2 + [draws(saved[0])] * 2


def test_teams_come_and_go() -> None:
    """Two single ranks become two teams; two teams become four single ranks, which draw differently."""
    alone = [streams(1), streams(2)]
    found = [draws(derive(alone, rank, Teams.of_sizes(2, 1, rank, 2))) for rank in range(4)]
    assert found[0] == found[1] != found[2] == found[3]
    saved = [streams(1), streams(1), streams(2), streams(2)]
    assert len({draws(derive(saved, rank, Teams.of_sizes(4, 2, rank, 1))) for rank in range(4)}) == 4


def test_ranks_of_a_team_that_drew_differently_go_on_so() -> None:
    """A script that seeds each rank by its number."""
    saved = [streams(seed) for seed in range(4)]
    teams = [Teams.of_sizes(4, 2, rank, 2) for rank in range(2)]
    assert [derive(saved, rank, teams[rank]) for rank in range(2)] == [derive(saved, rank) for rank in range(2)]
    assert repeat(saved, 5) == saved[1]


def test_streams_of_devices_that_are_not_here_are_left_alone() -> None:
    """Putting them back says so."""
    saved: dict[str, Any] = {**streams(1), "cuda": [b"a", b"b"]}
    if not torch.cuda.is_available():
        assert derive([saved], 1)["cuda"] == [b"a", b"b"]
