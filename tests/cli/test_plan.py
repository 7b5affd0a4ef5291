"""`ckpt plan`: a run is simulated before it is paid for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.cli import output
from ckpt_engine.observe.events import CLOSED, GONE
from ckpt_engine.store import names
from ckpt_engine.tools import plan_runs
from ckpt_engine.writer.attempts import Attempt, AttemptHistory, encode_attempts

Ckpt = Callable[..., Any]
EXAMPLES = Path(__file__).parents[2] / "examples/plugins"


def policies(answer: Any) -> dict[str, Any]:
    return {one["name"]: one for one in answer["policies"]}


def test_a_table_of_policies_in_the_order_of_goodput(ckpt: Ckpt) -> None:
    """The table needs no run, says what was assumed, and fits in 80 columns."""
    done = ckpt("plan", "--failures", "llama3", "--days", 3, "--compare", "daly,30min")
    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert lines[0] == "failures   Llama 3, 16,384 GPUs (Meta 2024): one in 3.1 h"
    assert "nothing was measured" in lines[2]
    assert {line.split()[0] for line in lines[6:8]} == {"ckpt-engine", "daly"}
    assert lines[8].startswith("30min")
    assert max(map(len, lines)) <= 80


@pytest.mark.cells(1)
@pytest.mark.parametrize("failures", ["rsc:1024", "spot", "weibull:0.6,5h"])
def test_ours_is_near_the_rule_that_knows_everything(failures: str, ckpt: Ckpt) -> None:
    """Daly's, given the true costs and the true rate."""
    found = policies(ckpt("plan", "--failures", failures, "--days", 4, "--compare", "daly", "--json").json)
    assert found["ckpt-engine"]["goodput"] >= found["daly"]["goodput"] - 0.02
    assert found["ckpt-engine"]["failures"] == found["daly"]["failures"]


def test_costs_and_failures_come_from_the_run(ckpt: Ckpt, run_folder: Any) -> None:
    """As its cadence measured them, and as its attempts ended."""
    times = {
        "training": 100.0,
        "step": 2.0,
        "stall_each": 0.25,
        "slowdown_each": 0.5,
        "persist_each": 20.0,
        "megabytes": 3e3,
    }
    rows = (
        Attempt("a", "a", 0.0, 3600.0, GONE),
        Attempt("a", "b", 3700.0, 3600.0, CLOSED, times=times | {"startup": 70.0}),
    )
    (run_folder.path / names.ATTEMPTS).write_bytes(encode_attempts(AttemptHistory(rows)))
    answer = ckpt("plan", run_folder.path, "--days", 1, "--compare", "", "--json").json
    assert answer["measured"] is True
    assert "what 1 failure of this run make likely" in answer["failures"]
    costs = answer["costs"]
    assert (costs["step_seconds"], costs["stall_seconds"], costs["written_bytes"]) == (2.0, 0.25, 3e9)
    restart = answer["restart"]
    assert (restart["down"], restart["startup"]) == ({"process": 100.0, "machine": 280.0, "site": 280.0}, 70.0)
    (ours,) = answer["policies"]
    assert ours["tiers"] == [pytest.approx(86400.0 / ours["interval_seconds"] * 3e9, rel=0.2)]


@pytest.mark.long
def test_a_run_of_short_steps_ends(ckpt: Ckpt, run_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty days of it have millions of snapshots: fewer days are simulated, and what needs more is left out."""
    for name in ("MOST_OURS", "MOST_RULED"):
        monkeypatch.setattr(plan_runs, name, getattr(plan_runs, name) // 2)
    times = {"training": 300.0, "step": 1e-3, "stall_each": 0.007, "persist_each": 0.02, "megabytes": 0.06}
    rows = (Attempt("a", "b", 0.0, 300.0, CLOSED, times=times),)
    (run_folder.path / names.ATTEMPTS).write_bytes(encode_attempts(AttemptHistory(rows)))
    answer = ckpt("plan", run_folder.path, "--compare", "checkfreq,daly", "--json").json
    assert 1.0 < answer["days"] < 29.0
    assert answer["left_out"] == ["checkfreq"]
    assert {one["name"]: one["failures"] > 2 for one in answer["policies"]} == {"ckpt-engine": True, "daly": True}


@pytest.mark.long
def test_days_that_take_long_are_counted_to_their_end(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said meanwhile names the policy, how many there are, and the day it ends with."""
    for name in ("_QUIET_SECONDS", "_LINES_SECONDS"):
        monkeypatch.setattr(output, name, 0.1)
    said = ckpt("plan", "--failures", "llama3", "--days", 8, "--compare", "30min").err
    assert re.search(r"ckpt plan: simulating 8 days: ckpt-engine, policy 1 of 2 … \S+ %\n", said)


def test_what_did_not_happen_is_no_number(ckpt: Ckpt) -> None:
    """A run without a failure has lost nothing of one, and a rule that takes no snapshot takes none each 30 days."""
    arguments = ("plan", "--failures", "weibull:1,3650d", "--days", 1, "--compare", "2d")
    row = next(line.split() for line in ckpt(*arguments).out.splitlines() if line.startswith("2d "))
    assert row[3:8] == ["-", "-", "0.0", "%", "never"]
    rule = policies(ckpt(*arguments, "--json").json)["2d"]
    assert [rule[name] for name in ("failures", "lost_seconds", "worst_seconds", "interval_seconds")] == [
        0,
        *[None] * 3,
    ]


def test_a_run_that_fails_all_the_time_ends(ckpt: Ckpt) -> None:
    """Its failures are what takes long to simulate."""
    answer = ckpt("plan", "--failures", "weibull:1,1s", "--compare", "", "--json").json
    assert answer["days"] < 29.0
    assert answer["policies"][0]["goodput"] < 0.01


def test_a_trace_is_followed(ckpt: Ckpt, tmp_path: Path) -> None:
    """Each line of the file is a failure of the simulated job."""
    trace = tmp_path / "failures.txt"
    trace.write_text("# of last week\n3h 20min machine\n\n5h process  # the driver\n")
    answer = ckpt("plan", "--failures", trace, "--days", 1, "--compare", "1h", "--json").json
    assert [one["failures"] for one in answer["policies"]] == [2, 2]


@pytest.mark.long
def test_a_rule_of_ones_own(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the example package; to first order it is Daly's."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ("--failures", "llama3", "--days", 3, "--compare", "young_rule:interval,daly", "--json")
    found = policies(ckpt("plan", *arguments).json)
    assert found["young_rule:interval"]["goodput"] == pytest.approx(found["daly"]["goodput"], abs=0.005)


@pytest.mark.long
def test_a_policy_of_ones_own_that_learns(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class instead of a function: it decides at each step, and meets the same failures."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ("--failures", "llama3", "--days", 3, "--compare", "learned_policy:Learned", "--json")
    ours, learned = policies(ckpt("plan", *arguments).json).values()
    assert learned["goodput"] == pytest.approx(ours["goodput"], abs=0.005)
    assert learned["failures"] == ours["failures"]


def test_a_rule_in_the_folder_one_is_in_is_found() -> None:
    """Where the command is a script of its own, Python does not look there."""
    command = [sys.executable, "-P", "-c", "from ckpt_engine.cli.main import main; main()", "plan", "--days", "0.2"]
    done = subprocess.run(
        [*command, "--compare", "young_rule:interval"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "young_rule:interval" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--failures", "llama4"], "llama3, rsc:1024"),
        (["--failures", "rsc:many"], "rsc:1024"),
        (["--failures", "weibull:0.6"], "weibull:0.6,7.5h"),
        (["--failures", "weibull:50,1h"], "from 0.1 to 10"),
        (["--compare", "dayly"], "daly, checkfreq"),
        (["--compare", "no_such_module:rule"], "package.module:function"),
    ],
)
def test_what_is_not_understood_is_named_with_a_way_out(arguments: list[str], says: str, ckpt: Ckpt) -> None:
    """A bad option is refused before anything is simulated."""
    done = ckpt("plan", *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


@pytest.mark.parametrize("line", ["3h", "3h fire", "soon machine", "4h process\n3h process", "# nothing"])
def test_a_line_of_a_trace_that_is_none_is_named(line: str, ckpt: Ckpt, tmp_path: Path) -> None:
    """With the file, and what a line looks like."""
    trace = tmp_path / "trace.txt"
    trace.write_text(line)
    done = ckpt("plan", "--failures", trace)
    assert done.code == 2
    assert "trace.txt" in done.err
    assert "3h 20min machine" in done.err
