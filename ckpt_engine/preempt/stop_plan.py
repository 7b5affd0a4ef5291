"""Decides what of a run becomes durable before its time is over, and shows it to others (the board, Prometheus).

One writer writes snapshots to the nearest tier one after the other; each further tier copies them from there. So a
snapshot is durable when what is queued before it is written, it was taken, and its own bytes are written. `plan_stop`
chooses by that; `Board` shows the `outlook` in a JSON file and on a small web page, on threads of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from ckpt_engine.config.sections import Status
from ckpt_engine.observe.durability import DurabilityStatus, TierStanding
from ckpt_engine.observe.events import LOG
from ckpt_engine.observe.units import duration, size

MARGIN = 1.25
"""Writes may take so many times as long as the measured speed says before a plan is wrong."""
_COUNTERS = frozenset({"committed", "failed", "replicated", "sent_bytes", "skipped", "written_bytes"})
"""Numbers that only grow while a process lives."""
_HELP = {
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
"""What a number means; those of `run_times` are seconds of a part of the run's wall time."""


class StopChoice(StrEnum):
    """What is done with the time that is left."""

    SNAPSHOT = "snapshot"
    """Take a new one at the next boundary."""
    FLUSH = "flush"
    """Write the newest one that is in memory."""
    FINISH = "finish"
    """Take no new one: let what is being written finish."""
    NOTHING = "nothing"
    """Nothing that is not durable already becomes so in time."""


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A snapshot that the writer has and the nearest tier does not have yet."""

    step: int
    left_bytes: float


@dataclass(frozen=True, slots=True)
class StopFacts:
    """A run that must stop.

    Args:
        step: of the last finished training step.
        grace_seconds: that are left.
        state_bytes: of one snapshot.
        tiers: nearest first, at least one.
        boundary_seconds: until the step that is running ends; 0 at a boundary, infinite where it ends too late.
        stall_seconds: that taking a snapshot lasts.
        in_flight: oldest first.
        slots: snapshots that fit in host memory at once, those in flight included.
        held_step: of the newest snapshot that is in memory and was not given to the writer.
    """

    step: int
    grace_seconds: float
    state_bytes: float
    tiers: tuple[TierStanding, ...]
    boundary_seconds: float = 0.0
    stall_seconds: float = 0.0
    in_flight: tuple[PendingSnapshot, ...] = ()
    slots: int = 2
    held_step: int | None = None


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What a tier has when the time is over: a snapshot of `step` (None: none at all), `seconds` from now."""

    url: str
    step: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class StopPlan:
    """The best that fits.

    Args:
        choice: what to do.
        step: of the newest snapshot that is durable in the end; None: none is.
        seconds: until then; infinite where nothing ever is.
        lost_steps: finished steps, the running one not counted, that a restart repeats; None: all.
        tiers: what each has in the end, nearest first.
        certain: all speeds that the choice depends on are measured.
        why: the arithmetic in one line, for the log.
    """

    choice: StopChoice
    step: int | None
    seconds: float
    lost_steps: int | None
    tiers: tuple[TierOutcome, ...]
    certain: bool
    why: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    choice: StopChoice
    step: int
    seconds: float


def plan_stop(facts: StopFacts) -> StopPlan:
    """Choose the newest snapshot that becomes durable on the nearest tier in time; of two, the sooner one.

    Where no speed of the nearest tier is known a new snapshot is tried. `seconds` never exceeds the grace then, unless
    the choice is `NOTHING` or not `certain`.
    """
    candidates = list(_candidates(facts))
    fitting = [one for one in candidates if one.seconds <= max(0.0, facts.grace_seconds)]
    best = max(fitting, key=lambda one: (one.step, -one.seconds), default=None)
    step, seconds = (best.step, best.seconds) if best is not None else (None, math.inf)
    choice = best.choice if best is not None else StopChoice.NOTHING
    plan = StopPlan(
        choice=choice,
        step=step,
        seconds=seconds,
        lost_steps=None if step is None else max(0, facts.step - step),
        tiers=tuple(_outcomes(facts, step, seconds)),
        certain=choice is StopChoice.NOTHING or bool(facts.tiers[0].bytes_per_second),
        why="",
    )
    return _explained(plan, facts, candidates)


def write_seconds(tier: TierStanding, nbytes: float) -> float:
    """How long `nbytes` take to become durable on `tier`, with the margin; 0 where its speed is not known."""
    return MARGIN * nbytes / tier.bytes_per_second if tier.bytes_per_second else 0.0


def new_snapshot_seconds(facts: StopFacts) -> float:
    """How long a snapshot of the step that runs, or of the last one at a boundary, takes to become durable."""
    queue = _queue(facts)
    waits_for = len(queue) - facts.slots
    slot_seconds = queue[waits_for] if waits_for >= 0 else 0.0
    taken = max(facts.boundary_seconds, slot_seconds) + facts.stall_seconds
    return max(taken, queue[-1] if queue else 0.0) + write_seconds(facts.tiers[0], facts.state_bytes)


def _queue(facts: StopFacts) -> list[float]:
    """When each snapshot in flight is durable, seconds from now."""
    return list(itertools.accumulate(write_seconds(facts.tiers[0], one.left_bytes) for one in facts.in_flight))


def _candidates(facts: StopFacts) -> Iterator[_Candidate]:
    queue = _queue(facts)
    near = facts.tiers[0]
    if near.newest_step is not None:
        yield _Candidate(StopChoice.NOTHING, near.newest_step, 0.0)
    for one, end in zip(facts.in_flight, queue, strict=True):
        yield _Candidate(StopChoice.FINISH, one.step, end)
    if facts.held_step is not None:
        end = (queue[-1] if queue else 0.0) + write_seconds(near, facts.state_bytes)
        yield _Candidate(StopChoice.FLUSH, facts.held_step, end)
    reached = facts.step + (1 if facts.boundary_seconds > 0.0 else 0)
    yield _Candidate(StopChoice.SNAPSHOT, reached, new_snapshot_seconds(facts))


def _outcomes(facts: StopFacts, step: int | None, seconds: float) -> Iterator[TierOutcome]:
    near, *further = facts.tiers
    yield TierOutcome(near.url, step, seconds)
    for tier in further:
        copy = write_seconds(tier, facts.state_bytes) if tier.bytes_per_second else math.inf
        has = TierOutcome(tier.url, tier.newest_step, 0.0 if tier.newest_step is not None else math.inf)
        is_newer = step is not None and (tier.newest_step is None or tier.newest_step < step)
        if is_newer and seconds + copy <= facts.grace_seconds:
            has = TierOutcome(tier.url, step, seconds + copy)
        yield has


def _explained(plan: StopPlan, facts: StopFacts, candidates: Sequence[_Candidate]) -> StopPlan:
    parts = [f"{duration(max(0.0, facts.grace_seconds))} left: {_what(plan, facts)}"]
    newest = candidates[-1]
    if plan.choice is not StopChoice.SNAPSHOT and newest.step > (plan.step or -1) and newest.seconds < math.inf:
        parts.append(f"one of step {newest.step} would need {_sum(facts, newest.seconds)}")
    parts += [_said(tier, plan) for tier in plan.tiers[1:]]
    parts.append(_loss(plan))
    return dataclasses.replace(plan, why="; ".join(parts))


def _what(plan: StopPlan, facts: StopFacts) -> str:
    url = facts.tiers[0].url
    if plan.choice is StopChoice.NOTHING:
        already = f"the snapshot of step {plan.step} is durable on {url} already"
        return f"nothing becomes durable on {url}" if plan.step is None else already
    which = {
        StopChoice.SNAPSHOT: f"a snapshot of step {plan.step}",
        StopChoice.FLUSH: f"the snapshot of step {plan.step} in memory",
        StopChoice.FINISH: f"the snapshot of step {plan.step} in flight",
    }[plan.choice]
    if not plan.certain:
        return f"{which} is tried on {url}, whose speed is not known yet"
    new = plan.choice is StopChoice.SNAPSHOT
    seconds = _sum(facts, plan.seconds) if new else duration(plan.seconds)
    return f"{which} will be durable on {url} within {seconds}"


def _sum(facts: StopFacts, seconds: float) -> str:
    """`6.8 s (100 ms step + 200 ms stall + 4 GB at 800 MB/s with a quarter to spare)`."""
    near = facts.tiers[0]
    queued = sum(one.left_bytes for one in facts.in_flight)
    terms = [
        f"{duration(facts.boundary_seconds)} to the end of the step" if facts.boundary_seconds > 0.0 else "",
        f"{duration(facts.stall_seconds)} stall" if facts.stall_seconds > 0.0 else "",
        f"{size(queued)} in flight" if queued else "",
        f"{size(facts.state_bytes)} at {size(near.bytes_per_second)}/s" if near.bytes_per_second else "",
    ]
    shown = " + ".join(term for term in terms if term)
    return f"{duration(seconds)} ({shown}, a quarter to spare)" if shown else duration(seconds)


def _said(tier: TierOutcome, plan: StopPlan) -> str:
    if tier.step is None:
        return f"{tier.url} gets nothing in time"
    if tier.step == plan.step:
        return f"on {tier.url} in {duration(tier.seconds)}" if tier.seconds > 0.0 else f"on {tier.url} already"
    return f"{tier.url} ends with step {tier.step}"


def _loss(plan: StopPlan) -> str:
    if plan.lost_steps is None:
        return "all work is lost"
    if plan.lost_steps == 0:
        return "no step is lost"
    return f"{plan.lost_steps} step{'s are' if plan.lost_steps > 1 else ' is'} lost"


def outlook(
    standing: DurabilityStatus,
    facts: StopFacts,
    *,
    now: float,
    started: float,
    step_seconds: float,
    stopping: str | None,
) -> dict[str, Any]:
    """A run at `now` (monotonic seconds) that started at `started` and whose last step took so long, as JSON values.

    Returns:
        step: of the last finished training step.
        durable_step: of the newest snapshot that is durable; None: none is.
        age_of_last_durable_seconds: since that snapshot was taken; None: none is.
        work_at_risk_seconds: what `kill -9` now would cost: that age, or the time since training started.
        work_at_risk_steps: the same in steps; None: none is durable.
        seconds_to_durable: that a stop would need now, a whole step included; None: no speed was measured yet.
        snapshots_in_flight: taken, and not durable yet.
        stopping: who has asked the run to stop, if somebody has.
        tiers: rows of what each has; see `durability.TierStanding`.
    """
    near, safe = standing.tiers[0], standing.safest
    age = None if safe.newest_instant is None else max(0.0, now - safe.newest_instant)
    measured = near.bytes_per_second is not None
    return {
        "step": facts.step,
        "durable_step": safe.newest_step,
        "age_of_last_durable_seconds": age,
        "work_at_risk_seconds": now - started if age is None else age,
        "work_at_risk_steps": None if safe.newest_step is None else max(0, facts.step - safe.newest_step),
        "seconds_to_durable": step_seconds + new_snapshot_seconds(facts) if measured else None,
        "snapshots_in_flight": len(standing.in_flight),
        "stopping": stopping,
        "tiers": [
            {
                "url": tier.url,
                "newest_step": tier.newest_step,
                "age_seconds": None if tier.newest_instant is None else max(0.0, now - tier.newest_instant),
                "bytes_per_second": tier.bytes_per_second,
                "away": tier.away,
            }
            for tier in standing.tiers
        ],
    }


def prometheus(found: Mapping[str, Any], numbers: Mapping[str, float]) -> str:
    """Everything in Prometheus' text format (version 0.0.4), named `ckpt_...`; what is not known is left out.

    Each row has the nearest tier's URL as its `run`.

    Args:
        found: the `outlook`.
        numbers: more of them, as loggers get them.
    """
    values = {**numbers, **found, "stopping": found["stopping"] is not None}
    tiers = values.pop("tiers")
    lines: list[str] = []
    run = f'run="{_escaped(tiers[0]["url"])}"'
    for name, value in values.items():
        lines += _family(name, [(run, value)])
    for name in ("newest_step", "age_seconds", "bytes_per_second", "away"):
        rows = [(f'{run},tier="{_escaped(tier["url"])}"', tier[name]) for tier in tiers]
        lines += _family(f"tier_{name}", rows)
    return "\n".join(lines) + "\n"


def _family(name: str, rows: list[tuple[str, float | None]]) -> Iterator[str]:
    known = [(labels, float(value)) for labels, value in rows if value is not None and math.isfinite(value)]
    full, kind = (f"ckpt_{name}_total", "counter") if name in _COUNTERS else (f"ckpt_{name}", "gauge")
    if known:
        yield f"# HELP {full} {_HELP.get(name, f'Wall time of the run, {name}.')}"
        yield f"# TYPE {full} {kind}"
        yield from (f"{full}{{{labels}}} {value:.17g}" for labels, value in known)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


CLIENT_SECONDS = 2.0
"""How long a client may take; they are served one after the other."""
_END_SECONDS = 10.0


class Board:
    """Shows how a run stands from `start` to `close`. Neither waits for training, nor does training wait for it.

    The file is replaced in one step and not synced: it is for schedulers on the same machine or file system. What
    cannot be written or served is said once, and the run goes on.

    Args:
        options: what to show where.
        outlook: of the moment; called on threads.
        numbers: more numbers of the moment, for the page; called on threads.
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
        if self._options.port is not None:
            address = (self._options.host, self._options.port)
            try:
                self._server = _Server(address, _handler(self.status, self.metrics))
            except OSError as err:
                LOG.warning("no metrics at %s:%d: %s", *address, err.strerror or err)
                return
            self._run(self._server.serve_forever, "ckpt-board-page")

    def close(self) -> None:
        """Say in the file that the run has ended, and stop serving. Idempotent."""
        if os.getpid() != self._owner:
            return
        self._ending.set()
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

    def metrics(self) -> str:
        """What `/metrics` says."""
        return prometheus(self._outlook(), self._numbers())

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


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - its signature
        LOG.debug("a client of the metrics page failed", exc_info=True)


def _handler(status: Callable[[], object], metrics: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics())
            elif self.path == "/status":
                self._answer(200, "application/json", json.dumps(status()) + "\n")
            else:
                self._answer(200 if self.path == "/" else 404, "text/plain", "/metrics and /status are here\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a scrape is no news."""

    return Handler
