"""Shows the numbers of a run to other programs, in the forms that they read."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_engine.config.reporting import Status
from ckpt_engine.observe.events import LOG, LOGGER_NAME
from ckpt_engine.observe.run_times import RunSpent

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

CLIENT_SECONDS = 2.0
"""How long a client may take; they are served one after the other."""
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
_of_runs: dict[str, Callable[[], list[Reading]]] = {}
"""What the runs of this process show to OpenTelemetry, by the URL of their nearest tier."""


class Reading(NamedTuple):
    """A number of a run, with the labels `run` and, of a tier, `tier`: their URLs."""

    name: str
    value: float
    labels: dict[str, str]


def readings(found: Mapping[str, Any], numbers: Mapping[str, float]) -> list[Reading]:
    """Everything that is known. Each row has the nearest tier's URL as its `run`.

    Args:
        found: the `stop_plan.outlook`.
        numbers: more of them, as loggers get them.
    """
    values = {**numbers, **found, "stopping": found["stopping"] is not None}
    tiers = values.pop("tiers")
    run = {"run": tiers[0]["url"]}
    rows = [(name, values.get(name), run) for name in _MEANINGS]
    for tier in tiers:
        rows += [(f"tier_{name}", value, {**run, "tier": tier["url"]}) for name, value in tier.items() if name != "url"]
    return [
        Reading(name, float(value), labels)
        for name, value, labels in rows
        if value is not None and math.isfinite(value)
    ]


def prometheus(rows: list[Reading]) -> bytes:
    """All of them in Prometheus' text format, named `ckpt_...`, through a registry of our own."""
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, value, labels in rows:
        family = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
        made = families.setdefault(name, family(f"ckpt_{name}", _MEANINGS[name], labels=list(labels)))
        made.add_metric(list(labels.values()), value)
    registry: Any = SimpleNamespace(collect=families.values)
    return generate_latest(registry)


def _observed(name: str, _options: CallbackOptions) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for source in list(_of_runs.values()):
        yield from (Observation(row.value, row.labels) for row in source() if row.name == name)


@cache
def _make_instruments() -> None:
    """Once in a process, as instruments cannot be removed; without an SDK of the program they do nothing."""
    from opentelemetry.metrics import get_meter

    meter = get_meter(LOGGER_NAME)
    for name, meaning in _MEANINGS.items():
        make = meter.create_observable_counter if name in _COUNTERS else meter.create_observable_gauge
        make(f"ckpt.{name}", [partial(_observed, name)], description=meaning)


class StatusPage:
    """Shows how a run stands from `start` to `close`. Neither waits for training, nor does training wait for it.

    The file is replaced in one step and not synced: it is for schedulers on the same machine or file system. What
    cannot be written or served is said once, and the run goes on.

    Args:
        options: what to show where.
        outlook: of the moment; called on threads.
        numbers: more numbers of the moment; called on threads.
    """

    def __init__(
        self, options: Status, outlook: Callable[[], dict[str, Any]], numbers: Callable[[], Mapping[str, float]]
    ) -> None:
        self._options = options
        self._outlook = outlook
        self._numbers = numbers
        self._ending = threading.Event()
        self._failed = False
        self._threads: list[threading.Thread] = []
        self._server: HTTPServer | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start what the options ask for."""
        if self._options.file is not None:
            self._run(self._write_again_and_again, "ckpt-board-file")
        if self._options.otel and _has("opentelemetry", "otel", "status.otel shows nothing"):
            _make_instruments()
            _of_runs[self._outlook()["tiers"][0]["url"]] = self.readings
        if self._options.port is not None:
            address = (self._options.host, self._options.port)
            _has("prometheus_client", "prometheus", "no /metrics at {}:{}".format(*address))
            try:
                self._server = _Server(address, _handler(self.answer))
            except OSError as err:
                LOG.warning("no metrics at %s:%d: %s", *address, err.strerror or err)
                return
            self._run(self._server.serve_forever, "ckpt-board-page")

    def close(self) -> None:
        """Say in the file that the run has ended, and stop serving. Idempotent."""
        if os.getpid() != self._owner:
            return
        self._ending.set()
        for url in [url for url, source in _of_runs.items() if source == self.readings]:
            del _of_runs[url]
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(_END_SECONDS)

    def status(self) -> dict[str, Any]:
        """What the file and `/status` say: the outlook, who says it, when (wall-clock seconds), and if it is over."""
        return {
            "time": time.time(),
            "pid": self._owner,
            "ended": self._ending.is_set(),
            **self._outlook(),
        }

    def readings(self) -> list[Reading]:
        """See `readings`."""
        return readings(self._outlook(), self._numbers())

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """The status, the content type and the body of an answer to a client that asks for `path`."""
        if path == "/status":
            return 200, "application/json", json.dumps(self.status()).encode() + b"\n"
        if path == "/metrics" and find_spec("prometheus_client") is not None:
            return 200, "text/plain; version=0.0.4; charset=utf-8", prometheus(self.readings())
        if path == "/":
            return 200, "text/html; charset=utf-8", _page(self.readings()).encode()
        return 404, "text/plain", b"/metrics and /status are here; /metrics needs prometheus_client\n"

    def _run(self, target: Callable[[], object], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

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


def _has(package: str, extra: str, what: str) -> bool:
    """Whether it is installed; what is missing without it is said."""
    if found := find_spec(package) is not None:
        return found
    LOG.warning("%s: %s is not installed → pip install 'ckpt-engine[%s]'", what, package, extra)
    return False


def _page(rows: list[Reading]) -> str:
    """A page for people."""
    cells = [(name, ", ".join(labels.values()), f"{value:,.6g}", _MEANINGS[name]) for name, value, labels in rows]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in cells)
    links = '<a href="/metrics">/metrics</a> <a href="/status">/status</a>'
    return f"<!doctype html><meta charset=utf-8><title>ckpt-engine</title><p>{links}<table>{table}</table>\n"


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - its signature
        LOG.debug("a client of the metrics page failed", exc_info=True)


def _handler(answer: Callable[[str], tuple[int, str, bytes]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            code, kind, body = answer(self.path)
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a scrape is no news."""

    return Handler
