"""Shows the numbers of a run to other programs, in the forms that they read."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from socketserver import ThreadingMixIn
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ckpt_engine.config.reporting import Status
from ckpt_engine.observe.events import LOG, LOGGER_NAME
from ckpt_engine.observe.run_times import RunSpent

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

Readings = list[tuple[str, float, dict[str, str]]]
"""Numbers of a run by name, with the labels `run` and, of a tier, `tier`: their URLs."""
_END_SECONDS = 10.0
_COUNTERS = frozenset({"committed", "failed", "replicated", "sent_bytes", "skipped", "written_bytes"})
"""Numbers that only grow while a process lives."""
_MEANINGS = {name: f"Wall time of the run, {name}." for name in RunSpent().numbers()} | {
    "age_of_last_durable_seconds": "Time since the newest durable snapshot was taken.",
    "committed": "Snapshots that became durable since the start of the process.",
    "durable_step": "Step of the newest durable snapshot.",
    "failed": "Snapshots that did not become durable since the start of the process.",
    "goodput_percent": "Share of wall time that was training and was not lost, over all attempts.",
    "idle_percent": "Share of wall time in which ranks waited for each other because of snapshots.",
    "interval_steps": "Steps between snapshots.",
    "latency_seconds": "Time from the newest snapshot until it was durable.",
    "overhead_percent": "What snapshots cost, as a share of the training time without them.",
    "replicated": "Copies to further tiers since the start of the process.",
    "resume_exact": "1: the steps that the resume repeated are equal; 0: one is different.",
    "seconds_to_durable": "Time that a stop would need now.",
    "sent_bytes": "Bytes sent to further tiers since the start of the process.",
    "skipped": "Snapshots that were postponed since the start of the process.",
    "snapshot_bytes": "Size of the newest snapshot.",
    "snapshots_in_flight": "Snapshots that were taken and are not durable yet.",
    "stall_seconds": "Time that the newest snapshot has blocked training.",
    "step": "The last finished training step.",
    "stopping": "1: somebody has asked the run to stop.",
    "tier_age_seconds": "Time since the newest snapshot on the tier was taken.",
    "tier_away": "1: the tier is unreachable.",
    "tier_bytes_per_second": "Measured rate of writing to the tier.",
    "tier_newest_step": "Step of the newest snapshot on the tier.",
    "tiers_away": "Further tiers that are unreachable.",
    "work_at_risk_seconds": "Training time that a kill now would cost.",
    "work_at_risk_steps": "Steps that a kill now would cost.",
    "written_bytes": "Bytes written to the nearest tier since the start of the process.",
}
"""All numbers that a run can have."""
_of_runs: dict[str, Callable[[], Readings]] = {}
"""What the runs of this process show to OpenTelemetry, by the URL of their nearest tier."""


def prometheus(rows: Readings) -> bytes:
    """All of them in Prometheus' text format, named `ckpt_...`, through a registry of our own."""
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, value, labels in rows:
        family = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
        made = families.setdefault(name, family(f"ckpt_{name}", _MEANINGS[name], labels=list(labels)))
        made.add_metric(list(labels.values()), value)
    return generate_latest(cast(Any, SimpleNamespace(collect=families.values)))


def _observed(name: str, _options: CallbackOptions) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for source in list(_of_runs.values()):
        yield from (Observation(value, labels) for found, value, labels in source() if found == name)


@cache
def _make_instruments() -> None:
    """Once in a process, as instruments cannot be removed; without an SDK of the program they do nothing."""
    from opentelemetry.metrics import get_meter

    meter = get_meter(LOGGER_NAME)
    for name, meaning in _MEANINGS.items():
        make = meter.create_observable_counter if name in _COUNTERS else meter.create_observable_gauge
        make(f"ckpt.{name}", [partial(_observed, name)], description=meaning)


@dataclass(eq=False)
class StatusPage:
    """Shows how a run stands from `start` to `close`. Neither waits for training, nor does training wait for it.

    The file is replaced in one step and not synced: it is for schedulers on the same machine or file system. What
    cannot be written or served is reported once, and the run continues.

    Args:
        options: what to show where.
        outlook: of the moment; called on threads.
        numbers: more numbers of the moment; called on threads.
    """

    _options: Status
    _outlook: Callable[[], dict[str, Any]]
    _numbers: Callable[[], Mapping[str, float]]
    _ending: threading.Event = field(default_factory=threading.Event, init=False)
    _failed: bool = field(default=False, init=False)
    _ends: ExitStack = field(default_factory=ExitStack, init=False)
    _owner: int = field(default_factory=os.getpid, init=False)

    def start(self) -> None:
        """Start what the options ask for."""
        port, otel = self._options.port, self._options.otel
        for is_wanted, package, extra in ((port, "prometheus_client", "prometheus"), (otel, "opentelemetry", "otel")):
            if is_wanted and find_spec(package) is None:
                LOG.warning(
                    "nothing is shown to %s: %s is not installed → pip install 'ckpt-engine[%s]'", extra, package, extra
                )
        if self._options.file is not None:
            self._run(self._write_again_and_again, "ckpt-board-file")
        if otel and find_spec("opentelemetry") is not None:
            _make_instruments()
            run = self._outlook()["tiers"][0]["url"]
            _of_runs[run] = self.readings
            self._ends.callback(_of_runs.pop, run, None)
        if port is not None:
            try:
                server = make_server(self._options.host, port, self._serve, _Server, _Handler)
            except (OSError, UnicodeError) as err:  # the second one: no name of a machine
                LOG.warning("no metrics at %s:%d: %s", self._options.host, port, getattr(err, "strerror", None) or err)
                return
            self._run(server.serve_forever, "ckpt-board-page")
            self._ends.callback(server.server_close)
            self._ends.callback(server.shutdown)

    def close(self) -> None:
        """Say in the file that the run has ended, and stop serving. Idempotent."""
        if os.getpid() == self._owner:
            self._ending.set()
            self._ends.close()

    def status(self) -> dict[str, Any]:
        """What the file and `/status` say: the outlook, who says it, when (wall-clock seconds), and if it is over."""
        return {
            "time": time.time(),
            "pid": self._owner,
            "ended": self._ending.is_set(),
            **self._outlook(),
        }

    def readings(self) -> Readings:
        """Everything that is known. Each row has the nearest tier's URL as its `run`."""
        found = self._outlook()
        tiers, run = found["tiers"], {"run": found["tiers"][0]["url"]}
        values = {**self._numbers(), **found, "stopping": found["stopping"] is not None}
        rows: list[tuple[str, Any, dict[str, str]]] = [(name, values.get(name), run) for name in _MEANINGS]
        rows += [
            (f"tier_{name}", value, {**run, "tier": tier["url"]}) for tier in tiers for name, value in tier.items()
        ]
        known = [row for row in rows if isinstance(row[1], int | float) and math.isfinite(row[1])]
        return [(name, float(value), labels) for name, value, labels in known]

    def _serve(self, asked: Mapping[str, Any], start: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
        """The WSGI application: the answer to a client."""
        path, status, kind = asked["PATH_INFO"], "200 OK", "text/plain; version=0.0.4; charset=utf-8"
        if path == "/status":
            kind, body = "application/json", json.dumps(self.status()).encode() + b"\n"
        elif path == "/metrics" and find_spec("prometheus_client") is not None:
            body = prometheus(self.readings())
        else:
            status = status if path == "/" else "404 Not Found"
            kind, body = "text/plain", b"/metrics and /status are here; /metrics needs prometheus_client\n"
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def _run(self, target: Callable[[], object], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._ends.callback(thread.join, _END_SECONDS)

    def _write_again_and_again(self) -> None:
        while not self._ending.is_set():
            self._write()
            self._ending.wait(self._options.every)
        self._write()

    def _write(self) -> None:
        path = Path(self._options.file or "")
        temporary = path.with_name(f".{path.name}.{self._owner}")
        try:
            if path.exists() and not path.is_file():  # a device would be replaced as well, /dev/null for all processes
                raise FileExistsError("it is there, and no regular file")
            temporary.write_text(json.dumps(self.status()) + "\n", encoding="utf-8")
            temporary.replace(path)
            self._failed = False
        except OSError as err:
            if not self._failed:
                self._failed = True
                LOG.warning("the status file %s cannot be written: %s", path, err.strerror or err)


class _Server(ThreadingMixIn, WSGIServer):
    """A client that never ends its request keeps neither the others nor the end of training waiting."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - its signature
        LOG.debug("a client of the metrics page failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = 2.0
    """How long a client may be silent."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no news."""
