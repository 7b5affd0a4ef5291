"""What a snapshot costs each of several ranks: bytes, stall, and time to durable while the state grows with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import interleave
from benchmarks.run import Bench, Scale
from benchmarks.team import Team
from benchmarks.values import BarResult, Check, Series, ratios

TITLE = "Ranks: bytes, stall and time to durable of each rank"
SIZES_OF_TEAMS = (1, 2, 4)
BYTES_LIMIT = 1.05
STALL_LIMIT = 1.3
WEAK_LIMIT = 1.2

Taken = list[list[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        strong_bytes: of the state that all teams have.
        weak_bytes: of the state per rank.
    """

    strong_bytes: int
    weak_bytes: int
    rounds: int


SIZES = {
    Scale.FULL: Size(750_000_000, 150_000_000, 11),
    Scale.QUICK: Size(750_000_000, 150_000_000, 3),
    Scale.TINY: Size(4_000_000, 2_000_000, 2),
}


def run(bench: Bench) -> BarResult:
    """Measure teams of 1, 2 and 4 ranks, a snapshot of each in every round."""
    size = SIZES[bench.scale]
    with bench.scratch("ranks") as folder:
        strong = _measure(folder / "strong", dict.fromkeys(SIZES_OF_TEAMS, size.strong_bytes), size.rounds, bench)
        weak = _measure(folder / "weak", {n: size.weak_bytes * n for n in SIZES_OF_TEAMS}, size.rounds, bench)
    checks: list[Check] = []
    for n in SIZES_OF_TEAMS[1:]:
        shares = tuple(nbytes / (strong.nbytes[n] / n) for nbytes in strong.written[n])
        checks.append(Check(f"bytes per rank of {n} / (S/{n}): the most", "x", "at most", BYTES_LIMIT, (max(shares),)))
        checks.append(
            Check(f"bytes per rank of {n} / (S/{n}): the least", "x", "at least", 2 - BYTES_LIMIT, (min(shares),))
        )
    alone = _slowest(strong.in_turn[1], "stall")
    for n in SIZES_OF_TEAMS[1:]:
        stalls = ratios(_slowest(strong.in_turn[n], "stall"), tuple(one / n for one in alone))
        checks.append(Check(f"stall per rank of {n} / (stall of one / {n})", "x", "at most", STALL_LIMIT, stalls))
    base = _slowest(weak.in_turn[1], "save")
    for n in SIZES_OF_TEAMS[1:]:
        saves = ratios(_slowest(weak.in_turn[n], "save"), base)
        checks.append(Check(f"weak scaling: save of a rank of {n} / of one", "x", "at most", WEAK_LIMIT, saves))
    series = []
    for n in SIZES_OF_TEAMS:
        series += [
            Series(f"stall, {n} ranks in turn", "s", _slowest(strong.in_turn[n], "stall"), "slowest rank"),
            Series(f"stall, {n} ranks at once", "s", _slowest(strong.together[n], "stall"), "slowest rank"),
            Series(f"save, {n} ranks in turn, state grows", "s", _slowest(weak.in_turn[n], "save"), "slowest rank"),
            Series(f"save, {n} ranks at once, state grows", "s", _slowest(weak.together[n], "save"), "slowest rank"),
        ]
    return BarResult(
        "ranks",
        TITLE,
        {
            "stall": f"{strong.nbytes[1] / 1e6:.0f} MB fp32 (GPT-2 with Adam), the same for 1, 2 and 4 ranks; eager",
            "weak scaling": f"{weak.nbytes[1] / 1e6:.0f} MB per rank; until its part is durable, of rank 0 the commit",
            "folders": "one per team, on one disk; every element changes between two snapshots",
            "threads": f"one of torch per rank; {os.cpu_count()} cores",
            "in turn": "each rank takes and writes its part while the others do nothing, as if it had a machine",
            "of a round": "the slowest rank counts",
        },
        tuple(checks),
        tuple(series),
        (
            "Ranks at once share the cores, the memory bandwidth and the disk of this one machine: that they slow each "
            "other down says nothing of ranks with machines of their own, which the targets are about.",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """By number of ranks: bytes of the state, bytes that each rank has written, and the samples of each round."""

    nbytes: Mapping[int, int]
    written: Mapping[int, Sequence[int]]
    in_turn: Mapping[int, Taken]
    together: Mapping[int, Taken]


def _measure(folder: Path, nbytes: Mapping[int, int], rounds: int, bench: Bench) -> _Measured:
    in_turn: dict[int, Taken] = {n: [] for n in nbytes}
    together: dict[int, Taken] = {n: [] for n in nbytes}
    with ExitStack() as stack:
        teams = {}
        for n, state_nbytes in nbytes.items():
            bench.say(f"starting {n} ranks")
            teams[n] = stack.enter_context(Team(n, folder / str(n), state_nbytes))
            teams[n].in_turn()
            teams[n].together()

        def turn(n: int) -> float:
            in_turn[n].append(teams[n].in_turn())
            return 0.0

        def once(n: int) -> float:
            together[n].append(teams[n].together())
            return 0.0

        candidates = {f"{n} in turn": lambda n=n: turn(n) for n in nbytes}
        candidates |= {f"{n} at once": lambda n=n: once(n) for n in nbytes}
        interleave(candidates, rounds, tick=bench.say)
        return _Measured(
            {n: team.nbytes for n, team in teams.items()},
            {n: team.written_bytes() for n, team in teams.items()},
            in_turn,
            together,
        )


def _slowest(taken: Taken, key: str) -> tuple[float, ...]:
    """Of each round what its slowest rank took."""
    return tuple(max(rank[key] for rank in ranks) for ranks in taken)
