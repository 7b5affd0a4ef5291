"""Eight ranks of one machine have a writer each: what those take together, beside the one of a single rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.measure import children, interleave, started_since
from benchmarks.run import Bench, Scale
from benchmarks.team import Team
from benchmarks.values import BarResult, Check, Series, ratios
from tests.servers.s3 import serving
from tests.servers.wire import Wire

TITLE = "Writers of one machine: what eight take, beside one"
MANY = 8
PROGRAM = "ckpt_engine/writer/__main__.py"
MEMORY_LIMIT, IDLE_LIMIT, REQUESTS_LIMIT, DURABLE_LIMIT = 60.0, 0.5, 1.5, 1.25


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        nbytes: of the state, whatever the number of ranks.
        idle_seconds: how long nothing is saved.
    """

    nbytes: int
    rounds: int
    idle_seconds: float


SIZES = {
    Scale.FULL: Size(400_000_000, 7, 30.0),
    Scale.QUICK: Size(400_000_000, 3, 10.0),
    Scale.TINY: Size(4_000_000, 1, 1.0),
}


@dataclass(frozen=True, slots=True)
class Idle:
    """What all writers of a team have while nothing is saved: private bytes are those that no other process shares."""

    writers: int
    private_bytes: float
    threads: float
    files: float
    processor_share: float


def run(bench: Bench) -> BarResult:
    """Teams of one and of eight ranks, on a disk and on S3."""
    size = SIZES[bench.scale]
    with bench.scratch("node") as folder:
        idle, saves = _on_disk(size, folder, bench)
        requests = {count: _on_s3(size, folder / f"s3-{count}", count, bench) for count in (1, MANY)}
    one, many = idle[1], idle[MANY]
    per_minute = {count: found["idle"] * 60.0 / size.idle_seconds for count, found in requests.items()}
    return BarResult(
        "node",
        TITLE,
        {
            "state": f"{size.nbytes / 1e6:.0f} MB (GPT-2 with Adam), shared out among the ranks; every element changes",
            "ranks": f"1 and {MANY} processes with gloo on {os.cpu_count()} cores, one thread of torch each",
            "idle": f"nothing is saved for {size.idle_seconds:g} s; shares of one core",
            "S3": "moto behind a proxy that counts requests",
        },
        (
            Check(
                "private memory of a writer", "MB", "at most", MEMORY_LIMIT, (many.private_bytes / many.writers / 1e6,)
            ),
            Check(f"{MANY} idle writers: share of one core", "%", "at most", IDLE_LIMIT, (100 * many.processor_share,)),
            Check(
                f"requests of an idle minute, {MANY} ranks / 1",
                "x",
                "at most",
                REQUESTS_LIMIT,
                (per_minute[MANY] / max(1.0, per_minute[1]),),
            ),
            Check(
                f"durable, {MANY} ranks at once / 1",
                "x",
                "at most",
                DURABLE_LIMIT,
                ratios(saves[MANY], saves[1]),
            ),
        ),
        tuple(
            Series(f"{what}, {count} ranks" if count > 1 else f"{what}, 1 rank", unit, (value,))
            for count, each in ((1, one), (MANY, many))
            for what, unit, value in (
                ("writers", "", float(each.writers)),
                ("private memory of all writers", "MB", each.private_bytes / 1e6),
                ("threads of all writers", "", each.threads),
                ("open files of all writers", "", each.files),
                ("processor time of idle writers", "%", 100 * each.processor_share),
                ("requests of an idle minute", "", per_minute[count]),
                ("requests of a snapshot", "", requests[count]["snapshot"]),
            )
        )
        + tuple(Series(f"durable, {count} ranks", "s", saves[count], "slowest rank") for count in (1, MANY)),
    )


def _on_disk(size: Size, folder: Path, bench: Bench) -> tuple[Mapping[int, Idle], Mapping[int, tuple[float, ...]]]:
    idle: dict[int, Idle] = {}
    with ExitStack() as stack:
        teams = {}
        for count in (1, MANY):
            bench.say(f"starting {count} ranks")
            before = children()
            teams[count] = stack.enter_context(Team(count, folder / str(count), size.nbytes))
            teams[count].together()
            bench.say(f"{count} idle writers")
            writers = _writers(before)
            if len(writers) != count:
                raise RuntimeError(f"{count} ranks have {len(writers)} writers")
            idle[count] = _idle(writers, size.idle_seconds)
        taken = interleave(
            {
                str(count): lambda team=team: max(one["save"] for one in team.together())
                for count, team in teams.items()
            },
            size.rounds,
            tick=bench.say,
        )
    return idle, {count: tuple(taken[str(count)]) for count in teams}


def _on_s3(size: Size, folder: Path, count: int, bench: Bench) -> Mapping[str, float]:
    """Requests while nothing is saved, and of a snapshot."""
    folder.mkdir()
    with serving("moto", folder) as server, Wire("127.0.0.1", int(server.url.rpartition(":")[2])) as wire:
        server.make_bucket("node")
        with (
            mock.patch.dict(os.environ, {**server.environment(), "AWS_ENDPOINT_URL": wire.url}),
            Team(count, "s3://node/run", size.nbytes // 10) as team,
        ):
            team.together()
            bench.say(f"counting the requests of {count} ranks")
            wire.log.clear()
            time.sleep(size.idle_seconds)
            idle = len(wire.log)
            wire.log.clear()
            team.together()
            return {"idle": float(idle), "snapshot": float(len(wire.log))}


def _writers(before: set[psutil.Process]) -> list[psutil.Process]:
    return [one for one in started_since(before) if any(word.endswith(PROGRAM) for word in one.cmdline())]


def _idle(writers: list[psutil.Process], seconds: float) -> Idle:
    began, used = time.perf_counter(), sum(sum(one.cpu_times()[:2]) for one in writers)
    time.sleep(seconds)
    spent, passed = sum(sum(one.cpu_times()[:2]) for one in writers) - used, time.perf_counter() - began
    return Idle(
        len(writers),
        float(sum(one.memory_full_info().uss for one in writers)),
        float(sum(one.num_threads() for one in writers)),
        float(sum(one.num_fds() for one in writers)),
        spent / passed,
    )
