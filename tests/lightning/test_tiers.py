"""A Lightning run on two tiers that loses its nearest one."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.lightning.cases import CASES
from tests.lightning.runs import every_batch, fit, only, resumer, saved, tail


def test_a_run_resumes_exactly_from_the_far_tier_alone(tmp_path: Path) -> None:
    """The nearest folder is gone: training continues bit for bit from what was copied, in the same run."""
    case = next(iter(CASES.values()))
    reference = fit(case)
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [str(near), {"url": str(far), "keep": {"last": 1000}}]
    watched = fit(case, every_batch(near, tiers=tiers))
    assert watched.digest == reference.digest, "the tiers changed the run"
    there = [snapshot for snapshot in saved(far) if snapshot.kind not in ("stopped", "finished")]
    assert {snapshot.id for snapshot in saved(near)} == {snapshot.id for snapshot in saved(far)}
    snapshot = next(one for one in there if one.epoch == 1)
    copy = only(far, snapshot, tmp_path / "copy")
    shutil.rmtree(near)
    resumed = fit(case, [resumer(near, tiers=[str(near), str(copy)])], ckpt_path="auto", seed=99)
    assert resumed.trace == tail(reference.trace, snapshot.epoch, snapshot.batch)
    assert resumed.digest == reference.digest
    assert (near / "ckpt.json").read_bytes() == (copy / "ckpt.json").read_bytes()
