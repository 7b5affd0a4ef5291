"""Where a diverged run goes back to, as pure arithmetic, and the object that remembers it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.config import load_config
from ckpt_engine.errors import ConfigError, CorruptError
from ckpt_engine.preempt.divergence import (
    Divergence,
    RollbackRecord,
    plan_rollback,
    read_rollback,
    write_rollback,
)
from ckpt_engine.store import names
from ckpt_engine.store.storage.local import LocalStorage

steps = st.lists(st.integers(1, 60), max_size=12).map(lambda found: [(f"s{n}", step) for n, step in enumerate(found)])


@given(snapshots=steps, at=st.integers(1, 70), most=st.integers(1, 4))
def test_a_run_that_always_diverges_at_the_same_step_goes_further_back_until_it_gives_up(
    snapshots: list[tuple[str, int]], at: int, most: int
) -> None:
    """Never to a snapshot of the divergence or after it, never to the same place twice, and never without end."""
    before: RollbackRecord | None = None
    for number in range(1, most + 2):
        made = plan_rollback(snapshots, Divergence(at + 3, at, 9.0, 1.0), before, skip_batches=5, at_most=most)
        if isinstance(made, str):
            assert before is None or number == most + 1 or all(step >= before.step for _, step in snapshots)
            return
        assert made.step < at and made.count == number <= most
        assert before is None or made.step < before.step
        assert made.newest == snapshots[-1][0]
        before = made
    raise AssertionError("it never gave up")


def test_a_divergence_further_on_is_a_new_one() -> None:
    """The newest snapshot is good again; but the number of rollbacks of a run is bounded all the same."""
    snapshots = [("a", 10), ("b", 20), ("c", 30)]
    first = plan_rollback(snapshots[:2], Divergence(21, 21, 9.0, 1.0), None, skip_batches=5, at_most=2)
    assert isinstance(first, RollbackRecord) and (first.snapshot, first.count) == ("b", 1)
    second = plan_rollback(snapshots, Divergence(31, 31, 9.0, 1.0), first, skip_batches=5, at_most=2)
    assert isinstance(second, RollbackRecord) and (second.snapshot, second.count) == ("c", 2)
    third = plan_rollback(snapshots, Divergence(41, 41, 9.0, 1.0), second, skip_batches=5, at_most=2)
    assert third == "it was rolled back 2 times already, as often as rollback.at_most allows"
    none = plan_rollback([], Divergence(3, 3, 9.0, 1.0), None, skip_batches=5, at_most=2)
    assert none == "there is no snapshot to go back to"


def test_it_is_remembered_at_the_root(tmp_path: Path) -> None:
    """The record of a rollback survives at the root; a damaged record is an error and not the same as none."""
    storage = LocalStorage(tmp_path)
    assert read_rollback(storage) is None
    made = RollbackRecord("a", 10, "b", 21, 5, 1, "the loss of step 21 is nan")
    write_rollback(storage, made)
    write_rollback(storage, made)
    assert read_rollback(storage) == made
    assert names.is_ours(names.ROLLBACK)
    endless = json.dumps(asdict(made)).replace("21", "Infinity")
    for text in ("{", "[]", '{"snapshot": "a"}', endless, endless.replace("Infinity", "NaN")):
        (tmp_path / names.ROLLBACK).write_text(text)
        with pytest.raises(CorruptError, match=r"is damaged|not of ckpt-engine"):
            read_rollback(storage)


def test_the_options() -> None:
    """A rollback is a guard itself."""
    config = load_config("/data/run1", rollback={"on": "nan", "skip_batches": 7})
    assert config.rollback is not None
    assert (config.rollback.on, config.rollback.skip_batches, config.rollback.at_most) == ("nan", 7, 3)
    with pytest.raises(ConfigError, match="is a guard itself: remove guard"):
        load_config("/data/run1", rollback={"on": "nan"}, guard="nan")
    with pytest.raises(ConfigError, match=r"rollback\.on"):
        load_config("/data/run1", rollback={"skip_batches": 7})


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_another_number_of_ranks_leaves_no_sample_in(batches: int, ranks: int, now: int, per_step: int) -> None:
    """Whole optimizer steps, before and after: all that was left out is left out, and what is said is what is done."""

    def in_whole_steps(count: int) -> int:
        return -(-count // per_step) * per_step

    made = RollbackRecord("a", 10, "b", 21, in_whole_steps(batches), 1, "why", ranks)
    done = made.on(now, in_whole_steps)
    assert done.skip_batches * now >= made.skip_batches * ranks
    assert done.skip_batches % per_step == 0
    assert done.skip_batches * now < made.skip_batches * ranks + now * per_step
    assert done.text().startswith(f"rollback 1: why; {done.skip_batches:,} batch")
    assert made.on(ranks, in_whole_steps) == made
