"""What all ranks that diverge must know of each other: a stop of any, what each has in memory, and the options."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.engine import Engine
from ckpt_engine.errors import ConfigError, DivergedError, RollbackRequestedError
from ckpt_engine.loop import diverging
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.preempt.stop_requests import StopNotice
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, ThreadRanks, on_all, open_ranks
from tests.ranks.test_checkpointer import close_all, save_all
from tests.ranks.test_diverging import LOST, OPTIONS, End


def stopped(end: End) -> None:
    """As if `ckpt stop` had been heard there."""
    end.halt.watch._requested = StopNotice("ckpt stop", time.monotonic(), PATIENCE_SECONDS, 143)


def codes(ends: list[End], errors: list[DivergedError | None]) -> list[Any]:
    """With what each rank ends."""
    found = []
    for end, error in zip(ends, errors, strict=True):
        assert error is not None
        last = end.halt.end_of(error)
        found.append(last.code if isinstance(last, SystemExit) else last)
    return found


@pytest.mark.cells(1)
@pytest.mark.parametrize("where", ["together", "over"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_stop_of_any_rank_is_one_of_all_that_have_diverged(where: str, who: int, tmp_path: Path) -> None:
    """Who calls `fit` again after a rollback must not get there, and the next start goes back all the same."""
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    stopped(ends[who])
    errors = on_all(lambda rank: getattr(ends[rank], where)(LOST if rank == 1 else None), 3)
    assert {type(error) for error in errors} == {RollbackRequestedError}
    assert codes(ends, errors) == [143] * 3
    assert json.loads((tmp_path / "run" / "rollback.json").read_text())["step"] == 1
    close_all(engines)


@pytest.mark.parametrize("who", [0, 1])
def test_a_stop_that_comes_while_ranks_wait_for_the_verdict(
    who: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes late, but before rank 0 has said how all end: all ranks end with its status."""
    engines = open_ranks(tmp_path / "run", 2, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    rule = ends[0].diverging._rule

    def late(found: Divergence) -> Any:
        stopped(ends[who])
        if who:
            ends[0].until_another_stops()
        return rule(found)

    monkeypatch.setattr(ends[0].diverging, "_rule", late)
    errors = on_all(lambda rank: ends[rank].together(LOST if rank == 1 else None), 2)
    assert codes(ends, [*errors]) == [143] * 2
    close_all(engines)


@pytest.mark.parametrize("where", ["together", "over"])
def test_all_ranks_flush_what_they_have_in_memory(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reaches the writers of its own machine only, and plans when all others have been asked."""
    monkeypatch.setattr(Engine, "memory", True)
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    flushed: list[int] = []
    for rank, end in enumerate(ends):
        monkeypatch.setattr(end.halt.watch.run.flush, "begin", lambda rank=rank: flushed.append(rank))
    errors = on_all(lambda rank: getattr(ends[rank], where)(LOST if rank == 1 else None), 3)
    assert {type(error) for error in errors} == {RollbackRequestedError}
    assert sorted(flushed) == [0, 1, 2] and flushed[-1] == 0
    close_all(engines)


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("options", [{"guard": "nan"}, OPTIONS])
def test_options_that_differ_between_ranks_are_refused_on_all(
    who: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """A rank that judges no losses would not come to the meetings of the others."""
    store = SharedStore()
    engines = [
        Checkpointer(
            tmp_path / "run", ranks=ThreadRanks(rank, 3, store), writer="thread", **(options if rank == who else {})
        )
        for rank in range(3)
    ]

    def error(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            diverging.require_alike(engines[rank].engine)
        return str(caught.value)

    (text,) = set(on_all(error, 3))
    name = "guard" if "guard" in options else "rollback"
    assert f"{name} differs between ranks" in text and f"on rank {who or 1}" in text
    close_all(engines)
    same = open_ranks(tmp_path / "run", 3, **options)
    on_all(lambda rank: diverging.require_alike(same[rank].engine), 3)
    close_all(same)
