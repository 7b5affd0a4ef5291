"""A further tier that gives no sign delays neither the start nor the end of a training."""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.observe import events
from ckpt_engine.observe.events import Event, Notice, SnapshotCommitted, TierDegraded
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.watchdog import ResponsivenessProbe
from ckpt_engine.writer import client, replicate, secondary_tiers
from tests.writer.staged import WAIT_SECONDS
from tests.writer.tiered import Run, steps


@pytest.fixture(autouse=True)
def no_wait_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the answer of a tier lasts longer than a test may take: a test that waits fails."""
    monkeypatch.setattr(secondary_tiers, "SURVEY_SECONDS", 10 * WAIT_SECONDS)


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


def test_a_training_starts_before_the_library_of_a_further_tier_is_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of object stores are slow to import, above all at the low priority of a writer."""
    imported, opened = threading.Event(), secondary_tiers.open_storage

    def opens(*args: Any) -> Any:
        assert imported.wait(WAIT_SECONDS)
        return opened(*args)

    monkeypatch.setattr(secondary_tiers, "open_storage", opens)
    run.start()
    assert not imported.is_set()
    imported.set()
    run.save(1)
    run.until_copied(1)


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
    (notice,) = [one for one in run.all(Notice) if "not everything is on" in one.message]
    assert f"file://{run.far} (" in notice.message and "it does not answer" in notice.message
    assert steps(run.near)[-1] == 2
    end.set()
    assert run.client is not None
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    assert steps(run.far)[-1] == 2
    run.client = None


def test_a_training_that_ends_before_a_silent_tier_was_heard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snapshots are durable on the nearest tier: the end does not wait for the answer of the further one."""
    monkeypatch.setattr(replicate, "SILENT_SECONDS", 0.01)
    end = run.weather[run.far].hang("list")
    run.start(drain_seconds=WAIT_SECONDS)
    assert run.client is not None
    run.client.submit(run.stage.job(1))
    assert closed(run)
    assert not end.is_set()
    assert [event.tier for event in run.all(SnapshotCommitted)] == [str(run.near)]
    end.set()
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.client = None


class Waits:
    """The trainer ends while a copy stands still that gives signs, and what is said meanwhile is in `lines`.

    Args:
        on_line: called after each line that is announced.
    """

    def __init__(
        self,
        run: Run,
        monkeypatch: pytest.MonkeyPatch,
        on_line: Callable[[], object],
        end_wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.lines: list[str] = []
        self._on_line = on_line
        monkeypatch.setattr(client, "announce", self._announce)
        monkeypatch.setattr(secondary_tiers, "TELL_SECONDS", 0.0)
        monkeypatch.setattr(replicate, "RECENT_SECONDS", 10 * WAIT_SECONDS)
        monkeypatch.setattr(replicate, "SILENT_SECONDS", 10 * WAIT_SECONDS)
        run.start(drain_seconds=WAIT_SECONDS, end_wait_seconds=end_wait_seconds)
        run.weather[run.far].gate.clear()
        run.save(1)
        assert run.weather[run.far].reached.wait(WAIT_SECONDS)

    def _announce(self, _: object, line: str) -> None:
        self.lines.append(line)
        self._on_line()


def is_copied_at_last(run: Run) -> None:
    assert steps(run.far) == []
    run.weather[run.far].gate.set()
    assert run.client is not None
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.client = None
    assert steps(run.far) == [1]


def test_a_long_wait_for_copies_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for, how much is left, how long at most, and how to go on without; in one line."""
    waits = Waits(run, monkeypatch, run.weather[run.far].gate.set)
    assert closed(run)
    (line,) = waits.lines
    left = r"waiting for the last copies to file://\S+/far \(1 snapshot left, [\d.]+ kB\), up to (60|59) s "
    assert re.match(
        left + r"\(wait_at_end\) or until Ctrl-C; what is missing then: .* and then the next run does$", line
    )
    assert not [one for one in run.all(Notice) if "not everything" in one.message]
    assert run.client is not None
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.client = None
    assert steps(run.far) == [1]


def test_what_a_long_wait_leaves_was_said_when_it_began(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line names what is waited for, for how long, and who goes on then; the rest is for those who ask."""
    now = [0.0]
    monkeypatch.setattr(secondary_tiers, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    waits = Waits(run, monkeypatch, lambda: now.append(now.pop() + 0.6 * WAIT_SECONDS), WAIT_SECONDS / 2)
    assert closed(run)
    assert len(waits.lines) == 1
    (left,) = run.all(Notice)
    assert left.message.startswith(f"not everything is on file://{run.far} (lacks ")
    assert events.level_of(left) == logging.INFO
    is_copied_at_last(run)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_the_end_waits_for_copies_as_long_as_the_option_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """What is missing then is said, and copied all the same."""
    run.start(drain_seconds=WAIT_SECONDS, end_wait_seconds=seconds)
    monkeypatch.setattr(replicate, "SILENT_SECONDS", 10 * WAIT_SECONDS)
    run.weather[run.far].gate.clear()
    newest = run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    assert closed(run)  # would fail after all its time
    (note,) = run.all(Notice)
    assert note.message.startswith(
        f"not everything is on file://{run.far} (lacks {newest}); the writer thread continues"
    )
    is_copied_at_last(run)


@pytest.mark.parametrize("how", ["Ctrl-C", "a stop that was noted"])
def test_ctrl_c_ends_the_wait_for_copies(run: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nothing is raised: the training was complete. Where the signal was only noted, the trainer says so."""
    interrupts = how == "Ctrl-C"
    main = threading.main_thread().ident
    assert main is not None
    # A trainer that ran in this process before may have left another handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        waits = Waits(run, monkeypatch, lambda: interrupts and signal.pthread_kill(main, signal.SIGINT))
        monkeypatch.setattr(client, "TELL_SECONDS", WAIT_SECONDS if interrupts else 0.0)
        assert run.client is not None
        assert run.client.close(WAIT_SECONDS, hurries=lambda _: not interrupts)
    except KeyboardInterrupt:
        pytest.fail("it is raised")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupts or len(waits.lines) == 1
    is_copied_at_last(run)


def test_an_end_without_time_says_that_copies_are_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop leaves less than the tier needs to tell what it lacks."""
    run.start(drain_seconds=WAIT_SECONDS)
    run.weather[run.far].gate.clear()
    run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    monkeypatch.setattr(client, "TELL_SECONDS", 0.0)
    assert run.client is not None
    assert run.client.close(WAIT_SECONDS, hurries=lambda _: True)
    assert [one.message for one in run.all(Notice)] == [
        "not everything is on the further tiers yet; the writer thread continues it as long as this process lives, "
        "and then the next run does"
    ]
    is_copied_at_last(run)


def test_what_was_not_copied_at_the_end_the_next_run_copies(run: Run) -> None:
    """The writer was killed with the machine's job, say."""
    run.start(drain_seconds=WAIT_SECONDS, end_wait_seconds=0.0)
    run.weather[run.far].gate.clear()
    run.save(1)
    assert run.weather[run.far].reached.wait(WAIT_SECONDS)
    assert closed(run)
    assert run.client is not None
    run.client._queue.skip_waiting()
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.weather[run.far].gate.set()
    assert steps(run.far) == []
    run.start()
    run.until_copied(1)


def test_what_fails_at_the_end_is_said_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about what is missing says why."""
    run.start(drain_seconds=1.0)
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    begun = replicate.Replicator.finish

    def finish(replicator: replicate.Replicator) -> None:
        run.weather[run.far].down("put")  # first: the copy begins at once
        begun(replicator)

    monkeypatch.setattr(replicate.Replicator, "finish", finish)
    turn = replicate.Replicator._turn  # not before the end, also where the time of a regular look comes
    monkeypatch.setattr(replicate.Replicator, "_turn", lambda one: turn(one) if one._finishing else None)
    run.save(2)
    assert closed(run)
    heard = [message for message in run.all(Event) if events.level_of(message) >= logging.WARNING]
    assert [events.line(message).partition(" (lacks")[0] for message in heard] == [
        f"not everything is on file://{run.far}"
    ]
    assert "CKPT30" in events.line(heard[0])
    assert run.client is not None
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.client = None


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_tier_that_fails_in_the_middle_has_one_line_then_and_one_at_the_end_if_something_is_missing(
    run: Run, comes_back: bool
) -> None:
    """The first says what is wrong. The last one, which may come days later, says what is not there, and why."""
    run.start(drain_seconds=0.01)
    run.save(1)
    run.until_copied(1)
    run.weather[run.far].down("put")
    for step in (2, 3):
        newest = run.save(step)
        failed = run.until(lambda m: isinstance(m, TierDegraded))
    if comes_back:
        run.weather[run.far].up()
        run.save(4)
        run.until_copied(4)
        run.until_rest()
    assert closed(run)
    heard = [message for message in run.all(Event) if events.level_of(message) >= logging.WARNING]
    assert heard[0] is failed
    left = [events.line(message) for message in heard[1:]]
    assert [one.startswith(f"not everything is on file://{run.far} (lacks {newest}") for one in left] == [True][
        comes_back:
    ]
    assert all("CKPT30" in one for one in left)
    assert run.client is not None
    run.client._queue.join(WAIT_SECONDS)
    assert not run.client._queue.is_alive()
    run.client = None


def test_ranks_that_wait_for_a_silent_tier_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest tier is empty, and all ranks have to know which run this is before they start."""
    monkeypatch.setattr(secondary_tiers, "TELL_SECONDS", 0.0)
    end = run.weather[run.far].hang("list")
    lines: list[str] = []

    def heard(event: Event) -> None:
        lines.append(events.line(event))
        end.set()

    config = WriterConfig(url=str(run.near), tiers=(run.tier(),))
    near = LocalStorage(run.near)
    made = secondary_tiers.SecondaryTiers(config, heard)
    made.place(near, LeaseHolder.current())
    made.open()
    made.join_run(Repository(near), say=True)
    assert lines == [
        f"waiting for file://{run.far} to say which run this is, up to {secondary_tiers.SURVEY_SECONDS:.0f} s: "
        f"file://{run.near} is empty"
    ]
    made.stop()


def test_what_is_stopped_before_it_starts_copies_nothing(run: Run) -> None:
    """A trainer may be gone before the tiers are opened, which takes long."""
    made = secondary_tiers.SecondaryTiers(WriterConfig(url=str(run.near), tiers=(run.tier(),)), lambda _: None)
    near = LocalStorage(run.near)
    made.place(near, LeaseHolder.current())
    made.stop()
    made.open()
    made.join_run(Repository(near))
    made.start()
    (one,) = made.replicators
    one.join(WAIT_SECONDS)
    assert not one.is_alive()


def test_signs_of_a_place_count_only_while_it_is_asked() -> None:
    """A place without a request is not silent; an answer to one of two requests is a sign, another try is none."""
    now = [0.0]
    signs = ResponsivenessProbe(lambda: now[0])
    now[0] = 100.0
    assert signs.silent_seconds == 0.0

    def another() -> None:
        signs.tried()
        assert signs.silent_seconds == 5.0

    def one() -> None:
        now[0] = 105.0
        signs.during(another)
        assert signs.silent_seconds == 0.0
        now[0] = 107.0
        assert signs.silent_seconds == 2.0
        signs.moved(10.0)
        now[0] = 110.0
        assert signs.silent_seconds == 0.0

    signs.during(one)
    now[0] = 200.0
    assert signs.silent_seconds == 0.0
