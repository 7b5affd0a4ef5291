"""`ckpt prune`: carries out retention now, or shows the plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.output import json_option, print_json, print_table, print_text
from ckpt_engine.cli.root import open_run, options_of, storage_options
from ckpt_engine.copy.make_room import Pruned, catalogue, execute, measure, plan_prune
from ckpt_engine.errors import ConfigError, StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import age, count
from ckpt_engine.store import pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import (
    OTHER_LINE,
    KeepAll,
    Retention,
    RetentionPlan,
    RetentionPolicy,
    branches,
    policy_from,
)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tier, and the retention that holds there or the snapshots that are to go."""

    repository: Repository
    policy: RetentionPolicy
    removing: frozenset[str] | None = None

    def plan(self) -> RetentionPlan:
        """What is to be forgotten. Reads only."""
        if self.removing is None:
            return plan_prune(self.repository, self.policy)
        pinned = pins.protection(self.repository.storage)
        ids = [info.id for info in self.repository.list()]
        going = tuple(one for one in ids if one in self.removing and one not in pinned)
        keep = {one: pinned.get(one, OTHER_LINE) for one in ids if one not in going}
        return RetentionPlan(keep, going, dict.fromkeys(going, "of the branch that is removed"))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What happened, or would happen, at one place. `done` is None where nothing was carried out."""

    url: str
    infos: Sequence[SnapshotInfo]
    plan: RetentionPlan
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
@click.option(
    "--branch",
    metavar="ID",
    help="Remove a line of history, as `ckpt ls` names it, instead: what no other line has too.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing.")
@storage_options
@json_option
def command(root: str, rules: tuple[str, ...], branch: str | None, dry_run: bool, as_json: bool) -> None:
    """Forget the snapshots at ROOT that no rule keeps, and remove their data.

    The rules are those of ROOT if it is a ckpt.yaml, for each of its tiers; else give them with --keep. They hold for
    the line of history that a resume goes on with; other lines stay, and --branch removes one. The newest whole
    snapshot and pinned ones always stay. Ends with exit code 1 if a quota or min_free cannot be kept.
    """
    if branch is not None and rules:
        raise ConfigError("--branch removes a whole line of history: no --keep applies", hint="give one of them")
    places = _places(root, rules) if branch is None else _branch_places(root, branch)
    outcomes = [_prune(place, dry_run=dry_run) for place in places]
    if as_json:
        print_json({"dry_run": dry_run, "tiers": [_json(outcome) for outcome in outcomes]})
    else:
        for outcome in outcomes:
            if len(outcomes) > 1:
                print_text(outcome.url, bold=True)
            _print(outcome)
    if any(outcome.plan.short_bytes for outcome in outcomes):
        sys.exit(1)


def _places(root: str, rules: Sequence[str]) -> list[_Place]:
    if not rules and not Path(root).is_file():
        open_run(root)  # raises where there is no run
        raise ConfigError(
            f"nothing says what to keep at {root}", hint="name the run's ckpt.yaml, or add for example --keep last=3"
        )
    config = options_of(root, keep=_nested(rules)) if rules else options_of(root)
    run = open_run(root, config, every=True)
    places = []
    for tier, repository in zip(config.tiers, run.places, strict=True):
        keep = config.keep.model_dump(mode="json", exclude_none=True) if rules else config.keep_rules(tier)
        if repository in run.in_use:
            places.append(_Place(repository, policy_from(keep)))
    return places


def _branch_places(root: str, wanted: str) -> list[_Place]:
    """The tiers, each with the snapshots of that branch.

    Raises:
        StorageMissingError: there is no such branch.
        ConfigError: there is no other one: then this is the run.
    """
    there = open_run(root, every=True).in_use
    infos = {info.id: info for repository in there for info in repository.list()}
    found = branches(list(infos.values()))
    named = [branch for branch in found if branch.id == wanted]
    if not named:
        names = ", ".join(branch.id for branch in found) or "none"
        raise StorageMissingError(f"no branch {wanted!r} at {root}, there is {names}", hint=f"`ckpt ls {root}`")
    if len(found) == 1:
        raise ConfigError(
            f"{wanted} is the only branch at {root}, and without it there is nothing",
            hint=f"`ckpt prune {root} --keep last=1` keeps its newest snapshot; else remove the folder or the prefix",
        )
    return [_Place(repository, KeepAll(), named[0].own) for repository in there]


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
    repository, done = place.repository, None
    with nullcontext() if dry_run else acquire(repository.storage) as lease:
        infos, usage, plan = repository.list(), measure(repository), place.plan()
        if lease is not None:
            limits = Retention.of(place.policy).limits
            done = execute(repository, lease, plan, limits)
            catalogue(repository, limits)
            plan = done.plan
    return _Outcome(repository.storage.url, infos, plan, usage.exclusive_bytes(plan.remove), done)


def _json(outcome: _Outcome) -> dict[str, Any]:
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


def _fate(outcome: _Outcome, snapshot: str) -> tuple[str, str]:
    """What the plan says, or what became of it, and why."""
    plan, done = outcome.plan, outcome.done
    if snapshot not in plan.keep:
        return "remove" if done is None else "removed", plan.why.get(snapshot, "")
    if snapshot in plan.slim and (done is None or snapshot in done.slimmed):
        return "slim" if done is None else "slimmed", f"{plan.keep[snapshot]}; without {', '.join(plan.slim[snapshot])}"
    return "keep", plan.keep[snapshot]
