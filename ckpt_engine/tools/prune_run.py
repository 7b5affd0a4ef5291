"""Carries out retention at the places of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ckpt_engine.copy.make_room import Pruned, catalogue, execute, measure, plan_prune, protection
from ckpt_engine.errors import ConfigError, StorageMissingError
from ckpt_engine.store.branches import OTHER_LINE, branches
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import RetentionPlan
from ckpt_engine.store.retention_rules import KeepAll, Retention, RetentionPolicy
from ckpt_engine.tools.stored_run import Run


@dataclass(frozen=True, slots=True)
class PrunedPlace:
    """A tier, and the retention that holds there or the snapshots that are to go."""

    repository: Repository
    policy: RetentionPolicy
    removing: frozenset[str] | None = None

    def plan(self) -> RetentionPlan:
        """What is to be forgotten. Reads only."""
        if self.removing is None:
            return plan_prune(self.repository, self.policy)
        infos = self.repository.list()
        staying = protection(self.repository, infos, self.policy)
        ids = [info.id for info in infos]
        going = tuple(one for one in ids if one in self.removing and one not in staying)
        keep = {one: staying.get(one, OTHER_LINE) for one in ids if one not in going}
        return RetentionPlan(keep, going, dict.fromkeys(going, "of the branch that is removed"))


@dataclass(frozen=True, slots=True)
class PruneOutcome:
    """What happened, or would happen, at one place. `done` is None where nothing was carried out."""

    url: str
    infos: Sequence[SnapshotInfo]
    plan: RetentionPlan
    removed_bytes: int
    done: Pruned | None


def branch_places(run: Run, wanted: str) -> list[PrunedPlace]:
    """The places that a run uses, each with the snapshots of that branch.

    Raises:
        StorageMissingError: there is no such branch.
        ConfigError: there is no other one: then this is the run.
    """
    infos = {info.id: info for repository in run.in_use for info in repository.list()}
    found = branches(list(infos.values()))
    named = [branch for branch in found if branch.id == wanted]
    if not named:
        names = ", ".join(branch.id for branch in found) or "none"
        raise StorageMissingError(f"no branch {wanted!r} at {run.tiers[0]}, there is {names}", hint="see `ckpt ls`")
    if len(found) == 1:
        raise ConfigError(
            f"{wanted} is the only branch at {run.tiers[0]}, and the run is empty without it",
            hint="--keep last=1 keeps its newest snapshot; else remove the folder or the prefix",
        )
    return [PrunedPlace(repository, KeepAll(), named[0].own) for repository in run.in_use]


def prune_place(place: PrunedPlace, *, dry_run: bool) -> PruneOutcome:
    """What happens at a place, or would happen."""
    repository, done = place.repository, None
    with nullcontext() if dry_run else acquire(repository.storage) as lease:
        infos, usage, plan = repository.list(), measure(repository), place.plan()
        if lease is not None:
            limits = Retention.of(place.policy).limits
            done = execute(repository, lease, plan, limits)
            catalogue(repository, limits)
            plan = done.plan
    return PruneOutcome(repository.storage.url, infos, plan, usage.exclusive_bytes(plan.remove), done)
