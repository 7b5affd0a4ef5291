"""The demo as its user runs it: real training processes, a real `kill -9`, a real comparison."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from demo import main as demo
from demo.compare import compare_runs
from demo.settings import Settings

from tests.support import interpreters

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
TIMEOUT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One run of the demo."""

    out: Path
    status: int
    result: dict[str, Any]
    screen: str


def run_demo(out: Path, *options: str) -> Ran:
    done = subprocess.run(
        [sys.executable, DEMO, "--quick", "--json", "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    return Ran(out, done.returncode, json.loads(done.stdout), done.stderr)


def narrow(settings: Settings, is_json: bool) -> tuple[Settings, bool]:
    return dataclasses.replace(settings, width=64), is_json


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The demo in this process with half of the width; its trainings are processes that find Lightning imported."""
    out, printed, screen = tmp_path_factory.mktemp("demo") / "out", io.StringIO(), io.StringIO()
    settings = demo._settings
    start = functools.partial(interpreters.Popen, preload=interpreters.LIGHTNING)
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(printed), redirect_stderr(screen):
        patched.setattr("demo.process.subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
        patched.setattr(demo, "_settings", lambda given: narrow(*settings(given)))
        status = demo.main(["--quick", "--json", "--out", str(out)])
    assert printed.getvalue(), screen.getvalue()
    return Ran(out, status, json.loads(printed.getvalue()), screen.getvalue())


pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)


def test_the_killed_run_is_identical_and_the_demo_says_so(quick: Ran) -> None:
    """Status 0, the sentence on the screen, and numbers that come from a comparison of every step."""
    assert quick.status == 0, quick.screen
    assert "bitwise identical to the uninterrupted run: yes" in quick.screen
    assert quick.result["identical"] is True
    summary = quick.screen.rstrip().splitlines()
    assert len(summary) - 1 - summary.index("") <= 10
    steps = quick.result["settings"]["steps"]
    (restart,) = quick.result["restarts"]
    assert quick.result["compared"]["steps"] == steps + restart["lost_steps"]
    assert quick.result["compared"]["samples"] == 8 * quick.result["compared"]["steps"]
    assert quick.result["compared"]["tensor_bytes"] > 1e6


def test_the_kill_was_real_and_in_the_middle_of_an_epoch(quick: Ran) -> None:
    """Two processes trained; the second went on from a snapshot, at most where the first had been killed."""
    records = [json.loads(line) for line in (quick.out / "killed/record.jsonl").read_text().splitlines() if line]
    starts = [record for record in records if record["kind"] == "start"]
    assert len({start["pid"] for start in starts}) == 2
    (restart,) = quick.result["restarts"]
    assert starts[1]["step"] == restart["resumed_step"]
    assert 0 < restart["resumed_step"] <= restart["killed_step"] < quick.result["settings"]["steps"]
    assert restart["killed_step"] % quick.result["settings"]["epoch_batches"] != 0


def test_the_picture_and_the_numbers_are_written(quick: Ran) -> None:
    """Both paths are printed, and the files have the right content."""
    assert Path(quick.result["plot"]).read_bytes().startswith(b"\x89PNG")
    assert quick.result["plot"] in quick.screen
    assert json.loads((quick.out / "result.json").read_text()) == quick.result


def test_a_spoiled_record_or_state_of_a_real_run_is_reported(quick: Ran, tmp_path: Path) -> None:
    """The comparison that said yes says no after one changed digit of one loss, or one flipped bit of one weight."""
    steps = quick.result["settings"]["steps"]
    spoiled = shutil.copytree(quick.out / "killed", tmp_path / "killed")
    lines = (spoiled / "record.jsonl").read_text().splitlines()
    index = max(i for i, line in enumerate(lines) if '"kind": "step"' in line)
    digit = lines[index].index('"loss": "0x1.') + len('"loss": "0x1.')
    lines[index] = lines[index][:digit] + ("1" if lines[index][digit] == "0" else "0") + lines[index][digit + 1 :]
    (spoiled / "record.jsonl").write_text("\n".join(lines) + "\n")
    (difference,) = compare_runs(quick.out / "reference", spoiled, steps).differences
    assert difference.startswith(f"step {steps}: loss 0x1.")

    shutil.copy(quick.out / "killed/record.jsonl", spoiled)
    state = torch.load(spoiled / "final.pt", weights_only=True)
    state["optimizer"][0]["state"][0]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    torch.save(state, spoiled / "final.pt")
    (difference,) = compare_runs(quick.out / "reference", spoiled, steps).differences
    assert difference.startswith("final/optimizer/0/state/0/exp_avg: 1 of ")


@pytest.mark.slow
def test_a_run_with_one_flipped_bit_is_reported_and_fails(tmp_path: Path) -> None:
    """One bit of one weight of the killed run, flipped while it trains: status 1, and the first step after it named."""
    spoiled = run_demo(tmp_path / "out", "--kills", "2", "--flip-bit-at", "20")
    assert spoiled.status == 1
    assert spoiled.result["identical"] is False
    assert "bitwise identical to the uninterrupted run: NO" in spoiled.screen
    step = int(spoiled.result["compared"]["differences"][0].split(":")[0].removeprefix("step "))
    assert step > 20
    assert any(difference.startswith("final/weights/") for difference in spoiled.result["compared"]["differences"])


@pytest.mark.slow
def test_overhead_is_measured_in_pairs(tmp_path: Path) -> None:
    """The overhead comes from real trainings with and without the callback, whose seconds are in the numbers."""
    ran = run_demo(tmp_path / "out", "--kills", "0", "--pairs", "2")
    assert ran.status == 0
    assert ran.result["restarts"] == []
    overhead = ran.result["overhead"]
    assert overhead["budget_percent"] == pytest.approx(10.0)
    assert [pair["without"]["own_percent"] for pair in overhead["pairs"]] == [None, None]
    assert all(pair["with_callback"]["seconds"] > 0.0 for pair in overhead["pairs"])
    assert overhead["snapshots"] > 0


@pytest.mark.slow
def test_a_lost_disk_is_made_good_by_the_tier_on_s3(tmp_path: Path) -> None:
    """Trainer and writer are killed and the snapshot folder is removed: the run goes on from S3, bit for bit."""
    ran = run_demo(tmp_path / "out", "--tier", "s3", "--kills", "2")
    assert ran.status == 0, ran.screen
    assert ran.result["identical"] is True
    first, last = ran.result["restarts"]
    assert (first["disk_lost"], last["disk_lost"]) == (False, True)
    assert last["victims"] == "trainer and writer"
    assert last["resumed_step"] > 0
    assert last["resumed_from"].startswith("restored from s3://demo/run")
    assert "bitwise identical to the uninterrupted run: yes" in ran.screen
