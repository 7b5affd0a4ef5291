"""How ranks agree to end for a divergence: one decision, one error, one rollback, and no wait without an end."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import load_config
from ckpt_engine.errors import DivergedError, RanksError, RollbackRequestedError
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.loop import diverging, rank_decisions
from ckpt_engine.loop.diverging import Diverging, Rollbacks, whole
from ckpt_engine.loop.halt import Halt
from ckpt_engine.loop.rank_decisions import SharedCadence, hear
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import LogSink
from ckpt_engine.preempt.divergence import Divergence, RollbackRecord, earliest
from ckpt_engine.preempt.stop_requests import Stop, StopNotice
from ckpt_engine.preempt.watch import open_watch
from tests.ranks.node_roots.nodes import open_nodes
from tests.ranks.runs import PATIENCE_SECONDS, SharedStore, on_all, open_ranks
from tests.ranks.test_checkpointer import close_all, save_all
from tests.ranks.test_together import Rank, ranks

LOST = Divergence(3, 3, math.nan, 1.0, rank=1)
SOON = 0.3
_log = logging.getLogger("test")


def steps_until_the_end(found: list[Rank], news: dict[tuple[int, int], Any]) -> list[tuple[int, Any]]:
    """Step by step, either rank first; at which step each has ended, and the decision for it.

    Args:
        news: by step and rank: a divergence that it sees then, or a stop that it hears of.
    """
    ends: list[tuple[int, Any]] = []
    for step in range(1, 12):
        for number in (0, 1) if step % 2 else (1, 0):
            together, what = found[number].together, news.get((step, number))
            decision = together.decided(step)
            if decision is not None and (decision.diverged is not None or decision.stop is not None):
                ends.append((step, decision))
                continue
            if isinstance(what, Divergence):
                together.tell(what)
            stop = what if isinstance(what, Stop) else None
            together.lead(step, stop, asked=False, fits=lambda _: True)
        if ends:
            return ends
    raise AssertionError("no rank has ended")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_sees_ends_all_after_the_same_step(rank: int) -> None:
    """All end at the next boundary but one at the latest, without a last snapshot; each knows which rank saw it."""
    seen = replace(LOST, rank=rank)
    ends = steps_until_the_end([*ranks(1)], {(3, rank): seen})
    assert len(ends) == 2
    assert 3 < ends[0][0] == ends[1][0] <= 5
    for _, decision in ends:
        assert decision.reason is None and decision.stop is None
        found = Divergence(**decision.diverged)
        assert (found.first_step, found.rank) == (3, rank)


def test_a_divergence_after_a_stop_was_decided_changes_nothing() -> None:
    """On one rank, or on two."""
    now = time.monotonic()
    stop = Stop(StopNotice("SIGTERM", now, 30.0, 143), now + 30.0)
    for first, second in ((1, 1), (1, 0), (0, 1)):
        ends = steps_until_the_end([*ranks(100)], {(3, first): stop, (4, second): LOST})
        assert [decision.stop and decision.stop["stop"] for _, decision in ends] == ["SIGTERM"] * 2, (first, second)


def test_of_both_at_once_none_is_forgotten() -> None:
    """Rank 0 has a stop where it hears of the divergence: one decision for both, without a last snapshot."""
    now = time.monotonic()
    stop = Stop(StopNotice("SIGTERM", now, 30.0, 143), now + 30.0)
    for news in ({(3, 1): LOST, (4, 0): stop}, {(3, 0): LOST, (4, 0): stop}, {(3, 1): LOST, (4, 1): stop}):
        ends = steps_until_the_end([*ranks(100)], news)
        assert all(decision.diverged is not None for _, decision in ends), news
        stops = ["SIGTERM"] * 2 if (3, 1) in news and (4, 0) in news else [None] * 2
        assert [decision.stop and decision.stop["stop"] for _, decision in ends] == stops, news
        assert all(decision.reason is None for _, decision in ends)


def test_a_rank_that_is_past_that_boundary_ends_at_its_next_one() -> None:
    """A rank may be ahead, as those steps have no all-reduce: it ends at its next boundary."""
    first, second = ranks(100)
    for step in range(1, 4):
        second.step(step)
    first.together.tell(LOST)
    first.step(1)
    decision = second.together.decided(4)
    assert decision is not None and decision.diverged is not None


def test_the_earliest_first_loss_counts() -> None:
    """A loss that is lost on one rank is lost on all in the next step."""
    assert earliest([]) is None and earliest([None]) is None
    later = Divergence(4, 4, math.nan, None, rank=0)
    assert earliest([later, None, LOST]) == LOST


def test_what_all_places_have_together_is_whole() -> None:
    """A part of some ranks counts with those of the others, and what a further tier has whole counts alone."""
    near = [["a", 1, [[0, 1], 4]], ["b", 2, [[0, 1], 4]], ["c", 3, [[0, 1], 4]]]
    far = [["a", 1, [[2, 3], 4]], ["c", 3, [[2], 4]]]
    assert whole(near, far) == [("a", 1)]
    assert whole(near, far, [["b", 2, None]]) == [("a", 1), ("b", 2)]


class End:
    """One rank at the end of its run."""

    def __init__(self, engine: Checkpointer) -> None:
        self.engine = engine
        assert engine.engine.ranks is not None
        settings = FrequencySettings(overhead=None, every_n_steps=1)
        self.shared = SharedCadence(settings, SystemClock(), LogSink(), engine.engine)
        _, watch = open_watch(engine.config, SystemClock(), engine.engine.ranks)
        self.halt = Halt(watch, engine.engine, SystemExit, _log, self.shared)
        rollbacks = (
            Rollbacks(engine.engine, _log, engine.engine.ranks.size) if engine.config.rollback is not None else None
        )
        self.rollbacks = rollbacks
        self.diverging = Diverging(engine.engine, self.halt, rollbacks, _log)

    def until_another_stops(self) -> None:
        """Wait until another rank has announced its stop."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.shared.together.verdicts.stops():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def together(self, own: Divergence | None = None) -> DivergedError:
        if own is not None:
            self.shared.together.tell(own)
        return self.diverging.together(LOST, own)

    def over(self, own: Divergence | None = None, step: int = 9) -> DivergedError | None:
        if own is not None:
            self.shared.together.tell(own)
        return self.diverging.at_the_end(own, step)


OPTIONS: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 5}, "keep": {"last": 100}}


def texts(errors: list[DivergedError | None]) -> set[tuple[type[Any], str]]:
    return {(type(one), str(one)) for one in errors}


def test_all_ranks_end_with_the_error_that_rank_0_has_found(tmp_path: Path) -> None:
    """All ranks raise the error, and at the next start all ranks find the same rollback."""
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    for step in (1, 2):
        save_all(engines, step)
    ends = [End(engine) for engine in engines]
    errors = on_all(lambda rank: ends[rank].together(LOST if rank == 1 else None), 3)
    ((kind, text),) = texts([*errors])
    assert kind is RollbackRequestedError
    assert "the loss of step 3 is nan on rank 1; rollback 1 of 3" in text
    assert "resumes at step 2 and skips 5 batches of each of 3 ranks" in text
    assert all(end.halt.done for end in ends)
    close_all(engines)
    again = open_ranks(tmp_path / "run", 2, **OPTIONS)
    newest = on_all(lambda rank: again[rank].engine.choose(), 2)[0]
    assert newest is not None

    def pending(rank: int) -> RollbackRecord | None:
        return Rollbacks(again[rank].engine, _log).pending(newest.info.id)

    found = on_all(pending, 2)
    assert found[0] is not None and found[0] == found[1]
    assert (found[0].step, found[0].ranks, found[0].batches_of(2)) == (2, 3, 8)
    assert on_all(lambda rank: Rollbacks(again[rank].engine, _log).pending("another"), 2) == [None, None]
    close_all(again)


def test_what_is_announced_after_the_decision_counts_too(tmp_path: Path) -> None:
    """One rank has a spike, and knows it at its fourth loss, when that of another one was lost already."""
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    spike = Divergence(5, 2, 900.0, 1.0, rank=2)
    ends[2].shared.together.tell(spike)
    errors = on_all(lambda rank: ends[rank].together({1: LOST, 2: spike}.get(rank)), 3)
    ((_, text),) = texts([*errors])
    assert "the loss on rank 2 is far above its usual 1 since step 2, and 900 at step 5" in text
    assert json.loads((tmp_path / "run" / "rollback.json").read_text())["diverged_step"] == 2
    close_all(engines)


def test_a_guard_ends_all_ranks_with_one_error(tmp_path: Path) -> None:
    """A guard without rollback leaves no record of a rollback."""
    engines = open_ranks(tmp_path / "run", 2, guard="nan")
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    ((kind, text),) = texts([*on_all(lambda rank: ends[rank].together(), 2)])
    assert kind is DivergedError
    assert "the loss of step 3 is nan on rank 1 →" in text and "with the same batches" in text
    assert not (tmp_path / "run" / "rollback.json").exists()
    close_all(engines)


def test_rank_0_that_is_silent_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and what this rank knows."""
    monkeypatch.setattr(rank_decisions, "HEAR_SECONDS", SOON)
    engines = open_ranks(tmp_path / "run", 2, **OPTIONS)
    save_all(engines, 1)
    error = End(engines[1]).together(LOST)
    assert type(error) is DivergedError
    assert "the loss of step 3 is nan on rank 1; rank 0 has not reported how to continue" in str(error)
    close_all(engines)


def test_a_store_that_is_gone_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the process of rank 0 that kept it. Rank 0 itself remembers where to go on all the same."""
    engines = open_ranks(tmp_path / "run", 2, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    ends[1].shared.together.tell(LOST)

    def gone(*_: Any) -> None:
        raise RanksError("the store does not answer")

    monkeypatch.setattr(SharedStore, "get", gone)
    monkeypatch.setattr(SharedStore, "set", gone)
    error = ends[1].diverging.together(LOST, LOST)
    assert type(error) is DivergedError and "the store does not answer" in str(error)
    assert isinstance(ends[0].diverging.together(LOST, None), RollbackRequestedError)
    assert json.loads((tmp_path / "run" / "rollback.json").read_text())["step"] == 1
    monkeypatch.undo()
    close_all(engines)


@pytest.mark.long
def test_a_rank_that_never_hears_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be dead: rank 0 ends, and what it has found stays in the store for a while."""
    monkeypatch.setattr(rank_decisions, "HEARD_SECONDS", SOON)
    engines = open_ranks(tmp_path / "run", 2, **OPTIONS)
    save_all(engines, 1)
    ends = [End(engine) for engine in engines]
    first = ends[0].together()
    assert texts([first]) == texts([ends[1].together()])
    close_all(engines)


def test_a_stop_leaves_less_time(tmp_path: Path) -> None:
    """The process is killed at the end of the grace, whatever it waits for; looked at while it waits."""
    store, began = SharedStore(), time.monotonic()
    left = iter([100.0, 100.0, 0.0])
    with pytest.raises(Exception, match="no rank has said 'verdict'"):
        hear(store, "verdict", 100.0, lambda _: next(left))
    assert next(left, None) is None
    assert time.monotonic() - began < 60.0
    engines = open_ranks(tmp_path / "run", 2, **OPTIONS)
    end = End(engines[1])
    now = time.monotonic()
    end.halt.watch._requested = StopNotice("ckpt stop", now, 0.0)
    assert "rank 0 has not reported" in str(end.together(LOST))
    close_all(engines)


@pytest.mark.cells(1)
@pytest.mark.parametrize("seer", [0, 1, 2])
def test_the_end_of_training_is_a_boundary_too(seer: int, tmp_path: Path) -> None:
    """For what the last losses say: of any rank, and all end alike."""
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 2)
    ends = [End(engine) for engine in engines]
    seen = replace(LOST, rank=seer)
    errors = on_all(lambda rank: ends[rank].over(seen if rank == seer else None), 3)
    ((kind, text),) = texts(errors)
    assert kind is RollbackRequestedError
    assert f"the loss of step 3 is nan on rank {seer}" in text
    close_all(engines)


def test_at_the_end_of_a_good_training_nothing_happens(tmp_path: Path) -> None:
    """All ranks know that of each other."""
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    ends = [End(engine) for engine in engines]
    assert on_all(lambda rank: ends[rank].over(), 3) == [None] * 3
    assert not (tmp_path / "run" / "rollback.json").exists()
    assert not any(end.halt.done for end in ends)
    close_all(engines)


def test_who_comes_too_late_to_the_end_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, and the final snapshot is absent at once, because its share is missed."""
    monkeypatch.setattr(diverging, "LAST_SECONDS", SOON)
    monkeypatch.setattr(rank_decisions, "HEARD_SECONDS", SOON)
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 2)
    ends = [End(engine) for engine in engines]
    assert on_all(lambda rank: ends[rank].over(), 2) == [None, None]
    error = ends[2].over(replace(LOST, rank=2))
    assert type(error) is DivergedError and "rank 0 did not wait for this one" in str(error)
    assert engines[2].engine.count == engines[0].engine.count + 1
    close_all(engines)


def test_without_rank_0_only_who_has_diverged_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have nothing to say."""
    monkeypatch.setattr(rank_decisions, "HEAR_SECONDS", SOON)
    engines = open_ranks(tmp_path / "run", 3, **OPTIONS)
    save_all(engines, 2)
    ends = [End(engine) for engine in engines]
    assert ends[1].over() is None
    error = ends[2].over(LOST)
    assert type(error) is DivergedError and "rank 0 has not reported" in str(error)
    close_all(engines)


def test_nodes_with_folders_of_their_own(tmp_path: Path) -> None:
    """What not all have is nothing to go back to; all remember it, and a start with another rank 0 knows it."""
    names = ["a", "b"]
    engines = open_nodes(tmp_path, names, 2, **OPTIONS)
    for step in (1, 2):
        save_all(engines, step)
    ends = [End(engine) for engine in engines]
    (newest,) = (tmp_path / "b" / "snapshots").glob("*s0000000002-*.json")
    newest.unlink()
    errors = on_all(lambda rank: ends[rank].together(LOST if rank == 3 else None), 4)
    ((kind, text),) = texts([*errors])
    assert kind is RollbackRequestedError and "resumes at step 1" in text
    close_all(engines)
    rows = [json.loads((tmp_path / name / "rollback.json").read_text()) for name in names]
    assert rows[0] == rows[1] and rows[0]["step"] == 1
    (tmp_path / "a" / "rollback.json").unlink()
    again = open_nodes(tmp_path, names, 2, **OPTIONS)
    newest_id = rows[1]["newest"]
    found = on_all(lambda rank: Rollbacks(again[rank].engine, _log).pending(newest_id), 4)
    assert [one and one.step for one in found] == [1] * 4
    close_all(again)


def test_a_rollback_of_one_process_is_read_as_ever(tmp_path: Path) -> None:
    """Older ones do not say how many ranks there were."""
    (tmp_path / "rollback.json").write_text(
        '{"snapshot": "a", "step": 1, "newest": "b", "diverged_step": 2, "skip_batches": 7, "count": 1, "why": "x"}'
    )
    with Checkpointer(load_config(tmp_path, **OPTIONS)) as engine:
        found = Rollbacks(engine.engine, _log).pending("b")
    assert found is not None
    assert (found.ranks, found.batches_of(1), found.batches_of(4)) == (1, 7, 2)
