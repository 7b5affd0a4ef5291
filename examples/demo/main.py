"""The command line of the demo."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from demo.compare import compare_runs
from demo.plot import draw
from demo.process import TrainingFailedError
from demo.result import Result
from demo.runs import measure_overhead, run_killed, run_reference
from demo.s3 import Remote, serving
from demo.screen import Screen
from demo.settings import EXAMPLES, Settings, claim

DIFFERENT, FAILED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status: 0 if the killed run is identical to the reference run, 1 if not, 2 if a run failed.
    """
    settings, as_json = _settings(arguments)
    console = Console(stderr=as_json)
    try:
        claim(settings.out)
        result = _run(settings, Screen(console))
    except (TrainingFailedError, FileExistsError) as err:
        console.print(f"[bold red]the demo could not be run:[/] {err}", highlight=False)
        return FAILED
    result.show(console)
    picture = settings.out / "demo.png"
    draw(settings.out, result.reference, result.killed, identical=result.compared.identical)
    numbers = json.dumps(result.to_json() | {"plot": str(picture)}, indent=2)
    (settings.out / "result.json").write_text(numbers + "\n")
    if as_json:
        print(numbers)
    console.print(
        f"\nplot: {picture}\nnumbers: {settings.out / 'result.json'}\nsnapshots: ckpt ls {settings.snapshots}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"{result.seconds:.0f} s in all", style="dim", highlight=False)
    return 0 if result.compared.identical else DIFFERENT


def _run(settings: Settings, screen: Screen) -> Result:
    with ExitStack() as stack:
        remote = stack.enter_context(serving(settings.out / "s3.log")) if settings.tier else None
        return _run_all(settings, screen, remote)


def _run_all(settings: Settings, screen: Screen, remote: Remote | None) -> Result:
    began = time.monotonic()
    settings.yaml.write_text(settings.yaml_text(remote))
    screen.say(
        f"A byte-level transformer learns Python's standard library: {settings.steps} steps, "
        f"{settings.steps / settings.epoch_batches:g} epochs, seed {settings.seed}."
    )
    if remote is not None:
        screen.say(f"Snapshots go to {settings.snapshots} and from there to {remote.url}, a server on this machine.")
    with screen.part("uninterrupted run", settings.steps):
        reference = run_reference(settings, screen)
    with screen.part("killed run", settings.steps):
        killed = run_killed(settings, screen, remote)
    overhead = None
    if settings.pairs:
        with screen.part("overhead", 2 * settings.pairs):
            overhead = measure_overhead(settings, screen)
    compared = compare_runs(settings.reference, settings.killed, settings.steps)
    return Result(settings, reference, killed, compared, overhead, time.monotonic() - began)


def options() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="Trains a model, kills the training with kill -9 while it saves, resumes it, and compares the "
        "result bit for bit with a training that was never interrupted.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the moments to kill at")
    parser.add_argument("--out", type=Path, default=EXAMPLES.parent / "demo-out", help="folder for everything it makes")
    parser.add_argument("--kills", type=int, help="how often the run is killed (default 2; with --quick 1)")
    parser.add_argument("--overhead", help="budget, a share of training time (default 1%%; with --quick 10%%)")
    parser.add_argument("--max-lost-work", help="work a crash may cost at worst (default 5 s; with --quick 0.5 s)")
    parser.add_argument(
        "--pairs", type=int, default=0, help="measure the overhead in so many pairs of trainings, 5 or more"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch in every training")
    parser.add_argument(
        "--tier", choices=["s3"], help="a second tier, on a server that the demo starts; the local folder is then lost"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    parser.add_argument("--json", action="store_true", help="the numbers on standard output, the rest on stderr")
    parser.add_argument(
        "--flip-bit-at",
        type=int,
        metavar="STEP",
        help="flip one bit of one weight of the killed run at this step: the demo must notice",
    )
    return parser


def _settings(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    args = options().parse_args(arguments if arguments is not None else sys.argv[1:])
    size = (48, 16, 128, 12) if args.quick else (96, 32, 256, 40)
    steps, epoch_batches, width, pair_steps = size
    settings = Settings(
        out=args.out.absolute(),
        seed=args.seed,
        kills=args.kills if args.kills is not None else (1 if args.quick else 2),
        steps=steps,
        epoch_batches=epoch_batches,
        width=width,
        threads=args.threads,
        budget=args.overhead or ("10%" if args.quick else "1%"),
        max_lost_work=args.max_lost_work or ("0.5 s" if args.quick else "5 s"),
        pairs=args.pairs,
        pair_steps=pair_steps,
        flip_bit_at=args.flip_bit_at,
        tier=args.tier,
    )
    return settings, args.json
