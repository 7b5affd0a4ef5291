"""`ckpt prune`: carry out retention now, or show what it would do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table
from ckpt_engine.cli.root import open_places
from ckpt_engine.config import load_config
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe import units
from ckpt_engine.store.collect import Pruned, catalogue, execute, plan_prune
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import Plan, Retention, RetentionPolicy, policy_from
from ckpt_engine.store.retention_usage import measure


@dataclass(frozen=True, slots=True)
class _Place:
    """A tier and the retention that holds there."""

    repository: Repository
    policy: RetentionPolicy


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What happened, or would happen, at one place. `done` is None where nothing was carried out."""

    url: str
    infos: Sequence[SnapshotInfo]
    plan: Plan
    removed_bytes: int
    done: Pruned | None


@click.command("prune", short_help="Carry out retention now, or show the plan.")
@click.argument("root")
@click.option(
    "--keep",
    "rules",
    multiple=True,
    metavar="RULE=VALUE",
    help="What to keep, such as last=3, daily=7, best.monitor=val_loss or quota='500 GB'; repeatable. "
    "Instead of the rules in ckpt.yaml.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing.")
@json_option
def command(root: str, rules: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Forget the snapshots at ROOT that no rule keeps, and remove their data.

    The rules are those of ROOT if it is a ckpt.yaml, for each of its tiers; else give them with --keep. The newest
    whole snapshot and pinned ones always stay. Ends with exit code 1 if a quota or min_free cannot be kept.
    """
    outcomes = [_prune(place, dry_run=dry_run) for place in _places(root, rules)]
    if as_json:
        print_json({"dry_run": dry_run, "tiers": [_json(outcome) for outcome in outcomes]})
    else:
        for outcome in outcomes:
            if len(outcomes) > 1:
                click.secho(outcome.url, bold=True)
            _print(outcome)
    if any(outcome.plan.short_bytes for outcome in outcomes):
        sys.exit(1)


def _places(root: str, rules: Sequence[str]) -> list[_Place]:
    if not rules and not Path(root).is_file():
        raise ConfigError(
            f"nothing says what to keep at {root}", hint="name the run's ckpt.yaml, or add for example --keep last=3"
        )
    config = load_config(root, keep=_nested(rules)) if rules else load_config(root)
    places = []
    for tier, repository in open_places(config):
        keep = config.keep.model_dump(mode="json", exclude_none=True) if rules else config.keep_rules(tier)
        places.append(_Place(repository, policy_from(keep)))
    return places


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


def _prune(place: _Place, *, dry_run: bool) -> _Outcome:
    repository = place.repository
    if dry_run:
        infos, usage = repository.list(), measure(repository)
        plan = plan_prune(repository, place.policy)
        return _Outcome(repository.storage.url, infos, plan, usage.exclusive_bytes(plan.remove), None)
    with acquire(repository.storage) as lease:
        infos, usage = repository.list(), measure(repository)
        limits = Retention.of(place.policy).limits
        done = execute(repository, lease, plan_prune(repository, place.policy), limits)
        catalogue(repository, limits)
    removed_bytes = usage.exclusive_bytes(done.plan.remove)
    return _Outcome(repository.storage.url, infos, done.plan, removed_bytes, done)


def _json(outcome: _Outcome) -> dict[str, Any]:
    return {
        "root": outcome.url,
        "keep": dict(outcome.plan.keep),
        "remove": {snapshot: outcome.plan.why.get(snapshot, "") for snapshot in outcome.plan.remove},
        "slim": {snapshot: list(lost) for snapshot, lost in outcome.plan.slim.items()},
        "slimmed": dict(outcome.done.slimmed) if outcome.done else None,
        "not_slimmed": dict(outcome.done.not_slimmed) if outcome.done else None,
        "removed_bytes": outcome.removed_bytes,
        "freed_bytes": outcome.done.collected.freed_bytes if outcome.done else None,
        "withheld_bytes": outcome.done.collected.withheld_bytes if outcome.done else None,
        "short_bytes": outcome.plan.short_bytes,
    }


def _print(outcome: _Outcome) -> None:
    if outcome.infos:
        rows = [
            (info.id, f"{info.step:,}", age(info.created), units.size(info.nbytes), *_fate(outcome, info.id))
            for info in outcome.infos
        ]
        print_table(("snapshot", "step", "taken", "size", "plan", "why"), rows, numbers=("step", "size"))
    kept, removed = count(len(outcome.plan.keep), "snapshot"), count(len(outcome.plan.remove), "snapshot")
    if outcome.done is None:
        slimmed = f" ({len(outcome.plan.slim):,} would lose components)" if outcome.plan.slim else ""
        text = f"{removed} would be removed, {units.size(outcome.removed_bytes)} freed"
    else:
        slimmed = f" ({len(outcome.done.slimmed):,} without components)" if outcome.done.slimmed else ""
        text = f"{removed} removed, {units.size(outcome.done.collected.freed_bytes)} freed"
    click.echo(f"{kept} kept{slimmed}, {text} at {outcome.url}")
    if any(info.partial is not None for info in outcome.infos):
        click.echo("this is one node's part: what other nodes still have of these snapshots is not known here")
    if outcome.plan.short_bytes:
        short = units.size(outcome.plan.short_bytes)
        click.secho(f"the limits cannot be kept, {short} too much stays: nothing was removed for them", fg="red")
    if outcome.done is not None:
        for snapshot, why in outcome.done.not_slimmed.items():
            click.secho(f"{snapshot} keeps all its components: {why}", fg="red")
        if outcome.done.collected.withheld_bytes:
            damaged = ", ".join(bad.id for bad in outcome.done.collected.damaged)
            withheld = units.size(outcome.done.collected.withheld_bytes)
            click.echo(f"{withheld} stay because damaged manifests may need them: {damaged}")


def _fate(outcome: _Outcome, snapshot: str) -> tuple[str, str]:
    """What the plan says, or what became of it, and why."""
    plan, done = outcome.plan, outcome.done
    if snapshot not in plan.keep:
        return "remove" if done is None else "removed", plan.why.get(snapshot, "")
    if snapshot in plan.slim and (done is None or snapshot in done.slimmed):
        return "slim" if done is None else "slimmed", f"{plan.keep[snapshot]}; without {', '.join(plan.slim[snapshot])}"
    return "keep", plan.keep[snapshot]
