"""`ckpt plan`: how much work of a run would be of use, simulated with the policy that trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import click

from ckpt_engine.cli.output import bar, json_option, print_json, print_table, print_text, showing
from ckpt_engine.cli.root import find_root, options_of, storage_options
from ckpt_engine.config import load_config
from ckpt_engine.frequency.policy import Costs
from ckpt_engine.observe import units
from ckpt_engine.observe.events import MACHINE, PROCESS
from ckpt_engine.observe.units import count
from ckpt_engine.tools.failure_plan import FailurePlan, failures_of
from ckpt_engine.tools.plan_runs import RESTART, PlannedRun, costs_of, jobs_of, planned_run, restart_of, simulate
from ckpt_engine.tools.rules import rule_of
from ckpt_engine.tools.simulate import Restart
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.writer.attempts import read_attempts


@click.command("plan", short_help="Simulate the goodput of a run.")
@click.argument("root", required=False)
@click.option("--failures", default="", metavar="WHAT", help="llama3, rsc:GPUS, spot, weibull:SHAPE,SCALE, or a file.")
@click.option(
    "--compare",
    default="daly,checkfreq,30min",
    show_default=True,
    metavar="RULES",
    help="Policies to compare with the engine's own.",
)
@click.option(
    "--days", type=click.FloatRange(0.1, 3650.0), help="Days to simulate (default: 30, fewer if that takes long)."
)
@storage_options
@json_option
def command(root: str | None, failures: str, compare: str, days: float | None, as_json: bool) -> None:
    """Simulate a run of the options in ckpt.yaml, or of the run at ROOT, with failures, and compare policies.

    What snapshots cost is taken from the run where it has measured that. RULES are daly, checkfreq, durations, and
    package.module:name for your own, see docs/frequency.md.
    """
    root = root or find_root()
    config = options_of(root) if root else load_config({"tiers": ["."]})
    rows = read_attempts(repository_of(config.tiers[0]).storage).attempts if root else ()
    costs, memory, measured = costs_of(rows)
    wanted = failures_of(failures, rows)
    rules = {name: rule_of(name) for name in filter(None, (one.strip() for one in compare.split(",")))}
    restart = restart_of(rows)
    jobs = jobs_of(config, costs, memory, restart, wanted.per_second, rules)
    ended, found, left = simulate(jobs, wanted, days, partial(showing, hidden=True))
    planned = [planned_run(name, job, costs) for name, job in found.items()]
    if as_json:
        made = {"days": ended, "failures": wanted.source, "measured": measured, "costs": costs, "left_out": left}
        print_json({**made, "restart": restart, "policies": planned})
    else:
        _print(planned, wanted, costs, restart, measured, ended)
        for name in left:
            print_text(f"{name} is left out: it takes too many snapshots in that time; --days simulates it as well")


def _print(
    found: Sequence[PlannedRun],
    wanted: FailurePlan,
    costs: Costs,
    restart: Restart,
    measured: bool,
    days: float,
) -> None:
    said = "as this run has measured" if measured else "assumed: nothing was measured"
    print_text(f"failures   {wanted.source}")
    print_text(
        f"snapshots  stall {units.duration(costs.stall_seconds)}, slowdown {units.duration(costs.slowdown_seconds)}, "
        f"durable in {units.duration(costs.latency_seconds)}, {units.size(costs.written_bytes)}"
    )
    print_text(f"           steps of {units.duration(costs.step_seconds)}; {said}")
    process, machine = (restart.down[one] + restart.startup + restart.restore for one in (PROCESS, MACHINE))
    said = "assumed" if restart == RESTART else "as in this run"
    print_text(
        f"restarts   {units.duration(process)} after a process, {units.duration(machine)} after a machine ({said})", ""
    )
    most = max(1.0 - one.goodput for one in found)
    rows = [
        (
            one.name,
            units.percent(one.goodput),
            *("-" if seconds is None else units.duration(seconds) for seconds in (one.lost_seconds, one.worst_seconds)),
            units.percent(one.overhead),
            "never" if one.interval_seconds is None else units.duration(one.interval_seconds),
            units.size(sum(one.tiers)),
            bar((1.0 - one.goodput) / most if most > 0.0 else 0.0, 12),
        )
        for one in sorted(found, key=lambda each: -each.goodput)
    ]
    titles = ("policy", "goodput", "lost", "worst", "overhead", "every", "a day", "wasted")
    print_table(titles, rows, numbers=titles[1:-1])
    spreads = [one.spread for one in found if one.spread is not None]
    by = f"goodput ± {100.0 * max(spreads):.1f} by chance" if spreads else "too few to say much of goodput"
    print_text("", f"{days:.3g} simulated days, {count(found[0].failures, 'failure')}: {by}")
    print_text("lost: work of one failure, on average")
    if len(found) > 1:
        print_text("rules know the true costs and the true failure rate; ckpt-engine learns both")
