"""What schedulers read of a run: the numbers, the file, the page."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from lightning.pytorch.callbacks import Callback

from ckpt_engine.config.reporting import Status
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.loop.boundary import Stopping
from ckpt_engine.loop.rank_decisions import cadence_of
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.durability import DurabilityStatus, PendingCommit, TierStanding
from ckpt_engine.observe.events import FanOutSink, TierDegraded
from ckpt_engine.observe.metrics import RunMetrics
from ckpt_engine.observe.run_times import RunTimes
from ckpt_engine.preempt.status_page import StatusPage, prometheus
from ckpt_engine.preempt.stop_plan import StopFacts, outlook
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, fit
from tests.ranks.launch import free_port
from tests.ranks.runs import open_ranks
from tests.support.trainers import wait_for_the_arena

PATIENCE_SECONDS = 60.0
NEAR, FAR = TierStanding("/run", 1e9, 90, 40.0), TierStanding('s3://b/"r"', None, 80, 20.0, away=True)


def seen(near: TierStanding = NEAR, stopping: str | None = None, far: TierStanding = FAR) -> dict[str, Any]:
    """At second 100 of a run that started at second 10: step 97, 2 GB of state, one snapshot in flight."""
    standing = DurabilityStatus((near, far), (PendingCommit(95, 2_000_000_000, 90.0),), 2_000_000_000)
    tiers = tuple(TierStanding(one.url, one.bytes_per_second) for one in standing.tiers)
    facts = StopFacts(97, 0.0, 2e9, tiers, in_flight=(PendingCommit(95, 1e9, 0.0),), stall_seconds=0.1)
    return outlook(standing, facts, now=100.0, started=10.0, step_seconds=3.0, stopping=stopping)


def test_the_outlook_says_what_a_kill_would_cost_and_a_snapshot_would_take() -> None:
    """The step that runs, what is in flight, and the new snapshot, with the margin of the plan."""
    found = seen()
    assert (found["age_of_last_durable_seconds"], found["work_at_risk_seconds"], found["work_at_risk_steps"]) == (
        60.0,
        60.0,
        7,
    )
    assert found["seconds_to_durable"] == pytest.approx(3.0 + 1.25 * (1.0 + 2.0))
    assert [(tier["newest_step"], tier["age_seconds"], tier["away"]) for tier in found["tiers"]] == [
        (90, 60.0, False),
        (80, 80.0, True),
    ]


def test_before_the_first_snapshot_all_work_is_at_risk() -> None:
    """All steps are at risk, and the time that a snapshot takes is unknown."""
    found = seen(TierStanding("/run"), far=TierStanding("/far"))
    assert (found["durable_step"], found["age_of_last_durable_seconds"], found["work_at_risk_steps"]) == (
        None,
        None,
        None,
    )
    assert (found["work_at_risk_seconds"], found["seconds_to_durable"]) == (90.0, None)


def test_what_a_further_tier_has_is_not_at_risk() -> None:
    """Where the first tier has nothing yet, as on a new machine, a kill costs what the further one lacks."""
    found = seen(TierStanding("/run"))
    assert (found["durable_step"], found["work_at_risk_seconds"], found["work_at_risk_steps"]) == (80, 80.0, 17)


LABEL = r'(run|tier)="([^"\\]|\\.)*"'
LINE = re.compile(
    r"(# HELP ckpt_[a-z_]+ [A-Z0-9].*\.|# TYPE ckpt_[a-z_]+ (gauge|counter)|"
    rf"ckpt_[a-z_]+{{{LABEL}(,{LABEL})?}} -?[0-9.e+-]+)"
)


def page_of(found: dict[str, Any], **numbers: float) -> str:
    return prometheus(StatusPage(Status(), lambda: found, lambda: numbers).readings()).decode()


def test_the_page_for_prometheus_is_well_formed() -> None:
    """One HELP and one TYPE line ahead of each name, labels escaped, nothing that is not known."""
    text = page_of(seen(stopping="SIGTERM"), overhead_percent=0.5, idle_percent=float("nan"), committed=3.0)
    lines = text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), text
    assert 'ckpt_work_at_risk_seconds{run="/run"} 60.0' in lines
    assert 'ckpt_stopping{run="/run"} 1.0' in lines and 'ckpt_overhead_percent{run="/run"} 0.5' in lines
    assert 'ckpt_tier_away{run="/run",tier="s3://b/\\"r\\""} 1.0' in lines
    assert "ckpt_idle" not in text and 'bytes_per_second{tier="s3' not in text
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(typed)) == len(typed)
    assert [line.split()[2] for line in lines if line.startswith("# HELP")] == typed


@pytest.mark.parametrize("name", ["committed", "failed", "skipped", "written_bytes", "replicated", "sent_bytes"])
def test_what_only_grows_is_a_counter(name: str) -> None:
    """By the rules of Prometheus its name ends with _total; all else is a gauge."""
    text = page_of(seen(), **{name: 7.0, "stall_seconds": 1.0})
    assert f"# TYPE ckpt_{name}_total counter\nckpt_{name}_total{{run=" in text
    assert text.count(" counter") == 1
    assert "# TYPE ckpt_stall_seconds gauge" in text


def test_each_number_of_a_run_has_a_meaning() -> None:
    """Those of the loggers, and those of the outlook: none is left out."""
    metrics = RunMetrics(times=RunTimes(SystemClock()))
    metrics.outlook = seen
    metrics.emit(TierDegraded("s3://b/r", "CKPT300", "away"))
    rows = StatusPage(Status(), seen, metrics.numbers).readings()
    assert metrics.numbers().keys() <= {name for name, _, _ in rows}
    for line in prometheus(rows).decode().splitlines():
        if line.startswith("# HELP"):
            assert ("Wall time of the run" in line) == ("ckpt_run_" in line), line


@pytest.fixture(autouse=True)
def slow_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours may take its time."""
    monkeypatch.setattr("ckpt_engine.preempt.status_page._Handler.timeout", PATIENCE_SECONDS)


@pytest.fixture
def board() -> Iterator[Callable[..., StatusPage]]:
    """Makes boards that end with the test."""
    made: list[StatusPage] = []

    def make(**options: Any) -> StatusPage:
        made.append(StatusPage(Status(**options), seen, lambda: {"overhead_percent": 0.5}))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-board")] == []


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_file_is_replaced_again_and_again_and_says_when_it_is_over(
    board: Callable[..., StatusPage], tmp_path: Path
) -> None:
    """Readers see whole JSON; no temporary file stays."""
    path = tmp_path / "status.json"
    shown = board(file=str(path), every=0.02)
    until(path.exists)
    first = json.loads(path.read_text())
    assert (first["step"], first["work_at_risk_seconds"], first["ended"]) == (97, 60.0, False)
    until(lambda: json.loads(path.read_text())["time"] > first["time"])
    shown.close()
    assert json.loads(path.read_text())["ended"] is True
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said_once(
    board: Callable[..., StatusPage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it once, and the file is written as soon as possible."""
    path = tmp_path / "later" / "status.json"
    board(file=str(path), every=0.01)
    until(lambda: "cannot be written" in caplog.text)
    path.parent.mkdir()
    until(path.exists)
    assert caplog.text.count("cannot be written") == 1


def test_a_device_is_not_replaced(
    board: Callable[..., StatusPage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run as root that shows itself at /dev/null would take it from the whole machine."""
    path = tmp_path / "null"
    os.mkfifo(path)
    board(file=str(path), every=0.01).close()
    assert path.is_fifo()
    assert "cannot be written: it is there, and no regular file" in caplog.text


def test_the_page_is_served_to_this_machine(board: Callable[..., StatusPage]) -> None:
    """The page has metrics and status and nothing else, on the loopback address unless the options say otherwise."""
    port = free_port()
    shown = board(port=port)
    assert 'ckpt_work_at_risk_seconds{run="/run"} 60.0\n' in get(port, "/metrics")
    assert json.loads(get(port, "/status"))["durable_step"] == 90
    assert get(port, "/") == "/metrics and /status are here; /metrics needs prometheus_client\n"
    with pytest.raises(urllib.error.HTTPError):
        get(port, "/x")
    shown.close()
    with pytest.raises(OSError, match="refused"):
        get(port, "/metrics")


def test_without_its_package_the_page_for_prometheus_is_missing_and_that_is_said(
    board: Callable[..., StatusPage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first line names the extra; /status, which needs none, is served."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr("ckpt_engine.preempt.status_page.find_spec", lambda name: None)
    port = free_port()
    board(port=port)
    said = "nothing is shown to prometheus: prometheus_client is not installed → pip install 'ckpt-engine[prometheus]'"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert json.loads(get(port, "/status"))["durable_step"] == 90
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/metrics")


def test_the_registry_of_the_program_is_left_alone(board: Callable[..., StatusPage]) -> None:
    """Its own page has its own numbers only, and ours has none of them."""
    before = {metric.name for metric in prometheus_client.REGISTRY.collect()}
    port = free_port()
    board(port=port)
    page = get(port, "/metrics")
    assert {metric.name for metric in prometheus_client.REGISTRY.collect()} == before
    assert all(line.startswith(("# ", "ckpt_")) for line in page.splitlines())


def test_a_client_that_says_nothing_does_not_keep_others_out(
    board: Callable[..., StatusPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left after two seconds."""
    monkeypatch.undo()
    port = free_port()
    board(port=port)
    with socket.create_connection(("127.0.0.1", port)):
        assert 'ckpt_step{run="/run"} 97.0\n' in get(port, "/metrics")


def test_a_client_that_never_ends_its_request_holds_nothing_up(board: Callable[..., StatusPage]) -> None:
    """Neither another client nor the end of training."""
    port, ended = free_port(), threading.Event()
    page = board(port=port)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /status HTTP/1.0\r\nX: ")

        def drip() -> None:
            while not ended.wait(0.05):
                client.sendall(b"x")

        slow = threading.Thread(target=drip)
        slow.start()
        try:
            closing = threading.Thread(target=lambda: (get(port, "/status"), page.close()), daemon=True)
            closing.start()
            closing.join(PATIENCE_SECONDS / 3)
            assert not closing.is_alive()
        finally:
            ended.set()
            slow.join()


def test_a_port_that_is_taken_is_said(board: Callable[..., StatusPage], caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on without the page."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        board(port=port)
        assert f"no metrics at 127.0.0.1:{port}: Address already in use" in caplog.text


def test_a_run_shows_how_it_stands(tmp_path: Path) -> None:
    """The board shows a training from its first step to its end."""
    port = free_port()
    pages: list[tuple[int, int, str]] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            run = ckpt._run
            assert run is not None
            wait_for_the_arena(run.engine)  # else no snapshot may be taken on a slow machine
            if pages or trainer.global_step < 8:
                return
            run.engine.before_update()
            assert run.engine.wait(PATIENCE_SECONDS)
            if found := run.engine.snapshots():
                pages.append((trainer.global_step, found[-1].step, get(port, "/metrics")))

    file = tmp_path / "status.json"
    ckpt = AdaptiveCheckpoint(
        str(tmp_path / "run"), every_n_steps=2, writer="thread", status={"port": port, "file": str(file)}
    )
    fit(Case(), [ckpt, Look()])
    step, durable, page = pages[0]
    assert f'ckpt_step{{run="{tmp_path}/run"}} {step}.0\n' in page
    assert f'ckpt_durable_step{{run="{tmp_path}/run"}} {durable}.0\n' in page
    assert "ckpt_committed_total{" in page
    ended = json.loads(file.read_text())
    assert (ended["ended"], ended["durable_step"], ended["work_at_risk_steps"]) == (True, 18, 0)


@pytest.mark.parametrize(("rank", "shows"), [(0, True), (1, False)])
def test_of_several_ranks_the_first_shows_how_the_run_stands(rank: int, shows: bool, tmp_path: Path) -> None:
    """Others would replace its file, and could not serve at its port."""
    file = tmp_path / "status.json"
    engine = open_ranks(tmp_path / "run", 2, status={"file": str(file)})[rank].engine
    cadence = cadence_of(FrequencySettings.of(engine.config), SystemClock(), engine)
    log = logging.getLogger(__name__)
    stopping = Stopping(engine, cadence, FanOutSink(), log, dict, SystemExit, losses=None, rollbacks=None)
    stopping.start(0)
    stopping.close()
    assert file.exists() == shows
