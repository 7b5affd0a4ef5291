"""Tiers that fail are reported once, left out, and used again; the others go on."""

from __future__ import annotations

import pytest

from ckpt_engine.observe.events import (
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    TierDegraded,
    TierRecovered,
)
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import secondary_tiers
from ckpt_engine.writer.run_records import AWAY, WORKING
from tests.store.samples import save
from tests.writer.staged import WAIT_SECONDS, check_all
from tests.writer.tiered import Run, same_files, steps


def test_a_failing_tier_is_reported_once_and_catches_up_newest_first(run: Run) -> None:
    """Snapshots go on; when it is back it gets the newest one, and not the ones that are obsolete by then."""
    run.start(run.tier(keep={"last": 2}), keep={"last": 3})
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down()
    for step in (2, 3, 4, 5):
        run.save(step)
        run.until(lambda m: isinstance(m, TierDegraded))
    assert steps(run.near) == [3, 4, 5]
    (degraded,) = run.all(TierDegraded)
    assert (degraded.tier, degraded.code, degraded.fatal) == (f"file://{run.far}", "CKPT300", False)
    assert "the network is down" in degraded.message
    assert run.all(SnapshotFailed) == []
    assert run.state_of(run.far, AWAY).code == "CKPT300"
    run.state_of(run.near, WORKING)
    run.weather[run.far].up()
    run.until_copied(5)
    run.until(lambda m: isinstance(m, TierRecovered) and m.away_seconds > 0)
    run.until_copied(4)
    run.close()
    assert steps(run.far) == [4, 5]
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 5, 4]


@pytest.mark.parametrize("what", ["put", "list", "delete"])
def test_every_operation_of_a_tier_may_fail(run: Run, what: str) -> None:
    """While an operation fails on a further tier, the nearest gets all snapshots; later the further one catches up."""
    run.start(run.tier(keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down(what)
    run.save(2)
    if what == "delete":
        run.until_copied(2)
    else:
        run.until(lambda m: isinstance(m, TierDegraded))
    run.weather[run.far].up()
    run.save(3)
    run.until_copied(3)
    run.close()
    assert steps(run.near) == [1, 2, 3]
    assert steps(run.far) == [3]


def test_nothing_waits_for_a_tier_that_hangs(run: Run) -> None:
    """Snapshots become durable on the nearest tier while a copy hangs; then only the newest of them is copied."""
    weather = run.weather[run.far]
    run.start(run.tier(keep={"last": 1}))
    weather.gate.clear()
    run.save(1)
    assert weather.reached.wait(WAIT_SECONDS)
    for step in (2, 3, 4):
        run.save(step)
    assert run.all(SnapshotReplicated) == []
    run.state_of(run.far, WORKING, copying=True)
    weather.gate.set()
    run.until_copied(4)
    run.close()
    assert [event.step for event in run.all(SnapshotReplicated)] == [1, 4]


def test_when_the_nearest_tier_fails_the_next_one_takes_its_place(run: Run) -> None:
    """A snapshot is durable if any tier takes it; the failing nearest tier is reported once, and used again later."""
    run.start(run.tier(keep={"last": 2}), keep={"last": 5})
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    for step in (2, 3, 4):
        assert run.save(step) is not None
    assert [event.tier for event in run.all(SnapshotCommitted)] == [str(run.near), *[f"file://{run.far}"] * 3]
    assert [event.tier for event in run.all(TierDegraded)] == [f"file://{run.near}"]
    assert run.all(SnapshotFailed) == []
    run.weather[run.near].up()
    run.save(5)
    run.until(lambda m: isinstance(m, TierRecovered) and m.tier == f"file://{run.near}")
    run.until_copied(5)
    run.close()
    assert steps(run.near) == [1, 5]
    assert steps(run.far) == [4, 5]


def test_a_snapshot_fails_when_no_tier_takes_it(run: Run) -> None:
    """The error is that of the nearest tier."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    run.weather[run.far].down("put")
    run.save(2, ok=False)
    (failed,) = run.all(SnapshotFailed)
    assert failed.tier == str(run.near)
    assert {event.tier for event in run.all(TierDegraded)} == {f"file://{run.near}", f"file://{run.far}"}


def test_on_failure_fail_keeps_a_snapshot_from_going_elsewhere(run: Run) -> None:
    """A nearest tier that must not be replaced makes the snapshot fail."""
    run.start(run.tier(fatal=True), fatal=True)
    run.save(1)
    run.until_copied(1)
    run.weather[run.near].down("put")
    run.save(2, ok=False)
    run.weather[run.near].up()
    run.weather[run.far].down()
    run.save(3)
    event = run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}")
    assert isinstance(event, TierDegraded) and event.fatal


def test_a_place_of_another_run_is_left_alone(run: Run) -> None:
    """The other run's snapshots and record stay as they are, and an event says that the tier failed."""
    other = Repository(LocalStorage(run.far))
    theirs = save(other, 7)
    save(Repository(LocalStorage(run.near)), 1)
    before = {p: p.read_bytes() for p in run.far.rglob("*") if p.is_file() and p.name != names.LEASE}
    run.start()
    run.save(8)
    event = run.until(lambda m: isinstance(m, TierDegraded))
    assert isinstance(event, TierDegraded) and event.code == "CKPT402"
    run.close()
    assert {p: p.read_bytes() for p in before} == before
    assert [one.id for one in other.list()] == [theirs]


def test_a_lease_held_by_another_job_is_waited_for(run: Run) -> None:
    """Two jobs never write one place: the tier is away until the other one is done."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    run.heard.clear()
    with acquire(LocalStorage(run.far)):
        run.start()
        run.save(2)
        event = run.until(lambda m: isinstance(m, TierDegraded))
        assert isinstance(event, TierDegraded) and event.code == "CKPT500"
        assert steps(run.far) == [1]
    run.until_copied(2)


def test_a_tier_whose_folder_is_removed_starts_again(run: Run) -> None:
    """The tier gets the newest snapshot in a new folder."""
    run.start(run.tier(keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    for path in sorted(run.far.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.save(2)
    run.until_copied(2)
    run.close()
    assert steps(run.far) == [2]


def test_a_nearest_folder_that_is_removed_is_made_again(run: Run) -> None:
    """A disk that was mounted again is a place of the run at the next snapshot; numbers go on."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    run.near.rename(run.near.with_name("gone"))
    run.save(2)
    run.until_copied(2)
    run.save(3)
    run.until_copied(3)
    run.close()
    notes = [one.message for one in run.heard if isinstance(one, Notice) and "was removed" in one.message]
    assert notes == [
        f"{run.near} was removed while it was written: it is made again, and the snapshots it had are gone"
    ]
    assert [(i.seq, i.step) for i in check_all(run.near)] == [(2, 2), (3, 3)]
    assert [(i.seq, i.step) for i in check_all(run.far)] == [(1, 1), (2, 2), (3, 3)]
    assert same_files(run.near, run.far, [names.RECORD])


@pytest.mark.parametrize("record_is_put", [False, True])
def test_a_nearest_folder_that_fails_while_it_is_made_again_is_one_at_the_next_snapshot(
    run: Run, record_is_put: bool
) -> None:
    """The first time it fails when the lease is taken already; then all of it is done again, and room is made."""
    weather = run.weather[run.near]
    run.start(keep={"quota": 230_000})
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    run.near.rename(run.near.with_name("gone"))
    if record_is_put:
        weather.after_put = lambda _: weather.down("get")
    else:
        weather.down("put")
    run.save(2)
    assert not list(run.near.glob("snapshots/*"))
    weather.after_put = lambda _: None
    weather.up()
    for step in (3, 4, 5):
        run.save(step)
    run.close()
    assert steps(run.near) == [4, 5]
    assert same_files(run.near, run.far, [names.RECORD])


def test_numbers_leave_room_for_a_tier_that_does_not_answer(run: Run) -> None:
    """What it may have must not look newer than what is written now."""
    run.weather[run.far].down()
    run.start()
    run.save(1)
    assert check_all(run.near)[0].seq == 1 + secondary_tiers.UNKNOWN_SEQ_GAP
    run.save(2, parent="00999999-s0000000009-00000000")
    assert check_all(run.near)[-1].seq == 1_000_000
