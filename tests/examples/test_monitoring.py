"""The example that evaluates each durable snapshot, and the board and the rules for Prometheus."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_engine.checkpointer import Checkpointer
from tests.examples.test_converted import EXAMPLES, environment
from tests.probe.lives import make
from tests.ranks.launch import free_port

GRAFANA = EXAMPLES / "grafana"
NOT_YET = {"ckpt_resume_exact", "ckpt_seconds_to_durable", "ckpt_tier_bytes_per_second"}
"""Known only after a resume, or once a speed was measured."""


@pytest.mark.long
def test_each_durable_snapshot_is_evaluated(tmp_path: Path) -> None:
    """In order, by the program that the option names, with weights that get better; nothing is left behind."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "evaluate_snapshots.py")]
    subprocess.run(command, cwd=tmp_path, env={**environment(), "PATH": path}, timeout=120, check=True)
    found = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    with Checkpointer(tmp_path / "evaluated-out") as ckpt:
        saved = [(one.step, f"{tmp_path}/evaluated-out#{one.id}") for one in ckpt.snapshots()]
    assert [(one["step"], one["snapshot"]) for one in found] == saved
    assert len(found) >= 3 and found[-1]["accuracy"] > 0.8
    assert sorted(one.name for one in tmp_path.iterdir()) == ["evaluated-out", "evaluations.jsonl"]


def served(tmp_path: Path) -> set[str]:
    """The series of a run that trains and has taken snapshots."""
    job, port = make(), free_port()
    options: dict[str, Any] = {"every_n_steps": 2, "writer": "thread", "status": {"port": port}}
    with Checkpointer(tmp_path / "run", **options) as ckpt:
        ckpt.track(model=job.model, optimizer=job.optimizer, loader=job.loader)
        for indices, targets in job.loader:
            job.optimizer.zero_grad()
            ((job.model(indices) - targets) ** 2).mean().backward()
            job.optimizer.step()
            assert ckpt.wait(60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            page = answer.read().decode()
    return set(re.findall(r"^(ckpt_\w+)\{run=", page, re.MULTILINE))


def asked(expressions: list[str]) -> set[str]:
    return {name for one in expressions for name in re.findall(r"\b(ckpt_\w+)\b(?!\.)", one)}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return served(tmp_path_factory.mktemp("monitored"))


@pytest.mark.long
def test_the_board_asks_for_series_that_a_run_has(series: set[str]) -> None:
    """Each panel shows something, and each query is for the runs that were chosen."""
    board = json.loads((GRAFANA / "ckpt-engine.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert asked([board["templating"]["list"][1]["query"]]) == {"ckpt_step"}
    names = asked(expressions) - {"ckpt_run_"}
    assert len(names) > 12
    assert names - series <= NOT_YET
    assert all('run=~"$run"' in one for one in expressions)
    assert [name for name in series if re.fullmatch("ckpt_run_.+_seconds", name)]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]


def test_the_rules_ask_for_series_that_a_run_has(series: set[str]) -> None:
    """Each says what is wrong, and what it means."""
    groups = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert asked([rule["expr"] for rule in rules]) - series <= NOT_YET
    assert len(rules) == 5
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "description"}
