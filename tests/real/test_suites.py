"""`third_party/suite.py` runs a suite without us and with us in every Trainer, and names what only fails with us."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_ckpt import AdaptiveCheckpoint
from tests.real.third_party import suite
from tests.real.third_party.in_every_lightning_trainer import add_to_every_trainer

HERE = Path(__file__).parent
SUITE = HERE / "suites" / "suite_of_a_user.py"


def _compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    copy = folder / SUITE.name
    copy.write_text(SUITE.read_text())
    places = (HERE / "third_party", HERE.parents[1])
    return subprocess.run(
        [sys.executable, suite.__file__, "--timeout", "300", "--", "-p", "no:cacheprovider", str(copy), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
    )


@pytest.mark.slow
def test_a_suite_is_run_with_us_in_every_trainer(tmp_path: Path) -> None:
    """What fails only with us is named with its first line; what fails anyway, or now and then, is not blamed."""
    done = _compare(tmp_path, "-q")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [one["test"].rpartition("::")[2] for one in report["new_failures"]] == ["test_that_counts_callbacks"]
    assert report["new_failures"][0]["line"] == "AssertionError: there is a callback"
    assert [one["test"].rpartition("::")[2] for one in report["unsteady"]] == ["test_that_is_unsteady"]
    assert [one["line"] for one in report["failed_before"]] == ["ValueError: as ever"]
    assert (report["passed"], report["skipped"]) == (4, 1)


@pytest.mark.slow
def test_a_suite_that_does_not_change_ends_well(tmp_path: Path) -> None:
    """Exit code 0; its progress is on the error stream. Tests that do not exist are an error of pytest.

    The suite has no configuration: pytest finds its root by the paths among its arguments, in each run the same one.
    """
    done = _compare(tmp_path, "-k", "trains and None")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["new_failures"], report["passed"], report["skipped"]) == ([], 1, 0)
    assert "run 2: with AdaptiveCheckpoint in every Trainer: 1 of 1 tests, 0 failed" in done.stderr
    wrong = _compare(tmp_path, "-k", "no_such_test")
    assert (wrong.returncode, "pytest ended with exit code 5" in wrong.stderr) == (2, True)


def test_each_trainer_gets_one_callback_of_ours(tmp_path: Path) -> None:
    """Beside those of the user, whatever form they have; none where there is one already. It can be undone."""
    original = pl.Trainer.__init__
    undo = add_to_every_trainer(tmp_path)
    try:
        for given in (None, [], pl.Callback(), [pl.Callback()], [AdaptiveCheckpoint(tmp_path / "own")]):
            trainer = pl.Trainer(callbacks=given, accelerator="cpu", logger=False, enable_checkpointing=False)
            assert [type(one) for one in trainer.callbacks].count(AdaptiveCheckpoint) == 1
        assert len(list(tmp_path.iterdir())) == 4
        assert inspect.signature(pl.Trainer.__init__) == inspect.signature(original)
    finally:
        undo()
    assert pl.Trainer.__init__ is original
