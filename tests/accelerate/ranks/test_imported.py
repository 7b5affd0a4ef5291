"""A run of transformers' own Trainer under several ranks goes on with ours, from its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.cli.main import main
from tests.accelerate.ranks.lives import Lives, kill, require_continuation, require_same_end

SAVING = {"arguments": {"save_strategy": "steps", "save_steps": 10}}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_imported_folder_goes_on(lives_in: Callable[..., Lives], tmp_path: Path) -> None:
    """With the samples that the Trainer had left; from then on exactly, killed or not."""
    theirs = lives_in("theirs", without=True, together=True).whole(**SAVING)
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "theirs" / "run-out" / "checkpoint-10"), str(tmp_path / "first" / "run")])
    assert not ended.value.code
    lives = lives_in("first", seed=0, together=True)
    first = lives.start(pace=0.05)
    first.until(lambda: len(lives.snapshots()) > 1)
    first.reach(3)
    kill(first.pids)
    lives.join()
    for rank in range(2):
        expected = [line["samples"] for line in theirs.batches(rank) if line["step"] >= 10]
        found = [line["samples"] for line in first.batches(rank)]
        assert found == expected[: len(found)], first.log()
    lives.whole()
    straight = lives_in("second", seed=0, together=True)
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "theirs" / "run-out" / "checkpoint-10"), str(tmp_path / "second" / "run")])
    reference = straight.whole()
    require_continuation(lives.lives[-1], reference)
    require_same_end(lives.lives[-1], reference)
    lost = {one["name"] for one in straight.report()["not_restored"]}
    assert lost == {"random streams", "running loss"}
