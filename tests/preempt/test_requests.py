"""What somebody asks of a run from another shell reaches it as an event; here it is made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_engine.observe.events import Requested
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, fit, resumer, saved, tail
from tests.lightning.test_interrupted_runs import At
from tests.restore.memory_tier.lives import until


def asked(root: Path, what: str) -> AdaptiveCheckpoint:
    """A run that takes no snapshot by itself, and is asked for something while its sixth batch is trained."""
    ckpt = AdaptiveCheckpoint(str(root), every_n_steps=10**9, at_end=False, writer="thread", lazy="on")

    def ask() -> None:
        assert ckpt._run is not None
        engine = ckpt._run.engine
        until(engine.ready, lambda: "no snapshot could be taken")  # its writer starts behind the first steps
        engine.events.emit(Requested(what, "ann (pid 7)"))

    fit(Case(), [ckpt, At(5, ask)])
    return ckpt


def test_save_now_takes_one_snapshot_and_goes_on(tmp_path: Path) -> None:
    """The snapshot comes at the end of the step, and its manifest has the request as the reason."""
    asked(tmp_path, "save")
    (snapshot,) = saved(tmp_path)
    assert snapshot.step == 6
    assert json.loads(snapshot.path.read_bytes())["manifest"]["info"]["reason"] == "manual"


def test_stop_saves_and_ends_with_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, and the log says who it was."""
    reference = fit(Case())
    with pytest.raises(SIGTERMException) as ended:
        asked(tmp_path, "stop")
    assert ended.value.code == 0
    assert [one.step for one in saved(tmp_path)] == [6]
    assert f"ckpt stop by ann (pid 7): step 6 is durable on {tmp_path}" in caplog.text
    resumed = fit(Case(), [resumer(tmp_path)], ckpt_path="auto", seed=5)
    assert resumed.trace == tail(reference.trace, 1, 0)
    assert resumed.digest == reference.digest
