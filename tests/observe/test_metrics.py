"""The numbers of a run."""

from ckpt_engine.observe.events import (
    IntervalChanged,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotSkipped,
    SnapshotStaged,
)
from ckpt_engine.observe.metrics import RunMetrics


class Reading:
    interval_steps: int | None = 38
    overhead_fraction = 0.0075

    def age_of_last_durable(self) -> float:
        return 12.5


def test_numbers_follow_events_and_cadence() -> None:
    """Counters count, gauges show the newest."""
    metrics = RunMetrics(Reading())
    for step in (1, 2, 3):
        metrics.emit(SnapshotStaged("id", step, 0.1 * step, 10))
        metrics.stall_seconds = 0.2 * step
        metrics.emit(SnapshotCommitted("id", step, "t", 100, 60, 9.0 + step, 8.0, 0.1, 0.0))
    metrics.emit(SnapshotFailed("id", 4, "t", "CKPT301", "full"))
    metrics.emit(SnapshotSkipped(5, "busy"))
    metrics.emit(SnapshotSkipped(6, "busy"))
    metrics.emit(IntervalChanged(6, 38, "why"))
    assert metrics.numbers() == {
        "stall_seconds": 0.2 * 3,
        "snapshot_bytes": 10.0,
        "latency_seconds": 12.0,
        "written_bytes": 180.0,
        "committed": 3.0,
        "skipped": 2.0,
        "failed": 1.0,
        "interval_steps": 38.0,
        "overhead_percent": 0.75,
        "age_of_last_durable_seconds": 12.5,
    }


def test_unknown_interval_is_left_out() -> None:
    """Loggers take numbers only: what is not known yet is not there."""
    reading = Reading()
    reading.interval_steps = None
    assert "interval_steps" not in RunMetrics(reading).numbers()
    assert all(isinstance(value, float) for value in RunMetrics(reading).numbers().values())
    assert set(RunMetrics().numbers()) == {
        "stall_seconds",
        "snapshot_bytes",
        "latency_seconds",
        "written_bytes",
        "committed",
        "skipped",
        "failed",
    }


def test_further_tiers_are_counted_if_there_are_any() -> None:
    """Copies, their bytes, and how many of these tiers are unreachable now."""
    metrics = RunMetrics()
    metrics.outlook = lambda: {"tiers": [{"away": True}]}
    metrics.emit(SnapshotReplicated("a", 1, "s3://b/r", 100, 1.0, 2.0, 3.0))
    assert not {"replicated", "sent_bytes", "tiers_away"} & metrics.numbers().keys()
    metrics.outlook = lambda: {"tiers": [{"away": True}, {"away": False}, {"away": True}]}
    numbers = metrics.numbers()
    assert (numbers["replicated"], numbers["sent_bytes"], numbers["tiers_away"]) == (1.0, 100.0, 1.0)


def test_a_logger_gets_six_numbers_or_all() -> None:
    """What the option `log.loggers` says; a number that is not known is left out of both."""
    metrics = RunMetrics(Reading())
    metrics.outlook = lambda: {
        "work_at_risk_seconds": 3,
        "seconds_to_durable": None,
        "stopping": "SIGTERM",
        "tiers": [],
    }
    short, full = metrics.logged("on"), metrics.logged("full")
    assert short == {
        "ckpt/overhead_percent": 0.75,
        "ckpt/interval_steps": 38.0,
        "ckpt/age_of_last_durable_seconds": 12.5,
        "ckpt/work_at_risk_seconds": 3.0,
        "ckpt/failed": 0.0,
    }
    assert full == {f"ckpt/{name}": value for name, value in metrics.numbers().items()}
    assert set(full) - set(short) == {
        f"ckpt/{name}"
        for name in ("stall_seconds", "snapshot_bytes", "latency_seconds", "written_bytes", "committed", "skipped")
    }
