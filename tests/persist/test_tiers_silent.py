"""A further tier that gives no sign holds up neither the start nor the end of a training."""

from __future__ import annotations

import threading

import pytest

from ckpt_engine.observe.events import Notice, SnapshotCommitted
from ckpt_engine.persist import client, fleet, replicate
from ckpt_engine.persist.stall import Signs
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.persist.staged import WAIT_SECONDS
from tests.persist.tiered import Run, steps


@pytest.fixture(autouse=True)
def nobody_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a tier to answer waits for longer than a test may take."""
    monkeypatch.setattr(fleet, "SURVEY_SECONDS", 10 * WAIT_SECONDS)


def closed(run: Run) -> bool:
    assert run.client is not None
    return run.client.close(WAIT_SECONDS)


def test_a_training_starts_although_a_further_tier_is_silent(run: Run) -> None:
    """The nearest one is empty, so that it has a say in which run this is: that is heard in the background."""
    end = run.weather[run.far].hang("list")
    run.start()  # would not return before the tier is waited for no more
    assert not end.is_set()
    job = run.stage.job(1)
    assert run.client is not None
    run.client.submit(job)
    end.set()
    run.until_copied(1)
    assert steps(run.near) == steps(run.far) == [1]


def test_the_run_that_a_further_tier_holds_is_joined_in_the_background(run: Run) -> None:
    """The nearest folder was lost: it is a place of the same run again before anything is there, and numbers go on."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.close()
    record = (run.near / "ckpt.json").read_bytes()
    run.near.rename(run.near.with_name("lost"))
    end = run.weather[run.far].hang("list")
    run.start()
    job = run.stage.job(2)
    assert run.client is not None
    run.client.submit(job)
    assert (run.near / "ckpt.json").read_bytes() != record
    end.set()
    run.until_copied(2)
    assert (run.near / "ckpt.json").read_bytes() == record
    assert [info.seq for info in Repository(LocalStorage(run.far)).list()] == [1, 2]


@pytest.mark.parametrize("what", ["list", "put"])
def test_a_training_ends_although_a_further_tier_is_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is said what is missing there, and the copy goes on by itself once the tier answers."""
    run.start(drain_seconds=WAIT_SECONDS)
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    end = run.weather[run.far].hang(what)
    run.save(2)
    assert run.weather[run.far].hung.wait(WAIT_SECONDS)
    monkeypatch.setattr(replicate, "SILENT_SECONDS", 0.01)
    assert closed(run)
    assert not end.is_set()
    (told,) = [one for one in run.all(Notice) if "not everything is on" in one.message]
    assert f"file://{run.far} (" in told.message and "it does not answer" in told.message
    assert steps(run.near)[-1] == 2
    end.set()
    assert run.client is not None and run.client._worker.join(WAIT_SECONDS)
    assert steps(run.far)[-1] == 2
    run.client = None


def test_a_training_that_ends_before_a_silent_tier_was_heard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has taken is durable on the nearest tier: nobody waits for what the further one has to say."""
    monkeypatch.setattr(replicate, "SILENT_SECONDS", 0.01)
    end = run.weather[run.far].hang("list")
    run.start(drain_seconds=WAIT_SECONDS)
    assert run.client is not None
    run.client.submit(run.stage.job(1))
    assert closed(run)
    assert not end.is_set()
    assert [event.tier for event in run.all(SnapshotCommitted)] == [str(run.near)]
    end.set()
    assert run.client._worker.join(WAIT_SECONDS)
    run.client = None


def test_a_long_wait_for_the_end_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further tier that is slow but gets on is waited for: the line names the tiers."""
    monkeypatch.setattr(client, "TELL_SECONDS", 0.01)
    run.start()
    run.weather[run.far].gate.clear()
    run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    said = threading.Event()
    lines: list[str] = []

    def announce(_: object, line: str) -> None:
        lines.append(line)
        said.set()

    monkeypatch.setattr(client, "announce", announce)
    opener = threading.Thread(target=lambda: said.wait(WAIT_SECONDS) and run.weather[run.far].gate.set())
    opener.start()
    assert closed(run)
    opener.join(WAIT_SECONDS)
    assert lines == [f"waiting for the last snapshots to be written to {run.near} and {run.far}, up to 60 s"]
    assert run.client is not None and run.client._worker.join(WAIT_SECONDS)
    run.client = None
    assert steps(run.far) == [1]


def test_signs_of_a_place_count_only_while_it_is_asked() -> None:
    """One that nobody asks anything is not silent; an answer to one of two requests is a sign, another try is none."""
    now = [0.0]
    signs = Signs(lambda: now[0])
    now[0] = 100.0
    assert signs.silent_seconds == 0.0
    signs.asked()
    now[0] = 105.0
    signs.asked()
    signs.tried()
    assert signs.silent_seconds == 5.0
    signs.answered()
    assert signs.silent_seconds == 0.0
    now[0] = 107.0
    assert signs.silent_seconds == 2.0
    signs.moved(10.0)
    now[0] = 110.0
    assert signs.silent_seconds == 0.0
    signs.answered()
    now[0] = 200.0
    assert signs.silent_seconds == 0.0
