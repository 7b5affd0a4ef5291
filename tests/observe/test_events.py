"""Events cross the process boundary and keep their meaning."""

import dataclasses
import json

import pytest

from ckpt_engine.observe import events
from ckpt_engine.observe.events import Event

SAMPLES: list[Event] = [
    events.SnapshotStaged("id", 5, 0.25, 10**9),
    events.SnapshotCommitted("id", 5, "file:///run", 10**9, 10**9, 9.0, 8.0, 0.2, 1.7e9),
    events.SnapshotFailed("id", 5, "file:///run", "CKPT301", "no space left"),
    events.MemoryFlushed(5, 70.0),
    events.SnapshotSkipped(5, "busy"),
    events.SnapshotsForgotten(("a", "b"), 2 * 10**9),
    events.SnapshotReplicated("id", 5, "s3://b/r", 10**9, 5.0, 12.0, 1.7e9),
    events.TierDegraded("s3://b/r", "CKPT300", "the network is down", True),
    events.TierRecovered("s3://b/r", 60.0),
    events.IntervalChanged(5, 38, "every 38 steps: ..."),
    events.WriterLost("the writer process died"),
    events.StaleSnapshot("b", 40, "a", 30, "/run", "group 0 of sgd", "weights", ("w", "v"), 12),
    events.Requested("save", "ann on node7"),
    events.SnapshotFound("id", 7, "/run"),
    events.Notice("WARNING", "something"),
    events.AttemptsFound((60.0, 5.0), ("machine", ""), 1.5),
]


def test_every_kind_has_a_sample_here() -> None:
    """The tests of this folder see each kind of event there is."""
    assert {type(event) for event in SAMPLES} == set(events.KINDS.values())


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.name)
def test_json_round_trip(event: Event) -> None:
    """An event is the same after JSON, tuples included."""
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event


def test_unknown_kind_is_refused() -> None:
    """A message of a later version is not guessed at."""
    with pytest.raises(KeyError):
        events.from_json({"event": "from_the_future"})


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.name)
def test_events_are_values(event: Event) -> None:
    """No sink can change an event."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(event)[0].name, "changed")
