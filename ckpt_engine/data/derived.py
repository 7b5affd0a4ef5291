"""The random streams of a rank that did not exist, made from those that were saved."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ckpt_engine.data import rng

__all__ = ["Teams", "derive", "repeat"]


@dataclass(frozen=True, slots=True)
class Teams:
    """Which ranks share a model (tensor parallelism), and so have the same samples and should draw alike.

    Args:
        saved: the team of each saved rank, in order; teams are numbered from 0.
        mine: of this rank.
    """

    saved: tuple[int, ...]
    mine: int

    @classmethod
    def of_sizes(cls, saved_size: int, saved_team: int, rank: int, team: int) -> Self:
        """Teams of neighbouring ranks.

        Args:
            saved_size: number of saved ranks; their teams were of `saved_team` ranks.
            rank, team: this rank, and the ranks of a team now.
        """
        return cls(tuple(one // saved_team for one in range(saved_size)), rank // team)


def derive(saved: Sequence[rng.RngState], rank: int, teams: Teams | None = None) -> rng.RngState:
    """The streams of `rank` in a run of another number of ranks; the same at every resume.

    A stream that was the same on all saved ranks stays the same on all: what the ranks decide by it must not differ.
    Of any other one rank 0 goes on with that of rank 0, and another rank begins one whose seed is the SHA-256 of the
    stream of rank 0, its name and the number of the rank. Where the ranks of each team had the same stream it is the
    teams that are counted, and all ranks of one get the same.

    Args:
        saved: `rng.capture()` of every saved rank, in order.
        rank: for which.
        teams: of the ranks; None: each is alone.
    """
    found = {}
    for name, stream in saved[0].items():
        streams, number = _of_teams([one.get(name) for one in saved], rank, teams)
        if number == 0 or (len(streams) > 1 and all(one == stream for one in streams)):
            found[name] = stream
        else:
            found[name] = _begin(name, stream, hashlib.sha256(repr((name, stream, number)).encode()).digest())
    return found


def repeat(saved: Sequence[rng.RngState], rank: int, teams: Teams | None = None) -> rng.RngState:
    """The streams of saved rank (or team) r modulo their number: with more of them several draw the same."""
    found = {}
    for name in saved[0]:
        streams, number = _of_teams([one.get(name) for one in saved], rank, teams)
        stream = streams[number % len(streams)]
        if stream is not None:
            found[name] = stream
    return found


def _of_teams(streams: Sequence[Any], rank: int, teams: Teams | None) -> tuple[Sequence[Any], int]:
    """One stream of each team, and the number of this rank's; of each rank, where those of a team differ."""
    if teams is None:
        return streams, rank
    first: dict[int, Any] = {}
    for team, stream in zip(teams.saved, streams, strict=True):
        if first.setdefault(team, stream) != stream:
            return streams, rank
    return [first[team] for team in sorted(first)], teams.mine


def _begin(name: str, like: Any, digest: bytes) -> Any:
    """A new stream of the kind that `like` is of."""
    seed = int.from_bytes(digest, "little")
    if name == "python":
        return rng.encode_python(random.Random(seed))
    if name == "numpy":
        return _begin_numpy(like, seed)
    if name == "torch":
        return _torch(torch.Generator(), seed)
    if isinstance(like, bytes):
        return _of_device(name, None, like, seed)
    return [_of_device(name, index, state, seed + index) for index, state in enumerate(like)]


def _begin_numpy(like: Mapping[str, Any], seed: int) -> Any:
    state = dict(getattr(np.random, like["bit_generator"])(seed).state)
    return rng.encode_numpy(state | ({"has_gauss": 0, "gauss": 0.0} if "key" in like else {}))


def _of_device(kind: str, index: int | None, like: bytes, seed: int) -> bytes:
    module: Any = getattr(torch, kind)
    if not module.is_available() or (index or 0) >= module.device_count():
        return like  # it cannot be put back here anyway, which `rng.restore` says
    return _torch(torch.Generator(kind if index is None else f"{kind}:{index}"), seed)


def _torch(generator: torch.Generator, seed: int) -> bytes:
    generator.manual_seed(seed % 2**63)
    return generator.get_state().numpy().tobytes()
