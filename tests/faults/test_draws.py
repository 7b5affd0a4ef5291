"""The draw of a campaign: reproducible, balanced, and nothing left out."""

from __future__ import annotations

from collections import Counter

from tests.faults.draws import ACTIONS, DISK, ENDINGS, FAULTS, NETWORK, PHASES, draw, draws


def test_the_same_seed_draws_the_same_runs() -> None:
    """A run that went wrong can be played again alone; another seed draws other runs."""
    assert draws(100, 7) == draws(100, 7)
    assert draws(100, 7) != draws(100, 8)
    again = draws(100, 7)[41]
    assert draw(41, 7, again.fault, again.phase) == again


def test_every_fault_meets_every_phase_equally_often() -> None:
    """The bar names twelve faults and four phases."""
    assert (len(NETWORK), len(DISK), len(PHASES)) == (7, 5, 4)
    count = Counter((one.fault, one.phase) for one in draws(312, 1))
    assert set(count) == {(fault, phase) for fault in FAULTS for phase in PHASES}
    assert set(count.values()) <= {6, 7}


def test_every_way_of_failing_and_of_ending_is_drawn() -> None:
    """Within the 312 runs of the bar."""
    found = draws(312, 1)
    assert {one.action for one in found if one.on_network} == {one for group in ACTIONS.values() for one in group}
    assert {one.ending for one in found} == set(ENDINGS)
    assert {one.near_lost for one in found} == {True, False}
    assert {len(one.tiers) for one in found} == {1, 2}
    assert all(one.target in one.tiers for one in found)
    assert all((one.target == "s3") == one.on_network for one in found)
