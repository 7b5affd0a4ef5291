"""The fault campaign: `python -m tests.faults.campaign --runs 312 --seed 1 --json out.jsonl`.

Each run trains a small model with snapshots on one or two tiers, lets one thing fail at a random moment, and checks
that nothing acknowledged is lost, that whatever is listed can be loaded bit for bit, that files of others are left
alone, and that the next training goes on. The same seed draws the same runs; the operating system decides how
threads and processes interleave.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ckpt_engine.store.storage import TRANSPORTS
from tests.faults.draws import FAULTS, PHASES, Draw, draws
from tests.faults.life import start_fork_server
from tests.faults.run import Outcome, Run, site
from tests.servers.s3 import program, rclone

BAR_RATIO = 3.0


def campaign(
    todo: Sequence[Draw],
    kind: str,
    folder: Path,
    *,
    jobs: int = 1,
    sabotage: str = "",
    transport: str = TRANSPORTS[0],
    tell: Callable[[Outcome], object] = lambda one: None,
) -> list[Outcome]:
    """Play all runs, `jobs` at a time, each with a server of its own."""
    start_fork_server()
    waiting: SimpleQueue[Draw] = SimpleQueue()
    for one in todo:
        waiting.put(one)

    def work(number: int) -> list[Outcome]:
        done = []
        own = folder / f"job-{number}"
        own.mkdir()
        with site(kind, own, transport) as where:
            while True:
                try:
                    draw = waiting.get_nowait()
                except Empty:
                    return done
                done.append(Run(draw, where, sabotage).play())
                tell(done[-1])

    with ThreadPoolExecutor(jobs) as pool:
        return sorted((one for part in pool.map(work, range(jobs)) for one in part), key=lambda one: one.draw.number)


def table(outcomes: Iterable[Outcome]) -> str:
    """Fault by phase: runs (of them struck), bad, lost, worst ratio of a step because of a tier."""
    found = list(outcomes)
    lines = ["fault          " + "".join(f"{phase:>26}" for phase in PHASES), "               " + _HEAD * len(PHASES)]
    for fault in [one for one in FAULTS if any(o.draw.fault == one for o in found)]:
        cells = [[o for o in found if (o.draw.fault, o.draw.phase) == (fault, phase)] for phase in PHASES]
        lines.append(f"{fault:<15}" + "".join(map(_cell, cells)))
    lines.append(f"{'all':<15}" + "".join(_cell([o for o in found if o.draw.phase == phase]) for phase in PHASES))
    bad, lost = sum(bool(o.bad) for o in found), sum(bool(o.lost) for o in found)
    over = sum(o.tier_ratio > BAR_RATIO for o in found)
    calm = sum(o.calm_ratio > BAR_RATIO for o in found)
    lines += [
        "",
        f"{len(found)} runs, the fault struck in {sum(o.struck > 0 for o in found)}: "
        f"{bad} with a bad state, {lost} with a lost snapshot",
        f"a wait in the checkpointer made a step longer than {BAR_RATIO:g} medians in {over} runs during the fault "
        f"(in {calm} runs outside of it)",
    ]
    return "\n".join(lines)


_HEAD = f"{'runs struck bad lost ratio':>26}"


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return f"{'-':>26}"
    struck, bad, lost = (sum(bool(getattr(o, name)) for o in outcomes) for name in ("struck", "bad", "lost"))
    return f"{len(outcomes):>4} {struck:>6} {bad:>3} {lost:>4} {max(o.tier_ratio for o in outcomes):>5.1f}".rjust(26)


def say(outcome: Outcome) -> None:
    """A line for a run, and what was wrong."""
    draw = outcome.draw
    wrong = [*outcome.bad, *outcome.lost]
    print(
        f"{'WRONG' if wrong else 'ok':<5} {draw.name}, tiers {'+'.join(draw.tiers)}, {draw.ending}: struck "
        f"{outcome.struck}, step {outcome.median_seconds * 1e3:.1f} ms, worst {outcome.worst_ratio:.1f}, by a tier "
        f"{outcome.tier_ratio:.1f}, calm {outcome.calm_ratio:.1f}; {outcome.seconds:.1f} s",
        flush=True,
    )
    for line in wrong:
        print(f"      {line}", flush=True)


class Rows:
    """Outcomes as lines of JSON, written as they come, so that an interrupted campaign can be continued.

    Args:
        path: may exist; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.outcomes: list[Outcome] = []
        if path is not None and path.exists():
            self.outcomes = [_outcome(json.loads(line)) for line in path.read_text().splitlines()]

    def add(self, outcome: Outcome) -> None:
        """Keep it, and say it."""
        with self._lock:
            self.outcomes.append(outcome)
            say(outcome)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")


def _outcome(row: dict[str, Any]) -> Outcome:
    draw = Draw(**{**row["draw"], "tiers": tuple(row["draw"]["tiers"])})
    return Outcome(**{**row, "draw": draw, "bad": tuple(row["bad"]), "lost": tuple(row["lost"])})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=312)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; 1 to measure steps")
    parser.add_argument("--server", choices=["moto", "rclone"], default="rclone", help="moto forgets when it is killed")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="of trainings")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this one")
    parser.add_argument("--phase", choices=PHASES, action="append", help="only this one")
    parser.add_argument("--only", type=int, action="append", help="of all runs only the one with this number")
    parser.add_argument("--json", type=Path, help="file of outcomes, a line each; those that are in it are not played")
    args = parser.parse_args(arguments)
    program("moto_server") if args.server == "moto" else rclone()
    faults = args.fault or [one for one in FAULTS if args.server != "moto" or one != "server_killed"]
    todo = draws(args.runs, args.seed, faults=faults, phases=args.phase or PHASES)
    rows = Rows(args.json)
    known = {one.draw for one in rows.outcomes}
    todo = [one for one in todo if one not in known and (args.only is None or one.number in args.only)]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        campaign(todo, args.server, Path(folder), jobs=args.jobs, transport=args.transport, tell=rows.add)
    print(table(rows.outcomes))
    return int(any(one.bad or one.lost for one in rows.outcomes))


if __name__ == "__main__":
    sys.exit(main())
