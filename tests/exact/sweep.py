"""Kills runs of all trainers at random and compares what they go on to be: `python -m tests.exact.sweep --cells 150`.

A cell is a trainer with a loader, a sampler, hooks, metrics, hidden state, accumulation and ranks, drawn at random. It
runs once uninterrupted and without us, and once in up to four lives: each is killed with SIGKILL at a random moment,
and the next is started with another seed. Every batch, loss, learning rate, evaluation and metric of every life, and
the weights, optimizer and random streams at the end, must be those of the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.exact.parts import Cell
from tests.ranks.launch import Launcher, writers_of
from tests.support.trainers import read

TRAINERS = ("lightning", "accelerate", "transformers", "fabric", "plain")
VERDICTS = ("bitwise", "declared", "silent", "false alarm", "crash", "wrong refusal")
"""Equal; not equal, and the report says the true cause; not equal, and it does not; equal, and the repeated steps were
said to differ; failed; refused to resume."""
BAD = VERDICTS[2:]
LIFE_SECONDS = 120.0
_MOST_DELAY_SECONDS = 0.05

_ORDERED = ("shuffled", "two workers", "kept workers", "drop_last")
_OF_SAMPLERS = ("own generator", "weighted", "rotating", "learning", "batch sampler")
_STREAMS = ("stream", "stateful stream", "augmented stream")
_OF_MODELS = ("none", "counter", "mean", "buffer", "list", "dropout", "random", "numpy", "iterator", "start")
_OF_DATA = ("dataset", "collate")
_EVALUATIONS = (
    "none",
    "per epoch",
    "within",
    "within, kept workers",
    "per epoch, kept workers",
    "within, own generator",
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a cell.

    Args:
        verdict: one of `VERDICTS`.
        detail: where it differs, or what it failed with.
        lives: those that trained something, the last one included.
        declared: what resume reports said was not restored.
        replays: what came of the repeated steps of each life that resumed.
    """

    cell: Cell
    verdict: str
    detail: str
    lives: int
    declared: tuple[str, ...]
    seconds: float
    replays: tuple[str, ...] = ()


def draw(number: int) -> Cell:
    """The cell of this number, always the same one."""
    dice = random.Random(number)
    trainer = TRAINERS[number % len(TRAINERS)]
    ranks = 2 if dice.random() < 0.15 else 1
    loaders: tuple[str, ...] = _ORDERED
    if ranks == 1:
        loaders += _STREAMS[:2] if trainer == "transformers" else (*_OF_SAMPLERS, *_STREAMS)
        loaders += ("stateful loader",) if trainer in ("lightning", "plain") else ()
    hidden: tuple[str, ...] = (*_OF_MODELS, "none", "none")
    hidden += ("callback",) * 2 if trainer in ("lightning", "transformers") else ("local", "carry")
    loader = dice.choice(loaders)
    if "workers" not in loader and loader not in _STREAMS:
        hidden += _OF_DATA
    hooks = ("none", "draw", "clear", "schedule", "start") if trainer == "lightning" else ("none", "draw")
    metrics = {"transformers": ("none",), "lightning": ("none", "mean", "running", "tracker")}
    kills = tuple(
        (dice.uniform(0.1, 0.7), dice.uniform(0, _MOST_DELAY_SECONDS), dice.random() < 0.5)
        for _ in range(dice.choice((2, 2, 3)))
    )
    return Cell(
        number=number,
        trainer=trainer,
        loader=loader,
        evaluation=dice.choice(_EVALUATIONS[:3] if trainer == "transformers" or ranks > 1 else _EVALUATIONS),
        hooks=dice.choice(hooks),
        metric=dice.choice(metrics.get(trainer, ("none", "mean", "running"))),
        hidden=dice.choice(hidden),
        accumulate=dice.choice((1, 1, 2, 3)),
        ranks=ranks,
        every_n_steps=dice.choice((1, 1, 2)),
        writer=dice.choice(("thread", "thread", "process")),
        kills=kills,
    )


# ---- one cell


class Lives:
    """The lives of one cell, in a folder of its own."""

    def __init__(self, cell: Cell, launcher: Launcher, folder: Path) -> None:
        self.cell, self.launcher, self.folder = cell, launcher, folder
        self.root = folder / "run"
        self.traces: list[Path] = []

    def live(self, name: str, kill: tuple[int, float, bool] | None, *, ours: bool = True) -> list[int]:
        """One life; the exit statuses of its ranks.

        Args:
            kill: after so many lines and one snapshot, so many seconds later, with its writers.
        """
        trace = self.folder / name
        # A script seeds itself for its fresh start; once there is a snapshot the seed must not matter.
        seed = 1000 * len(self.traces) if self._snapshots() else 0
        job = {
            "cell": asdict(self.cell),
            "root": str(self.root) if ours else "",
            "trace": str(trace),
            "folder": str(self.folder / f"{name}.out"),
            "seed": seed,
        }
        size, before = self.cell.ranks, self._snapshots()
        pids = self.launcher.start(job, size, self.folder / f"{name}.log", LIFE_SECONDS)
        if ours:
            self.traces.append(trace)
        if kill is not None:
            self._kill(pids, trace, before, *kill)
        return self.launcher.join()

    def _kill(self, pids: list[int], trace: Path, before: set[str], lines: int, delay: float, writers: bool) -> None:
        first = Path(f"{trace}.0")
        deadline = time.monotonic() + LIFE_SECONDS
        while time.monotonic() < deadline and all(_lives(pid) for pid in pids):
            if len(read(first)) >= lines and self._snapshots() - before:
                break
            time.sleep(0.002)
        time.sleep(delay)  # a random moment, also in the middle of a step, a copy or a commit
        for pid in [*pids, *(writers_of(pids) if writers else ())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _snapshots(self) -> set[str]:
        return {path.name for path in (self.root / "snapshots").glob("[!.]*.json")}

    def log(self, name: str) -> str:
        """What the ranks of a life have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}.log.*")))

    def declared(self) -> tuple[str, ...]:
        """What the last resume report says was not restored."""
        return tuple(f"{row['name']}: {row['why']}" for row in self._report().get("not_restored", ()))

    def replay(self) -> str:
        """What came of the steps that the last resume has repeated."""
        found = self._report().get("replay") or {"result": "not asked", "first": None}
        return f"{found['result']} {found['first']}" if found["first"] else str(found["result"])

    def _report(self) -> dict[str, Any]:
        path = self.root / "resume-report.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(cell: Cell, launcher: Launcher, folder: Path) -> Result:
    """The cell's verdict."""
    began = time.monotonic()
    lives = Lives(cell, launcher, folder)
    trained, declared, replays = 0, dict[str, None](), list[str]()

    def result(verdict: str, detail: str = "") -> Result:
        alarms = [one for one in replays if one.startswith("different")]
        if verdict == "bitwise" and alarms:
            verdict, detail = "false alarm", alarms[0]
        return Result(cell, verdict, detail, trained, tuple(declared), time.monotonic() - began, tuple(replays))

    if any(lives.live("whole", None, ours=False)):
        return result("crash", f"without us: {_last_line(lives.log('whole'))}")
    wanted = [read(folder / f"whole.{rank}") for rank in range(cell.ranks)]
    reached = [0] * cell.ranks
    for number, kill in enumerate([*cell.kills, None]):
        name = f"life{number}"
        lines = None if kill is None else (1 + int((len(wanted[0]) - reached[0]) * kill[0]), *kill[1:])
        statuses = lives.live(name, lines)
        declared |= dict.fromkeys(lives.declared())
        replays.append(lives.replay())
        log = lives.log(name)
        if any(status not in (0, -signal.SIGKILL) for status in statuses) or (kill is None and any(statuses)):
            line = _last_line(log)
            return result("wrong refusal" if re.search(r"\[?CKPT\d", line) else "crash", f"life {number}: {line}")
        done = [read(folder / f"{name}.{rank}") for rank in range(cell.ranks)]
        trained += any(done)
        for rank in range(cell.ranks):
            where = _differs(done[rank], wanted[rank], reached[rank])
            if where:
                known = [cause for cause in cell.causes if any(cause in one for one in declared)]
                return result("declared" if known else "silent", f"life {number}, rank {rank}: {where}")
            if done[rank]:
                reached[rank] = max(reached[rank], wanted[rank].index(done[rank][0]) + len(done[rank]))
        if reached == list(map(len, wanted)):
            break
    whole = reached == list(map(len, wanted))
    return result("bitwise" if whole else "silent", "" if whole else f"ended after {reached} of {len(wanted[0])} lines")


def _differs(done: Sequence[str], wanted: Sequence[str], reached: int) -> str:
    """Where a life is not the uninterrupted run; empty: nowhere."""
    if not done:
        return ""
    if done[0] not in wanted:
        return f"it goes on with {done[0][:160]}"
    start = wanted.index(done[0])
    if start > reached:
        return f"it skips from line {reached} to line {start}"
    for offset, line in enumerate(done):
        expected = wanted[start + offset] if start + offset < len(wanted) else "nothing"
        if line != expected:
            return f"line {start + offset} is {_short(line, expected)}"
    return ""


def _short(line: str, expected: str) -> str:
    if line.startswith("('digest'") and expected.startswith("('digest'"):
        rows = [dict(re.findall(r"'(\w+)': '(\w+)'", one)) for one in (line, expected)]
        return f"another digest of {', '.join(key for key in rows[0] if rows[0][key] != rows[1].get(key))}"
    return f"{line[:160]}, not {expected[:160]}"


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (lines or log.splitlines() or ["nothing was said"])[-1][:400]


# ---- all cells


class Sweep:
    """Runs cells, some at a time, each thread with a launcher of its own, which pays for the imports once.

    Args:
        folder: for everything that cells leave; those that end well are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = threading.local()
        self._launchers: list[Launcher] = []

    def results(self, cells: Iterable[Cell], jobs: int) -> Iterator[Result]:
        """As they come."""
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(self.one, cell) for cell in cells]):
                yield future.result()

    def one(self, cell: Cell) -> Result:
        if not hasattr(self._own, "launcher"):
            self._own.launcher = Launcher("tests.exact.loops")
            self._launchers.append(self._own.launcher)
        folder = self._folder / str(cell.number)
        folder.mkdir(parents=True)
        found = run(cell, self._own.launcher, folder)
        if found.verdict not in BAD:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.close()


def table(results: Sequence[Result]) -> str:
    """Verdicts by trainer, and each cell that is not bitwise."""
    lines = ["".join(f"{name:>14}" for name in ("", *VERDICTS))]
    for trainer in TRAINERS:
        counts = Counter(one.verdict for one in results if one.cell.trainer == trainer)
        lines.append(f"{trainer:>14}" + "".join(f"{counts[verdict]:>14}" for verdict in VERDICTS))
    counts = Counter(one.verdict for one in results)
    lines.append(f"{'all':>14}" + "".join(f"{counts[verdict]:>14}" for verdict in VERDICTS))
    lines.append(f"{sum(one.lives for one in results)} lives that trained; {len(results)} cells")
    proofs = Counter(replay.partition(" {")[0] for one in results for replay in one.replays)
    lines.append("repeated steps: " + ", ".join(f"{count} {name}" for name, count in sorted(proofs.items())))
    for one in sorted(results, key=lambda result: (VERDICTS.index(result.verdict), result.cell.number)):
        if one.verdict == "bitwise":
            continue
        lines += [f"{one.verdict}: {one.cell}", f"    {one.detail}"]
        lines += [f"    named: {row[:200]}" for row in one.declared]
        lines += [f"    repeated: {one.replays}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a cell is silent, crashes or is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=150)
    parser.add_argument("--first", type=int, default=0, help="number of the first cell")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, help="steps between snapshots, in the place of those drawn")
    parser.add_argument("--folder", type=Path, help="where cells that end badly leave their logs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ckpt-sweep-"))
    numbers = options.only if options.only else range(options.first, options.first + options.cells)
    results: list[Result] = []
    sweep = Sweep(folder)
    try:
        cells = [draw(number) for number in numbers]
        if options.every:
            cells = [replace(cell, every_n_steps=options.every) for cell in cells]
        for one in sweep.results(cells, options.jobs):
            results.append(one)
            print(f"[{len(results)}/{len(numbers)}] {one.verdict}, {one.seconds:.0f} s: {one.cell}", file=sys.stderr)
    finally:
        sweep.close()
    print(json.dumps([asdict(one) for one in results], indent=1) if options.json else table(results))
    bad: list[Any] = [one for one in results if one.verdict in BAD]
    if bad:
        print(f"their logs are in {folder}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
