"""Work in the background that no snapshot is charged for counts against the budget."""

from __future__ import annotations

from tests.frequency.rig import Rig


def _first_snapshot(background_seconds: float) -> int:
    rig = Rig(overhead=0.01)
    rig.cadence.background(background_seconds)
    while not rig.go():
        assert rig.step < 100_000
    return rig.step


def test_what_making_the_arena_ready_costs_is_paid_back_by_waiting() -> None:
    """One second at a budget of 1 % is earned in a hundred seconds, which here is a hundred steps."""
    free, charged = _first_snapshot(0.0), _first_snapshot(1.0)
    assert 95 <= charged - free <= 110


def test_only_what_is_new_is_charged() -> None:
    """`background` gets the cost as a total at each boundary, and only the growth is charged."""
    rig = Rig(overhead=0.01)
    for _ in range(10):
        rig.cadence.background(0.5)
        rig.go()
    assert round(rig.cadence.overhead_fraction * (10 - 0.5), 3) == 0.5
