"""What a further tier wants: newest first, at its rhythm, and nothing that is obsolete."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.writer.copy_schedule import CopySchedule
from tests.store.samples import info


def shot(
    seq: int, step: int | None = None, created: float = 0.0, loss: float | None = None, **more: Any
) -> SnapshotInfo:
    metrics = {} if loss is None else {"loss": loss}
    base = info(seq, seq * 10 if step is None else step, metrics, f"{seq:08d}-s{0:010d}-00000000")
    return dataclasses.replace(base, created=created or seq * 60.0, **more)


def seqs(infos: list[SnapshotInfo]) -> list[int]:
    return [one.seq for one in infos]


def rhythm_of(seconds: float | None, steps: int | None, keep: dict[str, Any]) -> CopySchedule:
    return CopySchedule(seconds, steps, policy_from(keep))


LAST2 = rhythm_of(None, None, {"last": 2})


def test_the_newest_comes_first() -> None:
    """What retention would not keep there is obsolete and never sent."""
    assert seqs(LAST2.wanted([shot(1), shot(2), shot(3)], [])) == [3, 2]
    assert seqs(LAST2.wanted([shot(1), shot(2), shot(3)], [shot(3)])) == [2]
    assert LAST2.wanted([shot(1), shot(2), shot(3)], [shot(2), shot(3)]) == []


def test_nothing_is_wanted_of_nothing() -> None:
    """An empty tier of an empty run is up to date, and one that is ahead does not go back."""
    assert LAST2.wanted([], []) == []
    assert LAST2.wanted([shot(1)], [shot(2), shot(3)]) == []


def test_a_snapshot_that_lost_components_is_still_the_same_one() -> None:
    """Slimming gives it another id, on the nearest or on a further tier: it is not sent once more."""
    slim = dataclasses.replace(shot(2), id=f"{2:08d}-s{20:010d}-aaaaaaaa")
    rhythm = rhythm_of(None, None, {})
    assert rhythm.wanted([shot(1), slim], [shot(1), shot(2)]) == []
    assert rhythm.wanted([shot(1), shot(2)], [shot(1), slim]) == []


def test_a_tier_that_keeps_everything_wants_everything() -> None:
    """Without rules no snapshot is obsolete, and the newest one still goes first."""
    for keep in ({}, {"last": None}):
        rhythm = rhythm_of(None, None, keep)
        assert seqs(rhythm.wanted([shot(1), shot(2), shot(3)], [shot(2)])) == [3, 1]


def test_what_lasts_is_sent_after_the_newest() -> None:
    """A best snapshot is worth sending although a newer one is there."""
    rhythm = rhythm_of(None, None, {"last": 1, "best": {"monitor": "loss", "mode": "min", "k": 1}})
    near = [shot(1, loss=3.0), shot(2, loss=1.0), shot(3, loss=2.0)]
    assert seqs(rhythm.wanted(near, [])) == [3, 2]
    assert seqs(rhythm.wanted(near, [near[2]])) == [2]
    assert rhythm.wanted(near[:1], [near[2], near[1]]) == []


def test_every_n_steps_takes_one_snapshot_per_stretch() -> None:
    """The first that is there, and after an outage the newest of each stretch that the tier would keep."""
    rhythm = rhythm_of(None, 100, {"last": 5})
    assert seqs(rhythm.wanted([shot(1, 10)], [])) == [1]
    assert rhythm.wanted([shot(2, 90)], [shot(1, 10)]) == []
    assert seqs(rhythm.wanted([shot(3, 101)], [shot(1, 10)])) == [3]
    everything = rhythm_of(None, 100, {})
    near = [shot(i, 30 * i) for i in range(1, 12)]
    assert [one.step for one in everything.wanted(near, [])] == [330, 270, 180, 90]


def test_steps_that_are_repeated_after_a_resume_count_again() -> None:
    """A run that went back to an older snapshot is not silent until it passes the old steps."""
    rhythm = rhythm_of(None, 100, {"last": 5})
    far = [shot(1, 10), shot(2, 110), shot(3, 210)]
    assert seqs(rhythm.wanted([shot(4, 120)], far)) == [4]


def test_every_duration_goes_by_the_time_of_the_snapshots() -> None:
    """The distance to the last one that the tier has decides."""
    rhythm = rhythm_of(600.0, None, {"last": 5})
    far = [shot(1, created=1000.0)]
    assert rhythm.wanted([shot(2, created=1599.0)], far) == []
    assert seqs(rhythm.wanted([shot(2, created=1599.0), shot(3, created=1600.0)], far)) == [3, 2][:1]


def test_a_clock_that_was_set_back_does_not_silence_a_tier() -> None:
    """A newer snapshot with an older time is due."""
    rhythm = rhythm_of(600.0, None, {"last": 5})
    assert seqs(rhythm.wanted([shot(2, created=900.0)], [shot(1, created=1000.0)])) == [2]


@pytest.mark.parametrize("reason", ["end", "signal"])
def test_the_last_snapshot_is_always_due(reason: str) -> None:
    """Nothing comes after it that could be sent instead."""
    rhythm = rhythm_of(600.0, None, {"last": 5})
    assert seqs(rhythm.wanted([shot(2, created=1001.0, reason=reason)], [shot(1, created=1000.0)])) == [2]


SHOTS = st.lists(st.tuples(st.integers(0, 60), st.floats(0, 9)), max_size=12).map(
    lambda rows: [shot(i + 1, step * 10, 1000 + step * 60.0, loss) for i, (step, loss) in enumerate(rows)]
)
KEEPS = st.sampled_from([{}, {"last": 2}, {"last": 1, "best": {"monitor": "loss"}}, {"every_n_steps": 100}])


@settings(deadline=None)
@given(SHOTS, st.data(), KEEPS, st.sampled_from([(None, None), (600.0, None), (None, 100)]))
def test_copying_what_is_wanted_ends(near: list[SnapshotInfo], data: st.DataObject, keep: Any, every: Any) -> None:
    """Sending the first again and again comes to an end, never sends one twice, and leaves nothing wanted."""
    there = [one for one in near if data.draw(st.booleans())]
    rhythm = rhythm_of(*every, keep)
    sent = []
    while wanted := rhythm.wanted(near, there):
        assert wanted[0].id not in {one.id for one in there}
        assert len({one.id for one in wanted}) == len(wanted)
        there.append(wanted[0])
        sent.append(wanted[0].id)
        assert len(sent) <= len(near)
    assert len(set(sent)) == len(sent)
    if near and every == (None, None):
        assert max(there, key=lambda one: one.seq) == near[-1]


def test_a_derived_distance_holds_unless_the_user_has_given_one() -> None:
    """One snapshot a minute is there already; less than a minute between two is not worth a rule."""
    free, fixed = rhythm_of(None, None, {}), rhythm_of(None, 20, {})
    far = [shot(1)]
    assert seqs(free.paced(300.0).wanted([shot(2), shot(5), shot(6)], far)) == [6]
    assert seqs(free.paced(300.0).paced(30.0).wanted([shot(2), shot(5), shot(6)], far)) == [6, 5, 2]
    assert fixed.paced(300.0) == fixed
