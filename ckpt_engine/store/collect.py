"""Making room: forget what retention does not keep, then collect the data nothing needs.

Deletion has an order (crash rule 4): manifests, durably, then data. A crash in between leaves garbage, never a snapshot
without its data; the next collection removes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.store import layout
from ckpt_engine.store.lease import Lease
from ckpt_engine.store.repository import Damaged, Repository
from ckpt_engine.store.retention import Plan, RetentionPolicy, plan
from ckpt_engine.store.storage.base import ObjectInfo

NEWEST_WHOLE = "newest whole snapshot"
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did.

    Args:
        removed: names of data files.
        freed_bytes: their bytes and those of interrupted writes.
        withheld_bytes: data that cannot be proven unneeded because of `damaged` manifests.
    """

    removed: tuple[str, ...]
    freed_bytes: int
    withheld_bytes: int
    damaged: tuple[Damaged, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did: the plan it executed and the collection that followed."""

    plan: Plan
    collected: Collected


def plan_prune(
    repository: Repository,
    policy: RetentionPolicy,
    *,
    protected: Mapping[str, str] = _NOTHING,
    verified: Collection[str] = (),
) -> Plan:
    """What `prune` would forget. Reads only.

    The newest snapshot that is whole (manifest verified, data files there) stays whatever the policy says; if none is,
    everything stays.

    Args:
        protected: ids to keep, with the reason.
        verified: ids known to be whole, such as the one just committed.
    """
    infos = repository.scan().snapshots
    whole = next((info.id for info in reversed(infos) if info.id in verified or _is_whole(repository, info.id)), None)
    if whole is None:
        return Plan({info.id: "no snapshot is whole: nothing is removed" for info in infos}, ())
    return plan(infos, policy, {**protected, whole: protected.get(whole, NEWEST_WHOLE)})


def prune(
    repository: Repository,
    lease: Lease,
    policy: RetentionPolicy,
    *,
    protected: Mapping[str, str] = _NOTHING,
    verified: Collection[str] = (),
    in_flight: Collection[str] = (),
) -> Pruned:
    """Forget what `policy` does not keep, then collect. Arguments as of `plan_prune` and `collect`."""
    decided = plan_prune(repository, policy, protected=protected, verified=verified)
    if decided.remove:
        lease.check()
        repository.forget(decided.remove)
    return Pruned(decided, collect(repository, lease, in_flight=in_flight))


def collect(repository: Repository, lease: Lease, *, in_flight: Collection[str] = ()) -> Collected:
    """Remove the data files no snapshot needs and what interrupted writes left. Never touches a foreign file.

    Args:
        lease: proof that nobody else writes this run.
        in_flight: ids of snapshots whose data is being written now.

    Raises:
        LeaseHeldError: the lease is lost; nothing was removed.
        StorageError: some of it may have been removed; calling again continues.
    """
    garbage = repository.unreferenced(in_flight)
    lease.check()
    if garbage.unreferenced:
        _settle(repository, garbage.unreferenced)
        repository.storage.delete(*(item.name for item in garbage.unreferenced))
    freed_bytes = sum(item.nbytes for item in garbage.unreferenced) + repository.storage.sweep()
    return Collected(
        removed=tuple(item.name for item in garbage.unreferenced),
        freed_bytes=freed_bytes,
        withheld_bytes=sum(item.nbytes for item in garbage.withheld),
        damaged=garbage.damaged,
    )


def _settle(repository: Repository, garbage: Sequence[ObjectInfo]) -> None:
    """Make it durable that the owners of `garbage` have no manifest.

    A process may have removed those manifests and died before that survived a power loss; they must not come back once
    their data is gone.
    """
    owners = {owner.id for item in garbage if (owner := layout.data_owner(item.name))}
    repository.forget(sorted(owners))


def _is_whole(repository: Repository, snapshot: str) -> bool:
    try:
        manifest = repository.read(snapshot)
    except (FormatError, StorageMissingError):
        return False
    sizes: dict[str, int] = {}
    for file in manifest.files:
        sizes.update((item.name, item.nbytes) for item in repository.storage.list(file.name))
    return all(sizes.get(file.name) == file.nbytes for file in manifest.files)
