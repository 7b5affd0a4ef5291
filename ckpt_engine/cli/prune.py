"""`ckpt prune`: carries out retention now, or shows the plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.output import json_option, print_json, print_table, print_text
from ckpt_engine.cli.root import open_run, options_of, root_argument, storage_options
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import age, count
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.tools.prune_run import PrunedPlace, PruneOutcome, branch_places, prune_place


@click.command("prune", short_help="Carry out retention now, or show the plan.")
@root_argument
@click.option(
    "--keep",
    "rules",
    multiple=True,
    metavar="RULE=VALUE",
    help="What to keep, such as last=3, daily=7, best.monitor=val_loss or quota='500 GB'; repeatable. "
    "Instead of the rules in ckpt.yaml.",
)
@click.option(
    "--branch",
    metavar="ID",
    help="Instead, remove the snapshots that only this line of history has; `ckpt ls` names the lines.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing.")
@storage_options
@json_option
def command(root: str, rules: tuple[str, ...], branch: str | None, dry_run: bool, as_json: bool) -> None:
    """Forget the snapshots at ROOT that no rule keeps, and remove their data.

    The rules are those of ROOT if it is a ckpt.yaml, for each of its tiers; else give them with --keep. They apply to
    the line of history that a resume continues. Other lines stay, and --branch removes one. The newest whole snapshot
    and pinned or protected ones always stay. Ends with exit code 1 if a quota or min_free cannot be kept.
    """
    if branch is not None and rules:
        raise ConfigError("--branch removes a whole line of history: no --keep applies", hint="give one of them")
    places = places_of(root, rules) if branch is None else branch_places(open_run(root, every=True), branch)
    outcomes = [prune_place(place, dry_run=dry_run) for place in places]
    if as_json:
        print_json({"dry_run": dry_run, "tiers": [_json(outcome) for outcome in outcomes]})
    else:
        for outcome in outcomes:
            if len(outcomes) > 1:
                print_text(outcome.url, bold=True)
            _print(outcome)
    sys.exit(int(any(outcome.plan.short_bytes for outcome in outcomes)))


def places_of(root: str, rules: Sequence[str] = ()) -> list[PrunedPlace]:
    """The places of a run and what `rules`, or those of a ckpt.yaml, keep there."""
    if not rules and not Path(root).is_file():
        open_run(root)  # raises where there is no run
        raise ConfigError(
            f"nothing says what to keep at {root}", hint="name the run's ckpt.yaml, or add for example --keep last=3"
        )
    config = options_of(root, keep=_nested(rules)) if rules else options_of(root)
    run = open_run(root, config, every=True)
    given = config.keep.model_dump(mode="json", exclude_none=True)
    return [
        PrunedPlace(repository, policy_from(given if rules else config.keep_rules(tier)))
        for tier, repository in zip(config.tiers, run.places, strict=True)
        if repository in run.in_use
    ]


def _nested(rules: Sequence[str]) -> dict[str, Any]:
    """`["last=3", "best.k=2"]` → `{"last": "3", "best": {"k": "2"}}`."""
    keep: dict[str, Any] = {}
    for rule in rules:
        path, equals, value = rule.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--keep {rule}: must be RULE=VALUE", hint="for example --keep last=3")
        section = keep
        *outer, name = path.split(".")
        for part in outer:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--keep {rule}: {part} has a value already")
        if name in section:
            raise ConfigError(f"--keep {rule}: {path} is given twice")
        section[name] = value
    return keep


def _json(outcome: PruneOutcome) -> dict[str, Any]:
    return {
        "root": outcome.url,
        "keep": outcome.plan.keep,
        "remove": {snapshot: outcome.plan.why.get(snapshot, "") for snapshot in outcome.plan.remove},
        "slim": outcome.plan.slim,
        "slimmed": outcome.done and outcome.done.slimmed,
        "not_slimmed": outcome.done and outcome.done.not_slimmed,
        "removed_bytes": outcome.removed_bytes,
        "freed_bytes": outcome.done and outcome.done.collected.freed_bytes,
        "withheld_bytes": outcome.done and outcome.done.collected.withheld_bytes,
        "short_bytes": outcome.plan.short_bytes,
    }


def _print(outcome: PruneOutcome) -> None:
    if outcome.infos:
        rows = [
            (info.id, f"{info.step:,}", age(info.created), units.size(info.nbytes), *_fate(outcome, info.id))
            for info in outcome.infos
        ]
        print_table(
            ("snapshot", "step", "taken", "size", "plan", "why"), rows, numbers=("step", "size"), ids="snapshot"
        )
    kept, removed = count(len(outcome.plan.keep), "snapshot"), count(len(outcome.plan.remove), "snapshot")
    if outcome.done is None:
        slimmed = f" ({len(outcome.plan.slim):,} would lose components)" if outcome.plan.slim else ""
        text = f"{removed} would be removed, {units.size(outcome.removed_bytes)} freed"
    else:
        slimmed = f" ({len(outcome.done.slimmed):,} without components)" if outcome.done.slimmed else ""
        text = f"{removed} removed, {units.size(outcome.done.collected.freed_bytes)} freed"
    print_text(f"{kept} kept{slimmed}, {text} at {outcome.url}")
    if any(info.partial is not None for info in outcome.infos):
        print_text("this is one node's part: what other nodes still have of these snapshots is not known here")
    if outcome.plan.short_bytes:
        short = units.size(outcome.plan.short_bytes)
        print_text(f"the limits cannot be kept, {short} too much stays: nothing was removed for them", fg="red")
    if outcome.done is not None:
        for snapshot, why in outcome.done.not_slimmed.items():
            print_text(f"{snapshot} keeps all its components: {why}", fg="red")
        if outcome.done.collected.withheld_bytes:
            damaged = ", ".join(bad.id for bad in outcome.done.collected.damaged)
            withheld = units.size(outcome.done.collected.withheld_bytes)
            print_text(f"{withheld} stay because damaged manifests may need them: {damaged}")


def _fate(outcome: PruneOutcome, snapshot: str) -> tuple[str, str]:
    """What the plan says, or what became of it, and why."""
    plan, done = outcome.plan, outcome.done
    if snapshot not in plan.keep:
        return "remove" if done is None else "removed", plan.why.get(snapshot, "")
    if snapshot in plan.slim and (done is None or snapshot in done.slimmed):
        return "slim" if done is None else "slimmed", f"{plan.keep[snapshot]}; without {', '.join(plan.slim[snapshot])}"
    return "keep", plan.keep[snapshot]
