"""What OpenTelemetry sees of a run, through the real SDK."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config.reporting import Status
from ckpt_engine.preempt.status_page import StatusPage
from tests.preempt.test_status_page import seen
from tests.probe.lives import make

READER = InMemoryMetricReader()


@pytest.fixture(autouse=True, scope="module")
def sdk() -> Iterator[None]:
    """The program's own SDK; it can be set once in a process."""
    metrics.set_meter_provider(MeterProvider([READER]))
    yield
    READER.shutdown()


def collected() -> dict[str, Any]:
    """The instruments of the engine that report something, by name."""
    data: Any = READER.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    return {one.name: one for scope in scopes for one in scope.metrics if one.data.data_points}


def shown(**numbers: float) -> StatusPage:
    page = StatusPage(Status(otel=True), seen, lambda: numbers)
    page.start()
    return page


@pytest.mark.long
def test_a_run_that_trains_is_seen(tmp_path: Path) -> None:
    """Its numbers from the first boundary on, with the label run, and nothing once it has ended."""
    job = make()
    with Checkpointer(tmp_path / "run", every_n_steps=2, writer="thread", status={"otel": True}) as ckpt:
        run = ckpt.track(model=job.model, optimizer=job.optimizer, loader=job.loader)
        for indices, targets in job.loader:
            job.optimizer.zero_grad()
            ((job.model(indices) - targets) ** 2).mean().backward()
            job.optimizer.step()
        found = collected()
        steps = run.global_step
    (point,) = found["ckpt.step"].data.data_points
    assert (point.value, dict(point.attributes)) == (steps, {"run": str(tmp_path / "run")})
    assert {"ckpt.overhead_percent", "ckpt.failed", "ckpt.goodput_percent", "ckpt.tier_away"} <= found.keys()
    assert collected() == {}


def test_what_only_grows_is_a_counter() -> None:
    """All else is a gauge; a number that is not known is left out."""
    page = shown(committed=3.0, overhead_percent=0.5)
    try:
        found = collected()
        assert {name for name, one in found.items() if isinstance(one.data, Sum)} == {"ckpt.committed"}
        assert found["ckpt.committed"].data.is_monotonic and found["ckpt.committed"].data.data_points[0].value == 3.0
        assert found["ckpt.overhead_percent"].description.startswith("What snapshots cost")
        assert "ckpt.idle_percent" not in found
        tiers = {dict(point.attributes)["tier"]: point.value for point in found["ckpt.tier_away"].data.data_points}
        assert tiers == {"/run": 0.0, 's3://b/"r"': 1.0}
    finally:
        page.close()
    assert collected() == {}


def test_one_run_after_another_is_seen_once(caplog: pytest.LogCaptureFixture) -> None:
    """Instruments stay for the life of a process; no second one of a name is made, which the SDK would report."""
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0):
            page = shown(overhead_percent=value)
            assert [point.value for point in collected()["ckpt.overhead_percent"].data.data_points] == [value]
            page.close()
            page.close()
    assert caplog.records == []


def test_without_its_package_the_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without it."""
    monkeypatch.setattr("ckpt_engine.preempt.status_page.find_spec", lambda name: None)
    shown().close()
    said = "nothing is shown to otel: opentelemetry is not installed → pip install 'ckpt-engine[otel]'"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert collected() == {}
