"""The sinks: log lines, and fan-out past failing sinks."""

import dataclasses
import logging

import pytest

from ckpt_engine.observe import events
from ckpt_engine.observe.events import (
    Event,
    FanOutSink,
    IntervalChanged,
    LogSink,
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    level_of,
    line,
)
from tests.observe.test_events import SAMPLES


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def emit(self, event: Event) -> None:
        self.calls += 1
        raise RuntimeError("this sink is broken")


class StillClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 1.7e9


# ------------------------------------------------------------------ log


def test_a_failure_that_repeats_itself_gets_one_full_line(caplog: pytest.LogCaptureFixture) -> None:
    """Another reason gets a full line, as does the same one after a snapshot that became durable; and that gets one."""

    def failed(step: int, why: str = "no space left") -> SnapshotFailed:
        file = f"/run/data/s{step}-r00000-p{7919 * step}.safetensors"
        return SnapshotFailed(f"s{step}", step, "/run", "CKPT301", f"cannot write {file}: {why}", "free space")

    sink = LogSink()
    durable = SnapshotCommitted("s6", 6, "/run", 1, 1, 1.0, 1.0, 0.0, 0.0)
    for event in (failed(1), failed(2), failed(3), failed(4, "quota"), failed(5, "quota"), durable, failed(7, "quota")):
        sink.emit(event)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines[0] == (
        "step 1: snapshot s1 did not become durable on /run: [CKPT301] cannot write "
        "/run/data/s1-r00000-p7919.safetensors: no space left; older snapshots are untouched → free space"
    )
    assert [one.split(":")[0] for one in lines] == ["step 1", "step 4", "step 7"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["step 6: snapshots become durable on /run again, 2 failed"]
    sink.emit(dataclasses.replace(failed(8, "the writer is gone"), snapshot=""))
    assert caplog.messages[-1].startswith("step 8: its snapshot did not become durable on /run: ")
    for step in range(9, 120):
        sink.emit(SnapshotFailed("", step, "/run", "CKPT602", "the writer is gone", "free space"))
    assert [one.split(",")[0] for one in caplog.messages[-2:]] == [
        "step 18: 10 snapshots in a row did not become durable",
        "step 108: 100 snapshots in a row did not become durable",
    ]


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of event is one line of the documented form at its level."""
    with caplog.at_level(logging.DEBUG, logger="ckpt_engine"):
        sink = LogSink()
        for event in SAMPLES:
            sink.emit(event)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "step 5: 1 GB staged, training blocked for 250 ms"),
        ("INFO", "step 5: snapshot id durable on file:///run after 9 s, 1 GB written"),
        (
            "ERROR",
            "step 5: snapshot id did not become durable on file:///run: [CKPT301] no space left; "
            "older snapshots are untouched",
        ),
        ("DEBUG", "step 5: the newest in memory when that was to become durable; what could, is"),
        ("DEBUG", "step 5: snapshot postponed (busy), training continues"),
        ("DEBUG", "2 older snapshots forgotten, 2 GB freed"),
        ("INFO", "step 5: snapshot id durable on s3://b/r too, 1 GB sent in 5 s"),
        ("ERROR", "s3://b/r failed and is tried again later: [CKPT300] the network is down"),
        ("INFO", "s3://b/r works again after 60 s"),
        ("INFO", "step 5: snapshots every 38 steps: ..."),
        ("WARNING", "the writer process died"),
        (
            "WARNING",
            "step 40: the snapshot has the weights of step 30 for group 0 of sgd: the optimizer has stepped, and none "
            "of 12 tensors has changed (w, v, …) → `ckpt diff '/run#a' '/run#b'` shows what has. If these change in "
            "training, old bytes were saved: resume from step 30 or earlier. Else look at the group's gradients, "
            "learning rate and dtype",
        ),
        ("INFO", "ann on node7 asks to save now"),
        ("DEBUG", "step 7: snapshot id is the newest on /run"),
        ("WARNING", "something"),
        ("DEBUG", "of 2 earlier attempts 1 failed"),
    ]


def test_percent_signs_in_messages_are_text() -> None:
    """A line is never a format string."""
    assert line(IntervalChanged(1, 2, "100 %s")) == "step 1: snapshots 100 %s"


def test_unknown_levels_and_kinds_are_logged_all_the_same() -> None:
    """An unknown level counts as info; an unknown kind shows its repr."""
    assert level_of(Notice("LOUD", "x")) == logging.INFO
    assert line(Event()) == "Event()"


# ------------------------------------------------------------------ fan-out


def test_fan_out_reaches_every_sink_in_order() -> None:
    """Sinks can be added later; an event reaches each of them once."""
    first, second = Recorder(), Recorder()
    sink = FanOutSink(first)
    sink.emit(SAMPLES[0])
    sink.add(second)
    sink.emit(SAMPLES[1])
    assert first.events == SAMPLES[:2]
    assert second.events == SAMPLES[1:2]


def test_a_failing_sink_is_disabled_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Training and the other sinks go on; the warning names the sink and carries the cause."""
    before, failing, after = Recorder(), Failing(), Recorder()
    sink = FanOutSink(before, failing, after)
    for event in SAMPLES:
        sink.emit(event)
    assert before.events == after.events == SAMPLES
    assert failing.calls == 1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == ["Failing failed on snapshot_staged and gets no more events"]
    assert warnings[0].exc_info is not None
    assert "this sink is broken" in str(warnings[0].exc_info[1])


def test_keyboard_interrupt_passes_through_fan_out() -> None:
    """An error of a sink does not reach training, but a Ctrl-C does."""

    class Interrupted:
        def emit(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOutSink(Interrupted()).emit(SAMPLES[0])


def test_a_user_sees_an_interval_that_has_changed_tenfold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per tenfold, where no handler shows INFO; each change is in the log."""
    monkeypatch.setattr(events, "LOG", logging.Logger("nowhere"))
    sink = LogSink()
    for step, interval in enumerate((10, 12, 99, 100, 110, 999, 11, 10, 9)):
        sink.emit(IntervalChanged(step, interval, f"every {interval} steps: because"))
    shown = [one.split()[4] for one in capsys.readouterr().err.splitlines()]
    assert shown == ["100", "10"]


def test_a_user_sees_the_first_interval_where_the_budget_costs_more_than_it_saves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One percent for snapshots that block for ten seconds can cost more than a percent of useful work."""
    monkeypatch.setattr(events, "LOG", logging.Logger("nowhere"))
    sink = LogSink()
    sink.emit(IntervalChanged(1, 200, "every 200 steps: set by budget; 1 % more budget = 1.3 % more", 0.013, "budget"))
    sink.emit(
        IntervalChanged(2, 210, "every 210 steps: set by budget; 1 % more budget = 1.3 % more useful work", 0.013)
    )
    said = capsys.readouterr().err
    assert said == "step 1: snapshots every 200 steps (budget) → ckpt explain interval\n"


@pytest.mark.parametrize(("step", "steps", "binding"), [(12, 9, "budget"), (99_999, 9_999, "max_lost_work")])
def test_the_line_of_an_interval_is_short_and_the_log_has_the_rest(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    steps: int,
    binding: str,
) -> None:
    """At most 80 characters where no logging is set up; numbers have separators."""
    event = IntervalChanged(step, steps, f"every {steps} steps: stall 1 s; set by {binding}", 0.1, binding)
    monkeypatch.setattr(events, "LOG", logging.Logger("nowhere"))
    LogSink().emit(event)
    said = capsys.readouterr().err.strip()
    assert len(said) <= 80 and f"every {steps:,} steps" in said and binding in said and "stall" not in said
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(events, "LOG", logging.getLogger("heard"))
        LogSink().emit(event)
    assert "stall 1 s; set by" in caplog.text
