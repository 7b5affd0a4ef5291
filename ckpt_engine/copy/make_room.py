"""Makes room: forgets what retention does not keep, then collects the data that nothing needs.

Deletion has an order (crash rule 4): manifests, durably, then data. A crash in between leaves garbage, never a
snapshot without its data; the next collection removes it. Pinned snapshots and other lines of history stay. Room for a
snapshot is made before it is written, and a run that will not fit is warned before its first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import permutations
from types import MappingProxyType

from ckpt_engine.copy.drop_components import foresee, slim_id, write_slim
from ckpt_engine.errors import FormatError, StorageFullError, StorageMissingError, StorageReadOnlyError
from ckpt_engine.observe import units
from ckpt_engine.observe.events import Event, Notice, SnapshotsForgotten
from ckpt_engine.store import names, pins
from ckpt_engine.store.branches import OTHER_LINE, branches
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.manifest import UNNAMED, Line, SnapshotInfo
from ckpt_engine.store.protection import PROTECTED, young
from ckpt_engine.store.quarantine import Damaged
from ckpt_engine.store.repository import Data, Repository
from ckpt_engine.store.retention import RESERVE_BYTES, SLACK_BYTES, RetentionPlan, Usage, plan, plan_before_write
from ckpt_engine.store.retention_preflight import preflight
from ckpt_engine.store.retention_rules import ByteLimits, KeepAll, Retention, RetentionPolicy

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_LIMITS = ByteLimits()


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did.

    Args:
        removed: names of data files.
        freed_bytes: their bytes and those of interrupted writes.
        withheld_bytes: data that cannot be proven unneeded because of `damaged` manifests.
        put_back: ids of pinned snapshots whose manifests had been removed.
    """

    removed: tuple[str, ...]
    freed_bytes: int
    withheld_bytes: int
    damaged: tuple[Damaged, ...]
    put_back: frozenset[str] = frozenset()

    def events(self, url: str) -> list[Event]:
        """What is to be said of it, done at `url`."""
        if not self.withheld_bytes:
            return []
        stay, damaged = units.size(self.withheld_bytes), ", ".join(bad.id for bad in self.damaged)
        text = f"{stay} of old data stay at {url} because damaged manifests may need them: {damaged}"
        return [Notice("WARNING", text)]


_NOT_ASKED = Collected((), 0, 0, ())
"""Of a collection that was of no use."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did: the plan it executed and the collection that followed.

    Args:
        slimmed: snapshots that lost components → what they are now.
        not_slimmed: those that should have, and why they are as they were.
    """

    plan: RetentionPlan
    collected: Collected
    slimmed: Mapping[str, str] = field(default_factory=dict)
    not_slimmed: Mapping[str, str] = field(default_factory=dict)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """All ids that no longer exist."""
        return (*self.plan.remove, *self.slimmed)

    def events(self, url: str) -> list[Event]:
        """As of `Collected`."""
        found: list[Event] = [SnapshotsForgotten(self.forgotten, self.collected.freed_bytes)] if self.forgotten else []
        for snapshot, why in self.not_slimmed.items():
            found.append(Notice("WARNING", f"snapshot {snapshot} keeps all its components at {url}: {why}"))
        return found + self.collected.events(url)


def protection(repository: Repository, infos: Sequence[SnapshotInfo], policy: RetentionPolicy) -> dict[str, str]:
    """Id → reason of pinned snapshots, and of young ones by the longer time of `policy` and the run's record."""
    record = repository.record()
    days = max(Retention.of(policy).protect_days, record.protect_days if record is not None else 0)
    return (young(infos, days, time.time()) if days else {}) | pins.protection(repository.storage)


def plan_prune(
    repository: Repository,
    policy: RetentionPolicy,
    *,
    line: Line | None = None,
    protected: Mapping[str, str] = _NOTHING,
    verified: Collection[str] = (),
) -> RetentionPlan:
    """What `prune` would forget. Reads only.

    The newest snapshot that is whole (manifest verified, data files there) stays whatever the policy says, and so do
    pinned and protected ones; if none is whole, everything stays. Rules see the snapshots of one line only; all others
    stay.

    Args:
        line: whose snapshots may go; None: that of the newest snapshot.
        protected: ids to keep besides, with the reason.
        verified: ids known to be whole, such as the one just committed.
    """
    scanned, others = _of_line(repository, line)
    doubles = _doubles(scanned)
    infos = [info for info in scanned if info.id not in doubles]
    whole = _newest_whole(repository, infos, verified)
    if whole is None and infos:
        return RetentionPlan({info.id: "no snapshot is whole: nothing is removed" for info in scanned} | others, ())
    limited = Retention.of(policy).limits != ByteLimits()
    keep = protection(repository, scanned, policy) | dict(protected)
    decided = plan(
        infos,
        policy,
        keep,
        verified=whole,
        usage=measure(repository) if limited else None,
        free_bytes=repository.storage.capabilities.free_bytes() if limited else None,
    )
    decided = _with_doubles(repository, decided, doubles, keep) if doubles else decided
    return replace(decided, keep={**decided.keep, **others})


def prune(
    repository: Repository,
    lease: Lease,
    policy: RetentionPolicy,
    *,
    line: Line | None = None,
    protected: Mapping[str, str] = _NOTHING,
    verified: Collection[str] = (),
    in_flight: Container[str] = (),
    tidy: bool = True,
) -> Pruned:
    """Forget what `policy` does not keep, then collect. Arguments as of `plan_prune` and `collect`.

    Args:
        tidy: collect even if nothing goes, and clear interrupted writes: others may have left something.
    """
    data = None if tidy else repository.data(in_flight)
    decided = plan_prune(repository, policy, line=line, protected=protected, verified=verified)
    limits = Retention.of(policy).limits
    catalogue(repository, limits)  # before: where nothing may be removed there are many snapshots
    if tidy or decided.remove or decided.slim:
        return execute(repository, lease, decided, limits, in_flight=in_flight, data=data)
    return Pruned(decided, _NOT_ASKED)


def execute(
    repository: Repository,
    lease: Lease,
    decided: RetentionPlan,
    limits: ByteLimits = _NO_LIMITS,
    *,
    in_flight: Container[str] = (),
    data: Data | None = None,
) -> Pruned:
    """Forget what a plan removes, except what was pinned since, collect, and slim what it slims.

    Args:
        data: as of `collect`, where the plan was made just now.

    Raises:
        LeaseHeldError: the lease is lost; nothing was removed.
        StorageError: some of it may have been removed; planning and executing again continues.
    """
    late = _forget(repository, lease, decided.remove, looks=data is None)
    collected = collect(repository, lease, in_flight=in_flight, data=data)
    if late := late | collected.put_back.intersection(decided.remove):
        decided = _without(decided, late)
    if not decided.slim:
        return Pruned(decided, collected)
    slimmed: dict[str, str] = {}
    not_slimmed: dict[str, str] = {}
    for snapshot, lost in decided.slim.items():
        try:
            slimmed[snapshot] = _slim(repository, lease, snapshot, lost, limits)
        except (FormatError, StorageMissingError, StorageFullError) as err:
            not_slimmed[snapshot] = err.message
    again = collect(repository, lease, in_flight=in_flight)
    collected = replace(
        again, removed=collected.removed + again.removed, freed_bytes=collected.freed_bytes + again.freed_bytes
    )
    return Pruned(decided, collected, slimmed, not_slimmed)


def make_room(
    repository: Repository,
    lease: Lease,
    policy: RetentionPolicy,
    incoming_bytes: int,
    *,
    line: Line | None = None,
    incoming: SnapshotInfo | None = None,
    protected: Mapping[str, str] = _NOTHING,
    verified: Collection[str] = (),
    in_flight: Container[str] = (),
    full: bool = False,
) -> Pruned | None:
    """Before a write: forget and collect so much that it breaks no limit at any instant. None: there is room.

    Args:
        incoming_bytes: everything the write will store: data files and manifest.
        incoming: the snapshot to be written, as far as it is known.
        line, protected, verified, in_flight: as of `prune`.
        full: as of `plan_before_write`.

    Raises:
        StorageFullError: it does not fit beside what must stay; nothing was forgotten. Do not write.
        LeaseHeldError, StorageError: as of `prune`.
    """
    storage, limits = repository.storage, Retention.of(policy).limits
    free_bytes = storage.capabilities.free_bytes()
    needed_bytes = incoming_bytes + SLACK_BYTES + (limits.min_free_bytes or RESERVE_BYTES)
    if not full and limits.quota_bytes is None and (free_bytes is None or free_bytes >= needed_bytes):
        return None

    def planned() -> RetentionPlan:
        infos, others = _of_line(repository, line)
        keep = protection(repository, infos, policy) | dict(protected)
        whole = _newest_whole(repository, infos, verified)
        if whole is None:
            # Nothing tells which one is worth most: none goes.
            keep.update(dict.fromkeys((info.id for info in infos), "no snapshot is whole"))
        found = plan_before_write(
            infos,
            policy,
            incoming_bytes,
            storage.capabilities.free_bytes(),
            protected=keep,
            verified=whole,
            usage=measure(repository),
            incoming=incoming,
            full=full,
        )
        return replace(found, keep={**found.keep, **others})

    decided, done = planned(), None
    with _what_may_go(limits):
        if decided.short_bytes:
            collect(repository, lease, in_flight=in_flight)
            decided = planned()
        if decided.short_bytes:
            raise _full(repository, line, policy, incoming_bytes, decided.short_bytes)
        if not decided.remove:
            return None
        done = execute(repository, lease, decided, limits, in_flight=in_flight)
        if len(done.plan.remove) < len(decided.remove):
            # Somebody pinned one of them meanwhile.
            decided = planned()
            if decided.short_bytes:
                raise _full(repository, line, policy, incoming_bytes, decided.short_bytes)
    return done  # None where nothing may go: the write finds out whether it fits


@contextmanager
def _what_may_go(limits: ByteLimits) -> Iterator[None]:
    """Where this user may not delete, no room is made; what limits keep from being written fails."""
    try:
        yield
    except StorageReadOnlyError as err:
        if limits != _NO_LIMITS:
            raise StorageFullError(f"there is no room, and none can be made: {err.message}", hint=err.hint) from err


def collect(
    repository: Repository, lease: Lease, *, in_flight: Container[str] = (), data: Data | None = None
) -> Collected:
    """Remove the data files no snapshot needs and what interrupted writes left. Never touches a foreign file.

    Args:
        lease: proof that no other process writes this run.
        in_flight: ids of snapshots whose data is being written now.
        data: what `Repository.data` has found before manifests were listed last: nothing else is looked for, and
            nothing listed again. None: all that is there now.

    Raises:
        LeaseHeldError: the lease is lost; nothing was removed.
        StorageError: some of it may have been removed; calling again continues.
    """
    garbage = repository.unreferenced(in_flight, data)
    # After the look at manifests: a snapshot that it missed was pinned before.
    orphans = pins.orphans(repository)
    spared = {file.name for orphan in orphans for file in orphan.manifest.files}
    unneeded = {item.name: item.nbytes for item in garbage.unreferenced if item.name not in spared}
    lease.check()
    if unneeded:
        # A process may have removed their manifests and died before that survived a power loss; these must not come
        # back once their data is gone.
        if garbage.owners:
            repository.forget(sorted(garbage.owners))
        repository.storage.delete(*unneeded)
    freed_bytes = sum(unneeded.values())
    if data is None:
        freed_bytes += repository.storage.sweep()
    # Last, because a full disk has room for it only now.
    put_back = pins.put_back(repository, orphans)
    return Collected(
        removed=tuple(unneeded),
        freed_bytes=freed_bytes,
        withheld_bytes=sum([item.nbytes for item in garbage.withheld]),
        damaged=garbage.damaged,
        put_back=put_back,
    )


@contextmanager
def where_permitted(repository: Repository, say: Callable[[str], object]) -> Iterator[None]:
    """What the block removes may stay where this user may not delete; `say` takes that once for each repository."""
    try:
        yield
    except StorageReadOnlyError as err:
        if not repository.is_refusing:
            repository.is_refusing = True
            say(
                f"retention may remove nothing at {repository.storage.url}, older snapshots stay: {err.message}; new "
                "ones are still taken, and `ckpt status` counts what retention would remove"
            )


def _of_line(repository: Repository, line: Line | None) -> tuple[list[SnapshotInfo], dict[str, str]]:
    """The snapshots that retention may remove, oldest first, and all others with the reason why they stay."""
    scanned = repository.list()
    if line is None:
        line = scanned[-1].line if scanned else UNNAMED
    mine = [one for one in scanned if line.has(one)]
    return mine, {one.id: OTHER_LINE for one in scanned if not line.has(one)}


def _newest_whole(repository: Repository, infos: Sequence[SnapshotInfo], verified: Collection[str]) -> str | None:
    return next((info.id for info in reversed(infos) if info.id in verified or _is_whole(repository, info.id)), None)


def _forget(repository: Repository, lease: Lease, snapshots: Collection[str], *, looks: bool = True) -> frozenset[str]:
    """Forget snapshots, except those that are pinned by now if it `looks`; returns these. A collection has to follow:
    it puts back what is pinned meanwhile.
    """
    if not snapshots:
        return frozenset()
    late = pins.pinned_ids(repository.storage).intersection(snapshots) if looks else frozenset[str]()
    if going := [one for one in snapshots if one not in late]:
        lease.check()
        repository.forget(going)
    return late


def _slim(repository: Repository, lease: Lease, snapshot: str, lost: Sequence[str], limits: ByteLimits) -> str:
    """Replace a snapshot by a copy without the components `lost`; returns its new id.

    Raises:
        FormatError, StorageMissingError, StorageFullError: it is as it was.
    """
    manifest = repository.read(snapshot)
    if manifest.info.partial is not None:
        raise FormatError(f"{snapshot} has what {manifest.info.partial} wrote, and cannot be taken apart")
    made = foresee(manifest, lost)
    if made is None:
        raise FormatError(f"the data of {snapshot} is encoded and cannot be taken apart")
    new = made.manifest.info.id
    if any(parsed.id == new for parsed in repository.ids()) and not _is_whole(repository, new):
        lease.check()
        repository.forget([new])
    if all(parsed.id != new for parsed in repository.ids()):
        _require_room(repository, limits, made.nbytes)
        lease.check()
        write_slim(repository, made)
    if _forget(repository, lease, [snapshot]):
        repository.forget([new])
        raise StorageMissingError(f"{snapshot} was pinned meanwhile")
    return new


def compact(repository: Repository, lease: Lease, snapshot: str) -> str:
    """Write a snapshot again as one plain file, and forget it as it was; returns its new id.

    A crash leaves the first one, or both, or the new one; the next retention, or doing it again, cleans up.

    Raises:
        FormatError, StorageMissingError, StorageFullError: it is as it was; it is damaged, pinned, or there is no room.
        LeaseHeldError, StorageError: as it was, or done; calling again continues.
    """
    if why := protection(repository, [repository.info(snapshot)], KeepAll()).get(snapshot):
        raise StorageMissingError(f"{snapshot} is {why}", hint="`ckpt unpin` it first, or wait for that date")
    new = _slim(repository, lease, snapshot, (), _NO_LIMITS)
    collect(repository, lease)
    return new


def catalogue(repository: Repository, limits: ByteLimits = _NO_LIMITS) -> None:
    """Write the run's catalog if that is due and breaks no limit. Needs the lease. Never raises for its own sake."""
    repository.write_catalog_if_due(lambda nbytes: _require_room(repository, limits, nbytes))


def _require_room(repository: Repository, limits: ByteLimits, nbytes: int) -> None:
    """Raises `StorageFullError` unless `nbytes` more break no limit."""
    short_bytes = 0
    if limits.quota_bytes is not None:
        short_bytes = measure(repository).used_bytes + nbytes + SLACK_BYTES - limits.quota_bytes
    free_bytes = repository.storage.capabilities.free_bytes()
    if free_bytes is not None:
        short_bytes = max(short_bytes, nbytes + SLACK_BYTES + (limits.min_free_bytes or 0) - free_bytes)
    if short_bytes > 0:
        raise StorageFullError(f"writing it without them needs {units.size(short_bytes)} more room")


def _with_doubles(
    repository: Repository, decided: RetentionPlan, doubles: Mapping[str, str], protected: Mapping[str, str]
) -> RetentionPlan:
    """A plan with the slim snapshots that stand beside what they were made of: an interrupted slimming.

    They replace what they were made of if the plan slims that; else they go, unless they are all that is whole.
    """
    keep, remove, why = dict(decided.keep), list(decided.remove), dict(decided.why)
    for double, original in doubles.items():
        if double in protected:
            keep[double] = protected[double]
        elif original in decided.slim:
            keep[double] = f"will replace {original}"
        elif original in decided.why or _is_whole(repository, original):
            remove.append(double)
            why[double] = f"part of {original}"
        else:
            keep[double] = f"{original} is damaged"
    return replace(decided, keep=keep, remove=tuple(sorted(remove)), why=why)


def _without(decided: RetentionPlan, late: Collection[str]) -> RetentionPlan:
    """The plan as it was carried out: what was pinned meanwhile stayed."""
    return replace(
        decided,
        keep={**decided.keep, **dict.fromkeys(sorted(late), "pinned meanwhile")},
        remove=tuple(one for one in decided.remove if one not in late),
        why={one: why for one, why in decided.why.items() if one not in late},
    )


def _full(
    repository: Repository, line: Line | None, policy: RetentionPolicy, incoming_bytes: int, short_bytes: int
) -> StorageFullError:
    url, limits, (mine, others) = repository.storage.url, Retention.of(policy).limits, _of_line(repository, line)
    finished = [one.id for one in branches(repository.list()) if one.newest.id in others]
    kept = protection(repository, mine, policy).items()
    young = [f" and {one} ({why})" for one, why in kept if why.startswith(PROTECTED)]
    beside = "".join([f"what is pinned or {OTHER_LINE}" if finished else "what is pinned", *young[:1]])
    finish = f"`ckpt prune {url} --branch {finished[0]}` removes a finished branch, " if finished else ""
    quota = [] if limits.quota_bytes is None else [f"quota {units.size(limits.quota_bytes)}"]
    floor = [] if limits.min_free_bytes is None else [f"min_free {units.size(limits.min_free_bytes)}"]
    return StorageFullError(
        f"a snapshot of {units.size(incoming_bytes)} does not fit at {url} beside the newest one and {beside}: "
        f"{units.size(short_bytes)} too much for {' and '.join(quota + floor)}",
        hint=f"{finish}raise the limit, or `ckpt prune {url} --keep last=1 --dry-run` shows what stays and why",
    )


def _is_whole(repository: Repository, snapshot: str) -> bool:
    try:
        manifest = repository.read(snapshot)
    except (FormatError, StorageMissingError):
        return False
    return not lacking(repository.storage, manifest.files)


def shortage(repository: Repository, policy: RetentionPolicy, data_bytes: int) -> str | None:
    """Why what a policy keeps will not fit, if all snapshots are as large as the first one; None: it will."""
    used_bytes = sum(item.nbytes for item in repository.storage.list(names.DATA))
    return preflight(policy, data_bytes, used_bytes=used_bytes, free_bytes=repository.storage.capabilities.free_bytes())


def measure(repository: Repository) -> Usage:
    """The bytes of every snapshot and of all our other objects. What a put has not finished yet is not counted.

    A damaged snapshot counts as `other_bytes`: nothing is known to become free with it.
    """
    data: dict[str, int] = {}
    manifests: dict[str, int] = {}
    other_bytes = 0
    listed = list(repository.storage.list(""))
    repository.learn(listed)
    for item in listed:
        if names.owner_of(item.name):
            file = names.data_file_of(item.name)
            data[file] = data.get(file, 0) + item.nbytes
        elif parsed := names.manifest_id(item.name):
            manifests[parsed.id] = item.nbytes
        elif names.is_ours(item.name):
            other_bytes += item.nbytes
    files: dict[str, dict[str, int]] = {}
    for snapshot, nbytes in manifests.items():
        try:
            needed = repository.files_of(snapshot)
        except StorageMissingError:
            continue  # forgotten meanwhile
        except FormatError:
            other_bytes += nbytes
            continue
        files[snapshot] = {names.manifest_name(snapshot): nbytes, **{name: data.get(name, 0) for name in needed}}
    needed_by_any = {name for one in files.values() for name in one}
    other_bytes += sum(nbytes for name, nbytes in data.items() if name not in needed_by_any)
    return Usage(files, other_bytes)


def _doubles(infos: Sequence[SnapshotInfo]) -> dict[str, str]:
    """Slim snapshots beside the one they were made of, slim → whole: what an interrupted slimming leaves."""
    of_seq: dict[tuple[int, int], list[SnapshotInfo]] = {}
    for info in infos:
        of_seq.setdefault((info.seq, info.step), []).append(info)
    found = {}
    for same in of_seq.values():
        for slim, whole in permutations(same, 2):
            if slim.id == slim_id(whole.id, set(whole.components) - set(slim.components)):
                found[slim.id] = whole.id
    return found
