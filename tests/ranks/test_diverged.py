"""The loss of one rank diverges: all ranks end with the same error, and the next start of all goes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.preempt.divergence import LEAST
from tests.ranks.diverged import BATCHES, Lives
from tests.ranks.launch import Launcher

AT = BATCHES + 3
"""The first step whose loss is bad: of the third batch of the second epoch."""
ROLLBACK: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 2}}
SICK = [1, 1, 2, 1, "nan"]
"""Rank 1 has it there, once."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_diverging")
    yield made
    made.close()


@pytest.fixture
def lives(launcher: Launcher, tmp_path: Path) -> Iterator[Lives]:
    made = Lives(launcher, tmp_path)
    yield made
    made.close()


@pytest.mark.long
def test_all_ranks_go_back_and_leave_the_same_batches_out(lives: Lives) -> None:
    """Nothing is saved from the bad loss on, and the end is bitwise that of a run that never had these batches."""
    first = lives.run(options=ROLLBACK, sick=[SICK])
    assert first.statuses == [1, 1], first.log()
    kind, text = first.error()
    assert kind == "RollbackRequestedError"
    assert f"the loss of step {AT} is nan on rank 1; rollback 1 of 3" in text
    assert f"resumes at step {AT - 1} and skips 2 batches of each of 2 ranks" in text
    assert lives.steps() == [*range(1, AT)], first.log()
    assert first.batches(0) == first.batches(1)
    assert AT < len(first.batches(0)) <= AT + 2
    second = lives.whole(options=ROLLBACK, sick=[SICK])
    expected = [(1, batch) for batch in range(4, BATCHES)]
    assert second.batches(0) == second.batches(1) == expected, second.log()
    assert second.weights() == lives.without([1, 2, 2])
    assert f"rollback 1: the loss of step {AT} is nan on rank 1; 2 batches of each of 2 ranks are skipped" in (
        lives.notes()
    )
    assert second.log().count("training goes on at step") == 1, "not said once"


def test_in_the_very_last_step(lives: Lives) -> None:
    """No boundary is left: the ranks meet at the end, and the final state is not saved."""
    options = {**ROLLBACK, "every_n_steps": 5}
    life = lives.run(epochs=1, options=options, sick=[[1, 0, BATCHES - 1, 1, "nan"]])
    assert life.statuses == [1, 1], life.log()
    kind, text = life.error()
    assert kind == "RollbackRequestedError"
    assert f"the loss of step {BATCHES} is nan on rank 1" in text
    assert lives.steps() == [5]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_guard_ends_all_ranks_alike(rank: int, lives: Lives) -> None:
    """The run goes on by hand from the snapshot before, and with the same batches."""
    life = lives.run(options={"guard": "nan"}, sick=[[rank, 1, 2, 1, "nan"]])
    assert life.statuses == [1, 1], life.log()
    kind, text = life.error()
    assert kind == "DivergedError"
    assert f"the loss of step {AT} is nan on rank {rank} → step {AT - 1} is durable" in text
    assert lives.steps() == [*range(1, AT)]
    rest = lives.whole(options={"guard": "nan"})
    assert rest.batches(0)[0] == rest.batches(1)[0] == (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spike_of_one_rank_goes_back_to_before_its_first_loss(lives: Lives) -> None:
    """Four in a row; what was due meanwhile is absent for all ranks, though the others saw nothing."""
    options = {"rollback": {"on": "loss_spike", "skip_batches": 4}}
    first = LEAST + 2
    job: dict[str, Any] = {"epochs": 4, "options": options, "sick": [[1, first // BATCHES, first % BATCHES, 4, 1e4]]}
    life = lives.run(**job)
    assert life.statuses == [1, 1], life.log()
    kind, text = life.error()
    assert kind == "RollbackRequestedError"
    assert "the loss on rank 1 is far above its usual" in text and f"since step {first + 1}" in text
    assert lives.steps() == [*range(1, first + 1)]
    rest = lives.whole(**job)
    assert rest.weights() == lives.without([2, 2, 4], epochs=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_stays_sick_goes_further_back_and_gives_up(lives: Lives) -> None:
    """Once per rollback and not per rank: after `at_most` of them it ends for good, on all ranks."""
    options = {"rollback": {"on": "nan", "skip_batches": 1, "at_most": 2}}
    job: dict[str, Any] = {"options": options, "sick": [[1, 1, 2, 100, "nan"]]}
    steps = []
    for number in (1, 2):
        life = lives.run(**job)
        assert life.statuses == [1, 1], life.log()
        assert life.error()[0] == "RollbackRequestedError", life.log()
        assert lives.rollback()["count"] == number
        steps.append(lives.rollback()["step"])
    assert steps == [AT - 1, AT - 2]
    last = lives.run(**job)
    assert last.statuses == [1, 1]
    kind, text = last.error()
    assert kind == "DivergedError"
    assert "rolled back 2 times already" in text
    assert lives.rollback()["count"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("after", [1, 2])
def test_a_rank_that_is_killed_while_this_goes_on(victim: int, after: int, lives: Lives) -> None:
    """In one of the steps after the bad loss: the other rank ends by an error, and the next start works."""
    # A writer that outlives its rank says that it has no part in a snapshot.
    job: dict[str, Any] = {"options": {**ROLLBACK, "writer": "process"}, "sick": [SICK]}
    life = lives.run(**job, events={f"{victim}/1/{2 + after}": "SIGKILL"})
    assert life.statuses[victim] in (-9, 1), life.log()  # all may have ended before that step
    assert life.statuses[1 - victim] == 1, life.log()
    assert all(step < AT for step in lives.steps())
    for _ in range(2):
        rest = lives.run(**job)
        if rest.statuses == [0, 0]:
            break
        assert rest.statuses == [1, 1], rest.log()
        assert rest.error()[0] == "RollbackRequestedError"
    assert rest.weights() == lives.without([1, 2, 2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_processes_may_call_fit_again(lives: Lives) -> None:
    """On all ranks, with the same trainer and model."""
    life = lives.whole(options=ROLLBACK, sick=[SICK], fits=2)
    assert len(life.of(0, "again")) == len(life.of(1, "again")) == 1
    assert life.of(0, "again") == life.of(1, "again")
    assert life.weights() == lives.without([1, 2, 2])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_is_not_lost_on_who_calls_fit_again(stopped: int, lives: Lives) -> None:
    """The signal comes in the step whose loss is bad, or for rank 0 in the step after it: both ranks stop."""
    job: dict[str, Any] = {"options": ROLLBACK, "sick": [SICK], "fits": 3}
    life = lives.run(**job, events={f"{stopped}/1/{2 + (stopped == 0)}": "SIGTERM"})
    assert life.statuses == [143, 143], life.log()
    assert not life.of(0, "again") and not life.of(1, "again")
    assert lives.rollback()["step"] == AT - 1
    rest = lives.whole(**job)
    assert rest.batches(0) == rest.batches(1) == [(1, batch) for batch in range(4, BATCHES)], rest.log()
    assert rest.weights() == lives.without([1, 2, 2])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", [{"guard": "nan"}, ROLLBACK])
def test_one_rank_alone_has_no_guard(extra: dict[str, Any], lives: Lives) -> None:
    """All ranks raise at once; otherwise they would wait for each other in vain."""
    life = lives.run(only=1, extra=extra)
    assert life.statuses == [1, 1], life.log()
    kind, text = life.error()
    assert kind == "ConfigError" and "differs between ranks" in text
    assert not life.batches(0) and not life.batches(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_leaves_the_same_samples_out(size: int, lives: Lives) -> None:
    """As many batches of each rank as have those of two: what they did not see, and the rest comes once."""
    job: dict[str, Any] = {"options": ROLLBACK, "sick": [SICK]}
    first = lives.run(**job)
    assert first.statuses == [1, 1], first.log()
    healthy = lives.whole(seed=0, leave=[[1, 2, 2]])
    rest = lives.whole(options=ROLLBACK, size=size)
    batches = {1: 4, 4: 1}[size]
    assert rest.batches(0)[0] == (1, 2 + batches)
    after = [
        line["ids"] for rank in range(2) for line in healthy.of(rank, "ids") if (line["epoch"], line["batch"]) > (1, 1)
    ]
    assert rest.samples() == sorted(one for ids in after for one in ids)
    said = {1: "4 batches are skipped", 4: "1 batch of each of 4 ranks is skipped"}[size]
    assert any(note.endswith(said) for note in lives.notes()), lives.notes()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("divide", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_sharded_models_too(divide: str, lives: Lives) -> None:
    """They have the same ranks. A loss that is lost on one is lost on all in the next step."""
    job: dict[str, Any] = {"divide": divide, "options": ROLLBACK, "sick": [SICK]}
    first = lives.run(**job)
    assert first.statuses == [1, 1], first.log()
    assert f"the loss of step {AT} is nan on rank 1" in first.error()[1]
    assert lives.steps() == [*range(1, AT)]
    second = lives.whole(**job)
    assert second.batches(0) == second.batches(1) == [(1, batch) for batch in range(4, BATCHES)]
    assert second.weights() == lives.without([1, 2, 2], divide=divide)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_share_a_model_have_the_same_samples(lives: Lives) -> None:
    """Of four ranks two have samples of their own: that is what the batches are counted by."""
    job: dict[str, Any] = {"size": 4, "divide": "tp", "options": ROLLBACK, "sick": [[3, 1, 2, 1, "nan"]]}
    first = lives.run(**job)
    assert first.statuses == [1] * 4, first.log()
    assert first.error()[1].endswith("skips 2 batches of each of 2 ranks")
    assert lives.rollback()["ranks"] == 2
    second = lives.whole(**job)
    assert second.batches(0) == second.batches(3) == [(1, batch) for batch in range(4, BATCHES)]
    assert second.weights() == lives.without([1, 2, 2], size=4, divide="tp")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_with_disks_of_their_own_all_remember_it(lives: Lives) -> None:
    """Rank 0 may start on another node next time: here both folders change places."""
    folder = lives.folder
    job: dict[str, Any] = {"root": str(folder / "run{rank}"), "options": ROLLBACK, "sick": [SICK]}
    first = lives.run(**job)
    assert first.statuses == [1, 1], first.log()
    texts = {(folder / f"run{rank}" / "rollback.json").read_text() for rank in range(2)}
    assert len(texts) == 1
    assert json.loads(texts.pop())["step"] == AT - 1
    (folder / "run0" / "rollback.json").unlink()  # as on a node that was away
    second = lives.whole(**job)
    assert second.batches(0) == second.batches(1) == [(1, batch) for batch in range(4, BATCHES)]
    assert second.weights() == lives.without([1, 2, 2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_all_have_in_memory_counts(lives: Lives) -> None:
    """A loss that is lost is lost on all ranks in the step after it: none has let go of the last good one then."""
    options = {
        "tiers": [{"url": "memory", "every_n_steps": 1}, str(lives.folder / "run")],
        "every_n_steps": 10**6,
        "writer": "process",
        "linger": 1,
        **ROLLBACK,
    }
    life = lives.run(options=options, sick=[SICK])
    assert life.statuses == [1, 1], life.log()
    assert life.error()[0] == "RollbackRequestedError"
    assert lives.rollback()["step"] == AT - 1
    assert lives.steps() == [AT - 1]
