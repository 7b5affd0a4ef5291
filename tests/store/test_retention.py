"""The laws of retention, for any run and any policy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.retention import RetentionPlan, plan
from ckpt_engine.store.retention_rules import (
    KeepAge,
    KeepBest,
    KeepEveryNSteps,
    KeepLast,
    KeepPeriods,
    Retention,
    policy_from,
)
from tests.store.samples import info

_metrics = st.dictionaries(
    st.sampled_from(["loss", "acc"]), st.floats() | st.sampled_from([0.0, 1.0, math.nan, math.inf])
)
_times = st.floats(0, 40 * 86_400).map(lambda s: 1_700_000_000 + s) | st.floats(allow_nan=True)
"""Wall clocks: mostly of one month in no order, some broken."""


@st.composite
def runs(draw: st.DrawFn) -> list[SnapshotInfo]:
    steps = draw(st.lists(st.integers(0, 60), max_size=12))
    seqs = sorted(draw(st.sets(st.integers(1, 99), min_size=len(steps), max_size=len(steps))))
    made = [
        dataclasses.replace(
            info(seq, step, draw(_metrics), f"{seq:08d}-s{step:010d}-{seq:08x}"),
            created=draw(_times),
            components=dict.fromkeys(draw(st.sets(st.sampled_from(["model", "optimizer", "loop"]))), 4),
        )
        for seq, step in zip(seqs, steps, strict=True)
    ]
    return draw(st.permutations(made))


_best = st.fixed_dictionaries(
    {"monitor": st.sampled_from(["loss", "acc"]), "mode": st.sampled_from(["min", "max"]), "k": st.integers(1, 4)}
)
keeps = st.fixed_dictionaries(
    {},
    optional={
        "last": st.integers(1, 5),
        "every_n_steps": st.integers(1, 20),
        "hourly": st.integers(1, 5),
        "daily": st.integers(1, 5),
        "weekly": st.integers(1, 3),
        "age": st.floats(1, 20 * 86_400),
        "best": _best,
    },
)


def _after(infos: list[SnapshotInfo], done: RetentionPlan) -> list[SnapshotInfo]:
    return [one for one in infos if one.id not in done.remove]


@given(runs(), keeps, keeps, st.data())
def test_the_laws_of_any_policy(
    infos: list[SnapshotInfo], keep: dict[str, Any], rules: dict[str, Any], data: st.DataObject
) -> None:
    """A plan decides on every snapshot once, with a reason, whatever their order; what it keeps it keeps again."""
    policy = policy_from(keep)
    done = plan(infos, policy)
    assert sorted([*done.keep, *done.remove]) == sorted(one.id for one in infos)
    assert all(done.keep.values())
    assert list(done.remove) == sorted(done.remove), "removal goes from old to new"
    assert max((one.id for one in infos), default=None) not in done.remove, "the newest always stays"
    assert plan(_after(infos, done), policy).remove == ()
    assert plan(data.draw(st.permutations(infos)), policy) == done
    chosen = data.draw(st.sets(st.sampled_from([one.id for one in infos])) if infos else st.just(set()))
    bound = plan(infos, policy, dict.fromkeys(chosen, "pinned"))
    assert set(bound.keep) == set(done.keep) | chosen, "protection only ever keeps more"
    slimming_again_changes_nothing(infos, Retention(policy, components={"optimizer": policy_from(rules)}))


def slimming_again_changes_nothing(infos: list[SnapshotInfo], policy: Retention) -> None:
    """Idempotent by component too; a component is never taken from the newest snapshot or from all of them."""
    first = plan(infos, policy)
    lost = first.slim
    after = [
        dataclasses.replace(one, components={c: n for c, n in one.components.items() if c not in lost.get(one.id, ())})
        for one in _after(infos, first)
    ]
    assert plan(after, policy).slim == {}
    assert all(one.components for one in after if one.id in lost)
    assert max((one.id for one in infos), default=None) not in lost


@given(runs(), st.integers(1, 5), st.integers(1, 20), _best)
def test_each_rule_keeps_what_it_says(infos: list[SnapshotInfo], count: int, n: int, best: dict[str, Any]) -> None:
    """The newest, the first of each stretch of steps, the best; without a rule everything."""
    for nothing in ({}, {"last": None, "best": None}):
        assert plan(infos, policy_from(nothing)).remove == ()
    kept = plan(infos, KeepLast(count)).keep
    assert set(kept) == {one.id for one in sorted(infos, key=lambda one: -one.seq)[:count]}
    every_n_steps_keeps_the_first_of_each_stretch(infos, n)
    best_keeps_the_k_finite_extremes_and_never_a_nan(infos, best)


def best_keeps_the_k_finite_extremes_and_never_a_nan(infos: list[SnapshotInfo], best: dict[str, Any]) -> None:
    """A missing, NaN or infinite value never counts as best; nothing better than a kept one is removed."""
    kept = KeepBest(**best).keep(infos)
    sign = 1 if best["mode"] == "min" else -1
    values = {one.id: one.metrics.get(best["monitor"], math.nan) for one in infos}
    finite = {snapshot: sign * value for snapshot, value in values.items() if math.isfinite(value)}
    assert set(kept) <= set(finite)
    assert len(kept) == min(best["k"], len(finite))
    worst_kept = max((finite[snapshot] for snapshot in kept), default=math.inf)
    assert all(finite[snapshot] >= worst_kept for snapshot in set(finite) - set(kept))


def every_n_steps_keeps_the_first_of_each_stretch(infos: list[SnapshotInfo], n: int) -> None:
    """For each of n, 2n, ... the earliest snapshot at or after it and before the next; the newer of equals."""
    kept = KeepEveryNSteps(n).keep(infos)
    for mark in {one.step // n for one in infos} - {0}:
        stretch = [one for one in infos if one.step // n == mark]
        first = min(stretch, key=lambda one: (one.step, -one.seq))
        assert [one.id for one in stretch if one.id in kept] == [first.id]
    assert not any(one.id in kept for one in infos if one.step < n)


def test_of_equally_good_snapshots_the_newer_is_best() -> None:
    """It has been trained longer."""
    infos = [info(seq, seq, {"loss": 0.5}) for seq in (1, 2, 3)]
    for mode in ("min", "max"):
        assert set(KeepBest("loss", mode, 2).keep(infos)) == {infos[1].id, infos[2].id}


def test_reasons_are_for_people() -> None:
    """A kept snapshot says all its reasons in one line."""
    infos = [info(seq, seq * 10, {"loss": 1.0 / seq}) for seq in (1, 2, 3)]
    done = plan(infos, policy_from({"last": 1, "every_n_steps": 20, "best": {"monitor": "loss", "k": 1}}))
    assert done.keep == {
        infos[1].id: "first from step 20 on",
        infos[2].id: "last 1 of 1; best 1 of 1 by loss (min): 0.333333",
    }
    assert done.remove == (infos[0].id,)


def _taken(*hours: float) -> list[SnapshotInfo]:
    """Snapshots at these hours after Monday, 2024-01-01 00:00 UTC, the newest last."""
    return [
        dataclasses.replace(
            info(seq, seq, snapshot=f"{seq:08d}-s{seq:010d}-00000000"), created=1_704_067_200 + h * 3600
        )
        for seq, h in enumerate(hours, 1)
    ]


def test_the_ladder_keeps_the_newest_of_each_period_that_has_one() -> None:
    """Hours, days and weeks are UTC; empty ones do not count; weeks begin on Mondays."""
    infos = _taken(0.1, 0.9, 1.5, 30, 30.2, 24 * 6.9, 24 * 7.1)
    ids = [one.id for one in infos]
    hours = KeepPeriods("hour", 3).keep(infos)
    assert list(hours) == [ids[6], ids[5], ids[4]]
    assert hours[ids[6]] == "hour of 2024-01-08 02:00 (1 of 3)"
    assert set(KeepPeriods("day", 9).keep(infos)) == {ids[2], ids[4], ids[5], ids[6]}
    weeks = KeepPeriods("week", 9).keep(infos)
    assert weeks == {ids[6]: "week of 2024-01-08 (1 of 9)", ids[5]: "week of 2024-01-01 (2 of 9)"}


def test_age_counts_from_the_newest_snapshot_not_from_now() -> None:
    """A run that was stopped for a year loses nothing; a broken clock does not either."""
    infos = _taken(0, 5, 10)
    assert set(KeepAge(5 * 3600.0).keep(infos)) == {infos[1].id, infos[2].id}
    broken = [*infos, dataclasses.replace(info(9), created=math.inf)]
    assert len(KeepAge(3600.0).keep(broken)) == 4
    assert KeepPeriods("day", 3).keep([broken[-1]]) == {}


def test_components_go_from_old_snapshots_only() -> None:
    """The newest that have the component keep it; the newest snapshot, and pinned ones, stay as they are."""
    infos = [dataclasses.replace(one, components={"model": 4, "optimizer": 8}) for one in _taken(1, 2, 3, 4)]
    ids = [one.id for one in infos]
    policy = policy_from({"last": 4, "components": {"optimizer": {"last": 2}}})
    assert plan(infos, policy).slim == {ids[0]: ("optimizer",), ids[1]: ("optimizer",)}
    assert plan(infos, policy, {ids[0]: "pinned"}).slim == {ids[1]: ("optimizer",)}
    slimmed = [dataclasses.replace(one, components={"model": 4}) for one in infos[:2]] + infos[2:]
    assert plan(slimmed, policy).slim == {}
    both = policy_from({"last": 4, "components": {"optimizer": {"last": 1}, "model": {"last": 1}}})
    assert plan(infos, both).slim == {}
