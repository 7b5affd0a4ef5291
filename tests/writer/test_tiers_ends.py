"""The start and the end of a writer with several tiers."""

from __future__ import annotations

import pytest

from ckpt_engine.copy.job import TierConfig
from ckpt_engine.errors import StorageError
from ckpt_engine.observe.events import (
    Notice,
    TierDegraded,
)
from ckpt_engine.store import lease as lease_module
from ckpt_engine.store.lease import LocalLease, acquire
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import read_status
from tests.writer.staged import WAIT_SECONDS
from tests.writer.tiered import Run, steps


def test_a_writer_that_takes_over_does_not_wait_for_a_tier(run: Run) -> None:
    """A new writer in the middle of training is ready at once, though a tier hangs."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    run.heard.clear()
    hanging = run.weather[run.far].hang("list")
    run.start()  # would take the survey's time otherwise
    assert not hanging.is_set()
    hanging.set()
    run.save(2)
    run.until_copied(2)


def test_closing_waits_for_copies_but_not_for_a_tier_that_fails(run: Run) -> None:
    """What is under way is finished; after one more failure the writer goes on by itself, and says so."""
    client = run.start(drain_seconds=30.0)
    run.weather[run.far].down("put")
    run.save(1)
    run.until(lambda m: isinstance(m, TierDegraded))
    assert client.close(WAIT_SECONDS)
    run.heard += client.poll()
    notice = run.until(lambda m: isinstance(m, Notice) and " continues it" in m.message)
    assert isinstance(notice, Notice) and str(run.far) in notice.message
    with acquire(LocalStorage(run.near)):
        pass  # the nearest tier is free for the next job already
    run.weather[run.far].up()
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    assert steps(run.far) == [1]
    status = read_status(LocalStorage(run.near))
    assert status is not None and status.ended
    run.client = None


def test_draining_is_bounded(run: Run) -> None:
    """A tier that stays away is given up after `drain_seconds`; its lease is given back."""
    client = run.start(drain_seconds=0.2)
    run.weather[run.far].down("put")
    run.save(1)
    run.until(lambda m: isinstance(m, TierDegraded))
    assert client.close(WAIT_SECONDS)
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    run.client = None
    with acquire(LocalStorage(run.far), wait_seconds=WAIT_SECONDS):
        assert steps(run.far) == []


def test_a_copy_can_be_stopped_in_the_middle(run: Run) -> None:
    """`skip_waiting` ends a copy under way; nothing of it is seen."""
    client = run.start()
    run.weather[run.far].gate.clear()
    run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    client._queue.skip_waiting()
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    client.close(WAIT_SECONDS)
    run.client = None
    assert steps(run.far) == []
    assert list((run.far / "data").glob("*")) == []


def test_a_url_that_nothing_serves_is_refused_at_the_start(run: Run) -> None:
    """A mistake in a further tier is not found out by an outage."""
    with pytest.raises(StorageError, match="no storage for s4://"):
        run.start(TierConfig("s4://bucket/run"))
    with acquire(LocalStorage(run.near)):
        pass


def test_a_lease_that_cannot_be_given_back_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends although the storage fails at the very end, and a notice names the lease."""
    client = run.start()
    run.save(1)
    run.until_copied(1)

    def refuse(_: LocalLease) -> None:
        raise StorageError("the network is down")

    with monkeypatch.context() as broken:
        broken.setattr(LocalLease, "release", refuse)
        assert client.close(WAIT_SECONDS)
    run.client = None
    assert any(isinstance(m, Notice) and "could not be given back" in m.message for m in client.poll())
    for lease in list(lease_module._held):
        lease.release()
