"""CheckFreq (Mohan et al., FAST 2021): algorithm, pipelining, interference, failures and iterator, on this engine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.crew import PATIENCE_SECONDS
from benchmarks.measure import interleave, timed
from benchmarks.peers import TorchSave
from benchmarks.plain_loop import EngineSaver, NoSaver, PeerSaver, Saver
from benchmarks.run import Bench, Scale
from benchmarks.studies import interrupted
from benchmarks.studies.emulated import (
    AdaptiveRun,
    Shapes,
    SleepingLoop,
    momentum_state,
    resnet18,
    resnet50,
)
from benchmarks.values import BarResult, Check, Grid, Series
from benchmarks.workloads import state_bytes
from ckpt_engine.frequency.policy import AdaptivePolicy, Costs, FrequencySettings
from ckpt_engine.observe.events import PROCESS

TITLE = "CheckFreq (FAST 2021): algorithm, pipelining, interference, recovery, iterator"
BUDGET = 0.035
INTERFERED_BUDGET = 0.05
STATIC = 14
"""Iterations between two snapshots in CheckFreq's Table 5."""
PERSISTS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        windows, pipelined_windows: snapshots of one run. What a pipelined run waits for at its end counts, which few
            snapshots would make the most of.
    """

    models: Mapping[str, tuple[Callable[[], Shapes], float]]
    rounds: int
    windows: int
    pipelined_windows: int
    interrupted: interrupted.Size


def _tiny() -> Shapes:
    return [(64, 64)] * 4


MODELS = {"ResNet18": (resnet18, 0.05), "ResNet50": (resnet50, 0.1)}
"""With seconds of one step."""
SIZES = {
    Scale.FULL: Size(MODELS, 3, 4, 40, interrupted.FULL),
    Scale.QUICK: Size({"ResNet50": MODELS["ResNet50"]}, 1, 4, 40, interrupted.QUICK),
    Scale.TINY: Size({"ResNet50": (_tiny, 0.002)}, 1, 2, 2, interrupted.TINY),
}
PUBLISHED_SYNCHRONOUS = {"ResNet18": "35 %", "ResNet50": "24 %"}
"""Read off figure 7."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What CheckFreq measures, in its symbols: seconds, and bytes in any one unit."""

    Ti: float
    Tw: float
    Tc: float
    Tg: float
    Ts: float
    m: float
    M: float
    Mmax: float


def algorithm_1(one: Profile, p: float) -> tuple[int, str]:
    """The interval in iterations, and where the snapshot is copied first: Algorithm 1 as printed."""
    on_cpu = max(0.0, one.Tc - (one.Ti - one.Tw))
    gpu = one.Mmax - one.M > one.m and one.Tg <= on_cpu
    overhead = one.Tg if gpu else on_cpu
    k = (one.Tc + one.Ts - overhead) / one.Ti
    return max(math.ceil(k), math.ceil(overhead / (p * one.Ti)), 1), "GPU" if gpu else "CPU"


GOLDEN = (
    (Profile(1, 0.1, 3, 0.2, 10, 1, 10, 80), 0.035, (13, "GPU")),
    (Profile(1, 0.1, 3, 0.2, 10, 1, 79.5, 80), 0.035, (60, "CPU")),
    (Profile(1, 0.1, 0.5, 0.2, 4, 1, 10, 80), 0.035, (5, "CPU")),
    (Profile(0.2, 0.02, 0.15, 0.01, 0.05, 1, 10, 80), 0.05, (1, "CPU")),
)
"""Worked by hand from the printed algorithm."""


def run(bench: Bench) -> BarResult:
    """Each part in turn."""
    size = SIZES[bench.scale]
    with bench.scratch("checkfreq") as folder:
        pipelined, check = _pipelined(folder, size, bench)
        interference, checks = _interference(folder, size, bench)
        recovery, plot, recovered = interrupted.recovery(folder, size.interrupted, bench)
        iterator, accuracies = interrupted.iterator(folder, size.interrupted, bench)
    return BarResult(
        "study-checkfreq",
        TITLE,
        {
            "training": "steps sleep, as a host does whose accelerator computes; every element of the state changes "
            "from snapshot to snapshot. Weights and momentum of the real models, 8 bytes a parameter",
            "published": "on GPUs: what travels are ratios. “?”: not published, or not found",
            "synchronous": "torch.save and fsync",
            "pipelined": "the engine. Host memory is copied before `save` returns, whatever `lazy` says (only copies "
            "from a device go on while the next step computes), persisted meanwhile; waiting where a slot is busy",
            "interference": "a process that writes to the same disk all the time, past the page cache",
            "recovery": interrupted.CONDITIONS,
        },
        (*_golden_checks(), check, *checks, *recovered),
        accuracies,
        (
            "Table 5 has one interfering job on a GPU server; here another process takes the disk, and how much it "
            "takes is no choice of ours: the persist with it is shown.",
        ),
        (_golden(), pipelined, interference, recovery, iterator),
        (plot,),
    )


def _golden_checks() -> Iterator[Check]:
    right = tuple(float(algorithm_1(one, p) == expected) for one, p, expected in GOLDEN)
    yield Check("Algorithm 1: profiles with the golden interval and place", "of 4", "at least", 4, (sum(right),))


def _golden() -> Grid:
    """Beside it what this project decides from the same costs: failures are rare, so the budget and the writer do."""
    rows = []
    for one, p, expected in GOLDEN:
        k, mode = algorithm_1(one, p)
        overhead = one.Tg if mode == "GPU" else max(0.0, one.Tc - (one.Ti - one.Tw))
        costs = Costs(step_seconds=one.Ti, stall_seconds=overhead, latency_seconds=one.Tc + one.Ts - overhead)
        often = AdaptivePolicy(FrequencySettings(overhead=p)).decide(costs, {PROCESS: 1.0}).interval_steps
        symbols = ", ".join(f"{name} {getattr(one, name):g}" for name in ("Ti", "Tw", "Tc", "Tg", "Ts", "M"))
        rows.append((symbols, f"{p:.1%}", f"{expected[0]} {expected[1]}", f"{k} {mode}", str(often)))
    columns = ("profile (m 1, Mmax 80)", "budget", "by hand", "Algorithm 1", "this engine's least interval")
    return Grid("Algorithm 1, in iterations", columns, tuple(rows))


def _pipelined(folder: Path, size: Size, bench: Bench) -> tuple[Grid, Check]:
    """Synchronous against pipelined, at the interval that Algorithm 1 gives for the pipelined one at 3.5 %."""
    rows, all_of_them = [], list[float]()
    for model, (shapes, step_seconds) in size.models.items():
        bench.say(f"pipelined: {model}")
        state = momentum_state(shapes())
        loop, where = SleepingLoop(state, step_seconds), folder / model
        with ExitStack() as stack:
            engine = EngineSaver(where / "engine", lazy=True)
            stack.enter_context(engine.checkpointer)
            copy, persist = _persist_seconds(engine, loop)
            k, _ = algorithm_1(Profile(step_seconds, 0.0, copy, copy, persist, 1, 0, 0), BUDGET)
            savers = {"none": NoSaver(), "synchronous": PeerSaver(TorchSave(where / "torch")), "pipelined": engine}
            taken = _interleaved(loop, savers, k * size.pipelined_windows, k, size.rounds, bench)
        shares = {name: [100 * (a / b - 1) for a, b in zip(taken[name], taken["none"], strict=True)] for name in taken}
        all_of_them += shares["pipelined"]
        rows.append(
            (
                model,
                f"{state_bytes(state) / 1e6:.0f} MB",
                f"{step_seconds * 1e3:.0f} ms",
                f"{copy:.3f} + {persist:.2f} s",
                str(k),
                _spread(shares["synchronous"]),
                PUBLISHED_SYNCHRONOUS.get(model, "?"),
                _spread(shares["pipelined"]),
                f"{100 * copy / (k * step_seconds):.1f} %",
                "2 to 3.3 %",
            )
        )
    columns = (
        "model",
        "state",
        "step",
        "copy + persist",
        "every",
        "synchronous",
        "published",
        "pipelined",
        "of that, the copy",
        "published ",
    )
    grid = Grid("Overhead of synchronous and of pipelined snapshots (CheckFreq, figure 7)", columns, tuple(rows))
    return grid, Check("pipelined snapshots of all models: overhead", "%", "at most", 100 * BUDGET, tuple(all_of_them))


def _interleaved(
    loop: SleepingLoop, savers: Mapping[str, Saver], steps: int, every: int, rounds: int, bench: Bench
) -> dict[str, list[float]]:
    def train(saver: Saver) -> float:
        seconds = loop.train(steps, saver, every)
        saver.finish()
        return seconds

    return interleave({n: lambda one=one: train(one) for n, one in savers.items()}, rounds, tick=bench.say)


def _persist_seconds(saver: EngineSaver, loop: SleepingLoop) -> tuple[float, float]:
    """To copy, and from there until durable: the medians of several snapshots, after the first."""

    def once(number: int) -> tuple[float, float]:
        state = loop.state(number)
        copy = timed(lambda: (saver.save(state, number), saver.before_update()))
        return copy, timed(saver.finish)

    once(0)
    copies, persists = zip(*(once(number + 1) for number in range(PERSISTS)), strict=True)
    return median(copies), median(persists)


def _spread(samples: list[float]) -> str:
    one = Series("", "%", tuple(samples))
    return f"{one.median:.1f} % ({one.low:.1f} to {one.high:.1f})"


def _interference(folder: Path, size: Size, bench: Bench) -> tuple[Grid, list[Check]]:
    """Table 5: a static interval that suits the job alone, and the adaptive one, while another job uses the disk."""
    shapes, _ = next(iter(size.models.values()))
    loop = SleepingLoop(momentum_state(shapes()), 0.0)
    with ExitStack() as stack:
        engine = EngineSaver(folder / "static", lazy=True)
        stack.enter_context(engine.checkpointer)
        persists = {"alone": _persist_seconds(engine, loop)[1]}
        loop.step_seconds = persists["alone"] / STATIC
        with _neighbour(folder):
            persists["with it"] = _persist_seconds(engine, loop)[1]
        static, intervals = dict[str, list[float]](), dict[str, list[float]]()
        adaptive = dict[str, list[float]]()
        for number in range(size.rounds):
            bench.say(f"interference: round {number + 1}")
            base = loop.train(STATIC * size.windows, NoSaver(), STATIC) / (STATIC * size.windows)
            for name in ("alone", "with it"):
                with ExitStack() as around:
                    if name == "with it":
                        around.enter_context(_neighbour(folder))
                    seconds = loop.train(STATIC * size.windows, engine, STATIC) / (STATIC * size.windows)
                    engine.finish()
                    run = AdaptiveRun(engine.checkpointer, INTERFERED_BUDGET)
                    found = run.train(loop, loop.number + 8 * STATIC * size.windows, loop.number)
                    engine.checkpointer.wait(PATIENCE_SECONDS)
                static.setdefault(name, []).append(100 * (seconds / base - 1))
                adaptive.setdefault(name, []).append(100 * (found.seconds / found.steps / base - 1))
                intervals.setdefault(name, []).append(found.interval_steps)
    rows = (
        ("static, alone", str(STATIC), _spread(static["alone"]), "14", "5 %"),
        ("static, with another job", str(STATIC), _spread(static["with it"]), "14", "35 %"),
        (
            "adaptive, with another job",
            f"{median(intervals['with it']):.0f}",
            _spread(adaptive["with it"]),
            "19",
            "5 %",
        ),
        ("adaptive, alone", f"{median(intervals['alone']):.0f}", _spread(adaptive["alone"]), "14", "5 %"),
    )
    columns = ("", "every", "overhead", "published: every", "published: overhead")
    grid = Grid(
        f"Interference (CheckFreq, Table 5). Persist {persists['alone']:.2f} s alone, {persists['with it']:.2f} s with "
        f"another job; a step is a {STATIC}th of the former",
        columns,
        rows,
    )
    limit = 100 * INTERFERED_BUDGET
    return grid, [
        Check(f"adaptive interval, {name}: overhead", "%", "at most", limit, tuple(samples))
        for name, samples in adaptive.items()
    ]


@contextmanager
def _neighbour(folder: Path) -> Iterator[None]:
    """Another job: it writes to the disk as long as this lasts."""
    file = folder / "neighbour"
    command = f"while :; do dd if=/dev/zero of='{file}' bs=4M count=64 oflag=direct 2>/dev/null; done"
    with subprocess.Popen(["sh", "-c", command], start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
