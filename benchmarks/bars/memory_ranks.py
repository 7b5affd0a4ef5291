"""What a snapshot in memory after every step costs two or four ranks and one process; and resuming from it or disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.bars.stall import ReferenceCopy
from benchmarks.measure import interleave
from benchmarks.memory_saver import MemorySaver
from benchmarks.plain_loop import NoSaver, PlainLoop, Saver
from benchmarks.run import Bench, Scale
from benchmarks.training_team import TrainingTeam
from benchmarks.values import BarResult, Check, Series, ratios

TITLE = "Memory tier of ranks: a snapshot in memory after every step, and resuming from it"
RANKS = 2
MORE_RANKS = 4
STEP_COPIES = 40.0
OVERHEAD_LIMIT = 3.5
RESTART_LIMIT = 1.0
KINDS = ("eager", "lazy")
ALONE = "one process"
TOGETHER = f"{RANKS} ranks"
MORE = f"{MORE_RANKS} ranks"


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    parameters: int
    iterations: int
    rounds: int
    restart_bytes: int
    restarts: int


SIZES = {
    Scale.FULL: Size(8_000_000, 10, 5, 750_000_000, 4),
    Scale.QUICK: Size(8_000_000, 10, 3, 750_000_000, 2),
    Scale.TINY: Size(20_000, 3, 1, 4_000_000, 1),
}


def run(bench: Bench) -> BarResult:
    """Measure loops of one process and of ranks, interleaved; then restarts after all ranks were killed."""
    size = SIZES[bench.scale]
    copy = ReferenceCopy(12 * size.parameters)
    step_seconds = STEP_COPIES * min(copy.run() for _ in range(10))
    with bench.scratch("memory-ranks") as folder, ExitStack() as stack:
        teams = {}
        for name, count in ((TOGETHER, RANKS), (MORE, MORE_RANKS)):
            bench.say(f"starting {name}")
            team = TrainingTeam(count, folder / name, size.parameters, step_seconds, size.restart_bytes)
            teams[name] = stack.enter_context(team)
        loop = PlainLoop(size.parameters, step_seconds)
        savers: dict[str, Saver] = {"none": NoSaver()}
        for kind in KINDS:
            saver = MemorySaver(folder / kind, lazy=kind == "lazy")
            stack.enter_context(saver.checkpointer)
            saver.warm_up(loop)
            savers[kind] = saver
        candidates: dict[str, Callable[[], float]] = {}
        for kind, one in savers.items():
            candidates[f"{ALONE}, {kind}"] = lambda one=one: loop.train(size.iterations, one, 1)
            for name, team in teams.items():
                candidates[f"{name}, {kind}"] = lambda team=team, kind=kind: team.train(kind, size.iterations)
        for name in candidates:
            candidates[name]()
        taken = interleave(candidates, size.rounds, tick=bench.say)
        restarts = []
        for number in range(size.restarts):
            bench.say(f"restart {number + 1}/{size.restarts}")
            restarts.append(teams[TOGETHER].restart(f"restart-{number}"))
        nbytes, batch = teams[TOGETHER].nbytes, loop.batch_size
    return _result(size, taken, restarts, nbytes, batch)


def _result(
    size: Size, taken: Mapping[str, list[float]], restarts: Sequence[Mapping[str, float]], nbytes: int, batch: int
) -> BarResult:
    overhead = {
        f"{who}, {kind}": tuple(ratio - 1.0 for ratio in ratios(taken[f"{who}, {kind}"], taken[f"{who}, none"]))
        for who in (ALONE, TOGETHER, MORE)
        for kind in KINDS
    }
    series = [
        Series(f"overhead, {name}, every step", "%", tuple(100 * one for one in found))
        for name, found in overhead.items()
    ]
    for who in (ALONE, TOGETHER, MORE):
        each = tuple(seconds / size.iterations for seconds in taken[f"{who}, none"])
        series.append(Series(f"one step without snapshots, {who}", "s", each))
    for key, name in (
        ("load", "load from memory"),
        ("start", "start of the writers after it"),
        ("fresh", "start in a new folder"),
        ("warm", "load from disk, in the page cache"),
        ("cold", "load from disk, not in the page cache"),
    ):
        series.append(Series(f"restart of {TOGETHER}: {name}", "s", tuple(one[key] for one in restarts)))
    return BarResult(
        "memory-ranks",
        TITLE,
        {
            "loop": f"perceptron with fused Adam, {12 * size.parameters / 1e6:.0f} MB; {size.iterations} steps, "
            f"each as long as {STEP_COPIES:g} copies of the state; {os.cpu_count()} cores",
            ALONE: f"all cores, a batch of {batch}",
            TOGETHER: f"DDP over gloo, {max(1, (os.cpu_count() or 1) // RANKS)} threads each, on this machine; each "
            "keeps half of the state; the slower one counts",
            MORE: "likewise; each keeps a quarter of the state",
            "overhead": "wall time of the loop beyond that of the same processes without snapshots in the same round",
            "restart": f"{nbytes / 1e6:.0f} MB (GPT-2 with Adam) kept for {RANKS} trainers that were killed: `load` "
            "into live tensors on both at once, every byte verified, and `start`, which waits until their writers have "
            "made it durable; then the same snapshot from disk",
        },
        (
            *(
                Check(
                    f"{who}, {kind}, every step: overhead",
                    "%",
                    "at most",
                    OVERHEAD_LIMIT,
                    tuple(100 * one for one in overhead[f"{who}, {kind}"]),
                )
                for who in (TOGETHER, MORE)
                for kind in KINDS
            ),
            Check(
                f"restart of {TOGETHER}: load from memory / from disk (page cache)",
                "x",
                "at most",
                RESTART_LIMIT,
                tuple(one["load"] / one["warm"] for one in restarts),
            ),
        ),
        tuple(series),
        (
            "All ranks together copy the state once, so that the cores of this one machine copy as much as for one "
            "process; with a machine for each rank it would be its share.",
        ),
    )
