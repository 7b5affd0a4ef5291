"""Tiers that hang instead of failing: the others go on, nothing is torn, and no call waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckpt_engine.copy.job import JobDone, SlotFreed
from ckpt_engine.errors import StorageStalledError
from ckpt_engine.observe.events import (
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    TierDegraded,
    TierRecovered,
)
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import HANGS, WORKING
from tests.support.bounds import bounds
from tests.writer.passing import let_time_pass_where_calls_hang, until_it_is_back
from tests.writer.staged import WAIT_SECONDS, Stage, outcome
from tests.writer.tiered import Run, steps

CODE = StorageStalledError.code


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs is given up at once instead of after half a minute."""
    let_time_pass_where_calls_hang(monkeypatch)


@pytest.fixture
def second(run: Run) -> Iterator[Stage]:
    """A second slot of the arena."""
    made = Stage(slot=1)
    made.jobs = 1000
    yield made
    made.close()


def use(run: Run, stage: Stage) -> None:
    """From now on snapshots are staged in this slot."""
    assert run.client is not None
    stage.attach(run.client)
    run.stage = stage


def until_near_is_back(run: Run) -> None:
    until_it_is_back(f"file://{run.near}")


def save_until_near(run: Run, step: int) -> int:
    """Save until the first tier takes snapshots again, which a call that has hung ends in the way of; the last step."""
    for number in range(step, step + 1000):
        assert run.save(number) is not None
        if run.all(SnapshotCommitted)[-1].tier == str(run.near):
            return number
    raise AssertionError("the first tier is never used again")


@pytest.mark.parametrize("start", ["data/", "snapshots/"])
def test_a_first_tier_that_hangs_is_left_behind(run: Run, second: Stage, start: str) -> None:
    """The snapshot at hand and later ones become durable on the next tier, the slot under the call that hangs is not
    given back before it ends, and then the first tier is used again.
    """
    run.start(run.tier(keep={"last": 5}), keep={"last": 5})
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang("put", start)
    assert run.save(2) is not None
    done = next(m for m in run.heard if isinstance(m, JobDone) and m.job == run.stage.jobs)
    assert done.slot_held
    first = run.stage
    use(run, second)
    for step in (3, 4, 5):
        assert run.save(step) is not None
    tiers = [event.tier for event in run.all(SnapshotCommitted)]
    assert tiers == [str(run.near), *[f"file://{run.far}"] * 4]
    (degraded,) = run.all(TierDegraded)
    assert (degraded.tier, degraded.code) == (f"file://{run.near}", CODE)
    assert [m for m in run.heard if isinstance(m, JobDone)][-1].slot_held is False
    assert run.all(SlotFreed) == []
    assert steps(run.far) == [1, 2, 3, 4, 5]
    end.set()
    freed = run.until(lambda m: isinstance(m, SlotFreed))
    assert isinstance(freed, SlotFreed) and freed.slot == first.slot
    until_near_is_back(run)
    run.save(6)
    run.until(lambda m: isinstance(m, TierRecovered) and m.tier == f"file://{run.near}")
    run.until_copied(6)
    run.close()
    assert steps(run.near) == [1, 6]
    assert len(list((run.near / "data").iterdir())) == 2
    assert steps(run.far)[-1] == 6
    assert run.all(SnapshotFailed) == []


def test_no_more_than_one_thread_hangs_in_the_first_tier(run: Run, second: Stage) -> None:
    """Nothing piles up behind a dead disk, however many snapshots come."""
    run.start()
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang("put", "data/")
    run.save(2)
    use(run, second)
    run.save(3)
    for step in range(4, 12):
        run.save(step)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count(f"ckpt-tier file://{run.near}") == 1
    end.set()


def test_everything_hangs(run: Run, second: Stage) -> None:
    """Then the snapshot fails with an error that says so, later ones do at once, and all is well afterwards."""
    run.start()
    run.save(1)
    run.until_copied(1)
    ends = [run.weather[path].hang("put") for path in (run.near, run.far)]
    run.save(2, ok=False)
    (failed,) = run.all(SnapshotFailed)
    assert failed.code == CODE
    use(run, second)
    for step in (3, 4):
        run.save(step, ok=False)
    assert {event.tier for event in run.all(TierDegraded)} == {f"file://{run.near}", f"file://{run.far}"}
    for end in ends:
        end.set()
    run.until(lambda m: isinstance(m, SlotFreed))
    until_near_is_back(run)
    run.save(5)
    run.until_copied(5)
    run.close()
    assert steps(run.near) == [1, 5]


def test_one_tier_that_hangs_fails_its_snapshot(run: Run, second: Stage) -> None:
    """There is nowhere else to go: the job ends with a clear error, and the next one after the hang is durable."""
    run.start(keep={"last": 5}, tiers=())
    run.save(1)
    end = run.weather[run.near].hang("put", "data/")
    run.save(2, ok=False)
    (failed,) = run.all(SnapshotFailed)
    assert failed.code == CODE and str(run.near) in failed.message
    use(run, second)
    run.save(3, ok=False)
    end.set()
    run.until(lambda m: isinstance(m, SlotFreed))
    until_near_is_back(run)
    run.save(4)
    run.close()
    assert steps(run.near) == [1, 4]


@pytest.mark.parametrize("what", ["list", "get", "delete"])
def test_any_call_to_the_first_tier_may_hang(run: Run, what: str) -> None:
    """A call of retention, or of a copy that reads there, may hang too: the next snapshot goes to the next tier."""
    run.start(run.tier(keep={"last": 3}), keep={"last": 1})
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang(what)
    for step in (2, 3, 4):
        assert run.save(step) is not None
    end.set()
    last = save_until_near(run, 5)
    run.until_copied(last)
    run.close()
    assert steps(run.near) == [last]
    assert run.all(SnapshotFailed) == []


def test_a_read_that_hangs_costs_no_more_than_what_it_could_spare(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot and the next ones are written whole to the first tier, without a wait; one notice says so."""
    monkeypatch.setattr(*bounds("PLAIN", least_bytes=0, least_share=0.0))
    run.start(keep={"last": 9}, tiers=())
    run.save(1)
    end = run.weather[run.near].hang("get", "data/")
    for step in (2, 3, 4):
        assert run.save(step) is not None
    messages = [event for event in run.all(Notice) if "written whole" in event.message]
    assert len(messages) == 1 and "made no progress" in messages[0].message
    assert not end.is_set()
    end.set()
    run.close()
    assert steps(run.near) == [1, 2, 3, 4]


def test_a_read_that_fails_costs_no_more_than_what_it_could_spare(run: Run) -> None:
    """The snapshot is written whole to the first tier."""
    run.start(keep={"last": 9}, tiers=())
    run.save(1)
    run.weather[run.near].down("get")
    assert run.save(2) is not None
    run.weather[run.near].up()
    run.close()
    assert steps(run.near) == [1, 2]


def test_a_further_tier_that_hangs_is_reported_and_shown(run: Run) -> None:
    """Snapshots become durable on the other two tiers; an event and the status name the one that hangs."""
    weather = run.weather[run.far]
    run.start(run.tier(keep={"last": 1}), run.tier(run.third, keep={"last": 1}))
    run.save(1)
    run.until_copied(1)
    run.until_copied(1, run.third)
    end = weather.hang("put", "data/")
    for step in (2, 3):
        run.save(step)
        run.until_copied(step, run.third)
    run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}" and m.code == CODE)
    said = run.state_of(run.far, HANGS)
    assert said.code == CODE and said.copying is not None
    assert len(run.all(TierDegraded)) == 1
    end.set()
    run.until(lambda m: isinstance(m, TierRecovered) and m.tier == f"file://{run.far}")
    run.until_copied(3)
    run.state_of(run.far, WORKING)
    run.close()
    assert steps(run.far) == [3]
    assert [e.step for e in run.all(SnapshotReplicated) if e.tier == f"file://{run.far}"] == [1, 2, 3]


def test_a_copy_goes_without_a_nearer_tier_that_hangs(run: Run) -> None:
    """While reads of the first tier hang the third one gets its copies from the second, and neither is degraded."""
    run.start(run.tier(), run.tier(run.third))
    run.save(1)
    run.until_copied(1)
    run.until_copied(1, run.third)
    ends = [run.weather[run.near].hang("list")]
    run.weather[run.near].down("put")
    assert run.save(2) is not None
    run.until_copied(2, run.third)
    away = {event.tier for event in run.all(TierDegraded)}
    assert away == {f"file://{run.near}"}
    run.weather[run.near].up()
    ends[0].set()
    run.save(3)
    run.until_copied(3)
    run.until_copied(3, run.third)
    run.close()
    assert steps(run.third) == [1, 2, 3]


def test_closing_does_not_wait_for_a_further_tier_that_hangs(run: Run) -> None:
    """What gets on is finished; the one that hangs is named with what it lacks."""
    client = run.start(run.tier(), run.tier(run.third), drain_seconds=0.5)
    run.save(1)
    run.until_copied(1)
    run.until_copied(1, run.third)
    end = run.weather[run.far].hang("put", "data/")
    name = run.save(2)
    run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}")
    run.until_copied(2, run.third)
    run.until_rest(run.third)
    assert client.close(WAIT_SECONDS)
    run.heard += client.poll()
    notice = run.until(lambda m: isinstance(m, Notice) and str(run.far) in m.message)
    assert isinstance(notice, Notice)
    assert name is not None and name in notice.message and CODE in notice.message
    assert str(run.third) not in notice.message
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    run.client = None
    assert steps(run.third) == [1, 2]
    with acquire(LocalStorage(run.near)):
        pass
    end.set()
    with acquire(LocalStorage(run.far), wait_seconds=WAIT_SECONDS):
        pass  # given back once the call had ended


def test_closing_does_not_wait_for_a_first_tier_that_hangs(run: Run) -> None:
    """It is named with the snapshots that it lacks; its lease is given back once the call has ended."""
    client = run.start(drain_seconds=0.2)
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang("put", "data/")
    name = run.save(2)
    assert client.close(WAIT_SECONDS)
    run.heard += client.poll()
    notice = run.until(lambda m: isinstance(m, Notice) and "not everything" in m.message)
    assert isinstance(notice, Notice)
    assert f"file://{run.near}" in notice.message and name is not None and name in notice.message
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    run.client = None
    assert steps(run.far) == [1, 2]
    end.set()
    with acquire(LocalStorage(run.near), wait_seconds=WAIT_SECONDS):
        assert steps(run.near) == [1]


def test_on_failure_fail_holds_for_a_hang_too(run: Run, second: Stage) -> None:
    """A nearest tier that must not be replaced makes the snapshot fail; a further one says that it is fatal."""
    run.start(run.tier(fatal=True), fatal=True)
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang("put", "data/")
    run.save(2, ok=False)
    assert steps(run.far) == [1]
    end.set()
    run.until(lambda m: isinstance(m, SlotFreed))
    until_near_is_back(run)
    end = run.weather[run.far].hang("put", "data/")
    run.save(3)
    event = run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}")
    assert isinstance(event, TierDegraded) and event.fatal and event.code == CODE
    end.set()
    run.until_copied(3)


def test_the_arena_under_a_call_that_hangs_is_never_torn(run: Run, second: Stage) -> None:
    """No tier ever has a mixture of two snapshots: a write that hangs on the nearest tier leaves nothing there, and its
    slot is not filled before it ends.
    """
    run.start(run.tier(keep={"last": 9}), keep={"last": 9})
    run.save(1)
    run.until_copied(1)
    first = run.stage
    for round_ in range(3):
        use(run, first)
        end = run.weather[run.near].hang("put", "data/")
        run.save(10 + 10 * round_)
        use(run, second)
        run.save(11 + 10 * round_)
        already = len(run.all(SlotFreed))
        end.set()
        run.until(lambda m, n=already: isinstance(m, SlotFreed) and len(run.all(SlotFreed)) > n)
        until_near_is_back(run)
        use(run, first)
        run.save(12 + 10 * round_)
        run.until_copied(12 + 10 * round_)
    run.close()
    assert steps(run.near) == [1, 12, 22, 32]
    assert len(list((run.near / "data").iterdir())) == 4
    assert {10, 11, 20, 21, 30, 31} <= set(steps(run.far))


def test_a_job_that_hangs_is_answered_to_all_who_wait(run: Run) -> None:
    """`outcome` comes though the call never ends while anybody looks."""
    client = run.start()
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.near].hang("put", "data/")
    job = run.stage.job(2)
    client.submit(job)
    assert outcome(client, job.job, run.heard).ok
    assert not end.is_set()
    end.set()


def test_a_copy_that_hangs_keeps_no_snapshot_from_its_tier(run: Run) -> None:
    """It may hang because of where it is read: what no nearer tier takes is written there all the same."""
    run.start(run.tier(keep={"last": 9}), keep={"last": 9})
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.far].hang("put", "data/00000002")
    run.save(2)
    run.until(lambda m: isinstance(m, TierDegraded) and m.tier == f"file://{run.far}")
    run.weather[run.near].down("put")
    assert run.save(3) is not None
    run.weather[run.near].up()
    end.set()
    run.until_copied(2)
    run.close()
    assert steps(run.near) == [1, 2]
    assert steps(run.far) == [1, 2, 3]


def test_a_further_tier_whose_direct_write_hangs_is_left_too(run: Run, second: Stage) -> None:
    """Then the tier after it takes the snapshot, in the same slot, and both are used again afterwards."""
    run.start(run.tier(), run.tier(run.third))
    run.save(1)
    run.until_copied(1)
    run.until_copied(1, run.third)
    ends = [run.weather[path].hang("put", "data/") for path in (run.near, run.far)]
    run.save(2)
    use(run, second)
    run.save(3)
    assert [e.tier for e in run.all(SnapshotCommitted)] == [str(run.near), *[f"file://{run.third}"] * 2]
    assert run.all(SlotFreed) == []
    ends[0].set()
    ends[1].set()
    run.until(lambda m: isinstance(m, SlotFreed))
    until_near_is_back(run)
    run.save(4)
    run.until_copied(4)
    run.until_copied(4, run.third)
    run.close()
    assert steps(run.near) == [1, 4]
    assert steps(run.far) == [1, 4]
    assert steps(run.third) == [1, 2, 3, 4]
