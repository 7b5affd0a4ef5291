"""The laws of limits: what a plan removes to keep to quota and free space, after a write and before one."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.retention import SLACK_BYTES, RetentionPlan, Usage, plan, plan_before_write
from ckpt_engine.store.retention_rules import ByteLimits, KeepAll, KeepLast, Retention, policy_from
from tests.store.samples import info
from tests.store.test_retention import keeps, runs

UNIT = 1 << 20
"""Snapshots of these tests are a few of it, so that the slack is small beside them."""


@dataclasses.dataclass(frozen=True)
class Disk:
    """A run's snapshots and the disk they are on. Shared files exist once."""

    infos: list[SnapshotInfo]
    files: dict[str, dict[str, int]]
    other_bytes: int
    free_bytes: int

    @property
    def usage(self) -> Usage:
        return Usage({info.id: self.files[info.id] for info in self.infos}, self.other_bytes)

    def after(self, done: RetentionPlan) -> Disk:
        left = [info for info in self.infos if info.id not in done.remove]
        smaller = dataclasses.replace(self, infos=left)
        freed_bytes = self.usage.used_bytes - smaller.usage.used_bytes
        return dataclasses.replace(smaller, free_bytes=self.free_bytes + freed_bytes)


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    infos = draw(runs())
    files: dict[str, dict[str, int]] = {}
    shared = [(f"shared{i}", draw(st.integers(1, 5)) * UNIT) for i in range(3)]
    for one in infos:
        own = {f"{one.id}.data": draw(st.integers(1, 8)) * UNIT}
        files[one.id] = own | dict(draw(st.lists(st.sampled_from(shared), max_size=2)))
    return Disk(infos, files, draw(st.integers(0, 3)) * UNIT, draw(st.integers(0, 60)) * UNIT)


limits = st.builds(
    ByteLimits,
    quota_bytes=st.none() | st.integers(1, 80).map(lambda n: n * UNIT),
    min_free_bytes=st.none() | st.integers(1, 40).map(lambda n: n * UNIT),
)
policies = st.builds(lambda keep, limit: Retention(policy_from(keep), limit), keeps, limits)


def _chosen(data: st.DataObject, disk: Disk) -> set[str]:
    return data.draw(st.sets(st.sampled_from([one.id for one in disk.infos]))) if disk.infos else set()


def _planned(disk: Disk, policy: Retention, pinned: set[str], verified: str | None = None) -> RetentionPlan:
    protected = dict.fromkeys(pinned & {one.id for one in disk.infos}, "pinned")
    return plan(disk.infos, policy, protected, verified=verified, usage=disk.usage, free_bytes=disk.free_bytes)


def _verified(data: st.DataObject, disk: Disk) -> str | None:
    return data.draw(st.none() | st.sampled_from([one.id for one in disk.infos])) if disk.infos else None


@given(disks(), policies, st.data())
def test_the_laws_after_a_write(disk: Disk, policy: Retention, data: st.DataObject) -> None:
    """Idempotent, the same for any order; what is pinned or newest whole stays, with a damaged newest snapshot too."""
    pinned, verified = _chosen(data, disk), _verified(data, disk)
    first = _planned(disk, policy, pinned, verified)
    second = _planned(disk.after(first), policy, pinned, verified)
    assert second.remove == ()
    assert set(second.keep) == set(first.keep)
    shuffled = dataclasses.replace(disk, infos=data.draw(st.permutations(disk.infos)))
    assert _planned(shuffled, policy, pinned, verified) == first
    assert _immune(disk, pinned, verified) <= set(first.keep)
    rules = Retention(policy.rule)
    many = pinned | _chosen(data, disk)
    assert set(_planned(disk, rules, pinned).keep) <= set(_planned(disk, rules, many).keep), "monotone with pins"
    the_limits_hold_or_it_says_what_is_missing(disk, policy, pinned)


def _immune(disk: Disk, pinned: set[str], verified: str | None) -> set[str]:
    last = max((one.seq for one in disk.infos), default=0)
    return pinned | ({verified} if verified else {one.id for one in disk.infos if one.seq == last})


def the_limits_hold_or_it_says_what_is_missing(disk: Disk, policy: Retention, pinned: set[str]) -> None:
    """The executed plan keeps to quota and free space; it is short only if what must stay is too much by itself."""
    done = _planned(disk, policy, pinned)
    after = disk.after(done)
    quota, floor = policy.limits.quota_bytes, policy.limits.min_free_bytes
    over_bytes = max(
        0 if quota is None else after.usage.used_bytes - quota, 0 if floor is None else floor - after.free_bytes
    )
    assert done.short_bytes >= 0
    if done.short_bytes == 0:
        assert over_bytes <= 0
        return
    immune = _immune(disk, pinned, None)
    least = disk.after(RetentionPlan({}, tuple(one.id for one in disk.infos if one.id not in immune)))
    assert (quota is not None and least.usage.used_bytes > quota) or (floor is not None and least.free_bytes < floor)


@given(disks(), policies, st.integers(1, 30), st.data())
def test_the_laws_before_a_write(disk: Disk, policy: Retention, units: int, data: st.DataObject) -> None:
    """The new snapshot and what is left keep to the limits, or nothing is removed; nor where there is room."""
    incoming_bytes, quota, floor = units * UNIT, policy.limits.quota_bytes, policy.limits.min_free_bytes
    pinned, verified = _chosen(data, disk), _verified(data, disk)

    def planned(disk: Disk, **more: Any) -> RetentionPlan:
        return plan_before_write(disk.infos, policy, incoming_bytes, disk.free_bytes, usage=disk.usage, **more)

    done = planned(disk, protected=dict.fromkeys(pinned, "pinned"), verified=verified)
    assert not _immune(disk, pinned, verified) & set(done.remove)
    shuffled = dataclasses.replace(disk, infos=data.draw(st.permutations(disk.infos)))
    assert planned(shuffled, protected=dict.fromkeys(pinned, "pinned"), verified=verified) == done
    done = planned(disk, protected=dict.fromkeys(pinned, "pinned"))
    after = disk.after(done)
    if done.short_bytes:
        assert done.remove == ()
    else:
        if quota is not None:
            assert after.usage.used_bytes + incoming_bytes + SLACK_BYTES <= quota
        if floor is not None:
            assert after.free_bytes - incoming_bytes >= floor
        assert sorted([*done.keep, *done.remove]) == sorted(one.id for one in disk.infos)
    had_room = (
        (quota is None or disk.usage.used_bytes + incoming_bytes + SLACK_BYTES <= quota)
        and (floor is None or disk.free_bytes - incoming_bytes >= floor)
        and disk.free_bytes >= incoming_bytes + SLACK_BYTES
    )
    if had_room:
        assert planned(disk).remove == ()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), keeps, st.integers(1, 60), st.data())
def test_the_quota_is_never_exceeded_at_any_instant(
    sizes: list[int], keep: dict[str, Any], quota: int, data: st.DataObject
) -> None:
    """A run of many writes, planned before and after each: used bytes, the one being written included, stay below."""
    policy = Retention(policy_from(keep), ByteLimits(quota_bytes=quota * UNIT))
    disk = Disk([], {}, 0, 1 << 60)
    for seq, size in enumerate(sizes, 1):
        before = plan_before_write(disk.infos, policy, size * UNIT, disk.free_bytes, usage=disk.usage)
        if before.short_bytes:
            assert before.remove == ()
            continue
        disk = disk.after(before)
        assert disk.usage.used_bytes + size * UNIT <= quota * UNIT
        new = info(seq, seq * 10, {"loss": data.draw(st.floats(0, 1))})
        disk = dataclasses.replace(
            disk, infos=[*disk.infos, new], files={**disk.files, new.id: {f"{new.id}.data": size * UNIT}}
        )
        disk = disk.after(plan(disk.infos, policy, usage=disk.usage, free_bytes=disk.free_bytes))
        assert disk.usage.used_bytes <= quota * UNIT
        assert new in disk.infos


def _run(*seqs: int, nbytes: int = UNIT) -> list[SnapshotInfo]:
    return [dataclasses.replace(info(seq, seq * 10, {"loss": float(seq)}), nbytes=nbytes) for seq in seqs]


def test_the_oldest_go_first_and_the_best_last() -> None:
    """Under a quota of three, of five kept ones the two oldest go, except the best."""
    infos = _run(1, 2, 3, 4, 5)
    policy = Retention(policy_from({"last": 5, "best": {"monitor": "loss"}}), ByteLimits(quota_bytes=3 * UNIT))
    done = plan(infos, policy)
    assert done.remove == (infos[1].id, infos[2].id)
    assert done.why[infos[1].id] == "over the quota of 3.1 MB"
    tighter = plan(infos, Retention(policy.rule, ByteLimits(quota_bytes=UNIT)))
    assert set(tighter.keep) == {infos[4].id}


def test_a_limit_takes_a_damaged_newest_before_the_newest_whole_one() -> None:
    """There is room for one: it is the one that can be resumed from, after a write and before the next."""
    infos = _run(1, 2, 3)
    policy = Retention(KeepLast(3), ByteLimits(quota_bytes=UNIT))
    assert plan(infos, policy, verified=infos[1].id).remove == (infos[0].id, infos[2].id)
    assert plan(infos, policy).remove == (infos[0].id, infos[1].id)
    roomy = Retention(KeepLast(3), ByteLimits(quota_bytes=2 * UNIT + SLACK_BYTES))
    before = plan_before_write(infos, roomy, UNIT, None, verified=infos[1].id)
    assert before.remove == (infos[0].id, infos[2].id)
    assert plan_before_write(infos, roomy, UNIT, None).remove == (infos[0].id, infos[1].id)


def test_a_limit_that_fails_without_snapshots_is_reported() -> None:
    """Nothing to remove is no reason to call a full disk fine."""
    assert plan([], Retention(KeepAll(), ByteLimits(min_free_bytes=UNIT)), free_bytes=1).short_bytes == UNIT - 1


def test_room_comes_first_from_what_would_go_anyway() -> None:
    """Before a write that pushes one out of `last`, that one goes, not an older one that another rule keeps."""
    infos = _run(1, 2, 3)
    policy = Retention(policy_from({"last": 2, "every_n_steps": 10}), ByteLimits(quota_bytes=4 * UNIT))
    done = plan_before_write(infos, policy, UNIT // 2, None)
    assert done.remove == ()
    lasting = Retention(policy_from({"last": 2, "best": {"monitor": "loss", "k": 1}}), ByteLimits(quota_bytes=4 * UNIT))
    assert plan_before_write(infos, lasting, UNIT, None).remove == (infos[1].id,)


def test_a_disk_without_room_costs_the_oldest_and_nothing_in_vain() -> None:
    """No limit is set: first what the new one pushes out, then the oldest; nothing where that makes too little room."""
    infos = _run(1, 2, 3)
    assert plan_before_write(infos, KeepLast(3), UNIT, UNIT // 2).remove == (infos[0].id,)
    done = plan_before_write(infos, KeepLast(9), UNIT, UNIT // 2)
    assert done.remove == done.gave_way == (infos[0].id,)
    assert plan_before_write(infos, KeepLast(3), UNIT, UNIT // 2).gave_way == ()
    assert plan_before_write(infos, KeepLast(9), 2 * UNIT, UNIT // 2).remove == (infos[0].id, infos[1].id)
    assert plan_before_write(infos, KeepLast(3), 9 * UNIT, UNIT // 2).remove == ()
    assert plan_before_write(infos, KeepLast(2), UNIT, 9 * UNIT).remove == ()


def test_the_best_and_what_is_protected_give_way_last_and_never() -> None:
    """The newest whole one stays as well, and so nothing goes where these are all that there is."""
    infos = _run(1, 2, 3, 4)
    best = policy_from({"last": 9, "best": {"monitor": "loss", "mode": "max", "k": 1}})
    first = max(infos, key=lambda info: info.metrics["loss"])
    others = [info for info in infos[:-1] if info is not first]
    assert plan_before_write(infos, best, UNIT, 0).remove[0] == others[0].id
    pinned = {info.id: "pinned" for info in infos[:-1]}
    assert plan_before_write(infos, KeepLast(9), UNIT, 0, protected=pinned).remove == ()


def test_without_min_free_a_little_stays_free_and_the_newest_is_not_refused_for_it() -> None:
    """One percent of what the run and the free space are together; a limit that was given takes its place."""
    infos = _run(1, 2, 3)
    tight = UNIT + SLACK_BYTES + (3 * UNIT + UNIT + SLACK_BYTES) // 200
    assert plan_before_write(infos, KeepLast(9), UNIT, tight).remove == (infos[0].id,)
    assert plan_before_write(infos[-1:], KeepLast(9), UNIT, tight).short_bytes == 0
    given = Retention(KeepLast(9), ByteLimits(min_free_bytes=1))
    assert plan_before_write(infos, given, UNIT, tight).remove == ()


def test_a_storage_that_is_full_whatever_it_says_costs_one_more() -> None:
    """Files that cannot be made, or a user's quota: no number tells how much is missing."""
    infos = _run(1, 2, 3)
    for free_bytes in (None, 9 * UNIT):
        assert plan_before_write(infos, KeepLast(9), UNIT, free_bytes, full=True).remove == (infos[0].id,)
        assert plan_before_write(infos[-1:], KeepLast(9), UNIT, free_bytes, full=True).remove == ()
    assert plan_before_write(infos, KeepLast(9), 9 * UNIT, UNIT // 2, full=True).remove == ()


def test_a_limit_that_cannot_hold_removes_nothing_and_says_so() -> None:
    """A quota below the newest snapshot: history is not sacrificed for nothing."""
    infos = _run(1, 2, 3)
    done = plan(infos, Retention(KeepAll(), ByteLimits(quota_bytes=UNIT // 2)))
    assert (done.remove, done.short_bytes) == ((), UNIT // 2)
    before = plan_before_write(infos, Retention(KeepAll(), ByteLimits(quota_bytes=UNIT)), UNIT, None)
    assert (before.remove, before.short_bytes) == ((), UNIT + SLACK_BYTES)
