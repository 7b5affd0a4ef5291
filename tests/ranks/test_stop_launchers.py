"""A real SIGTERM to a run of two ranks by every way to start it: to one rank, to the other, to all, to the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import writers_of
from tests.ranks.stopped import SIZE, WAYS, Account, Launched, gone, snapshots

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("way", WAYS)
def test_sigterm_loses_nothing(way: str, tmp_path: Path) -> None:
    """All ranks stop after the same step with one last snapshot, say 143, and leave no process; lives add up."""
    (tmp_path / "reference").mkdir()
    reference = Launched(way, tmp_path / "reference", 0, pace=0.0)
    assert reference.end() == 0, reference.traces.log()
    account = Account(reference.traces)
    # A launcher takes its time to pass the signal on: it comes first, when many steps are left to train.
    targets = [*(["launcher"] if way != "script" else []), "1", "0", "all"]
    for number, target in enumerate(targets):
        life = Launched(way, tmp_path, number, pace=0.2)
        life.traces.reach(2)
        ranks = [life.traces.pid(rank) for rank in range(SIZE)]
        processes = [*ranks, *writers_of(ranks)]
        life.signal(target)
        status = life.end()
        log = life.traces.log()
        assert status == (143 if way == "script" else 1), log
        assert [life.traces.exit(rank) for rank in range(SIZE)] == ["143"] * SIZE, log
        account.add(life.traces)
        assert snapshots(tmp_path)[number:] == [(account.step, "signal")], log
        assert "SIGKILL" not in log and "forcefully" not in log.lower(), log
        assert gone(processes), log
    last = Launched(way, tmp_path, len(targets), pace=0.0)
    assert last.end() == 0, last.traces.log()
    account.add(last.traces, ends=True)
