"""Several ranks compare their own steps, and rank 0 reports the earliest difference of all, without a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ckpt_engine.copy.host_memory import shared_bytes
from ckpt_engine.observe.resume_report import Replay
from ckpt_engine.probe.recorder import FlightRecorder
from ckpt_engine.store.rows import ROW_BYTES, ROWS, ProcessRows, Ring, decode
from tests.ranks.runs import SharedStore, ThreadRanks

SIZE, STEPS = 3, 6
Change = Callable[[int, int, torch.nn.Module, torch.Tensor], None]
"""Changes a weight or the batch of a rank at a step."""


def life(
    change: Change = lambda *_: None, earlier: Sequence[Sequence[ProcessRows]] = (), *, leads: bool = False
) -> tuple[list[list[ProcessRows]], list[list[Replay]]]:
    """What the ranks record in some steps from step 0 on, and what each reports. `leads`: rank 0 ends first."""
    store = SharedStore()
    told: list[list[Replay]] = [[] for _ in range(SIZE)]
    ranks = []
    for rank in range(SIZE):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        recorder = FlightRecorder(
            lambda one=optimizer: {"optimizer": one},  # type: ignore[misc]
            lambda one=model: {"model": one},  # type: ignore[misc]
            ThreadRanks(rank, SIZE, store),
            stops=False,
        )
        recorder.proof.told = told[rank].append
        ranks.append((model, optimizer, recorder))
    rows = []
    try:
        for rank, (_, _, recorder) in enumerate(ranks):
            if earlier:
                recorder.expect({"calls": 0, "batch": 0, "world": SIZE}, 0, earlier[rank])
        for step in range(1, STEPS + 1):
            for rank, (model, optimizer, recorder) in enumerate(ranks):
                torch.manual_seed(100 * rank + step)
                batch = torch.rand(4)
                change(rank, step, model, batch)
                recorder.took(batch)
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float(step))
                optimizer.step()
            for _, _, recorder in ranks:
                recorder.boundary(step)
        for _, _, recorder in ranks:
            ring = Ring(shared_bytes(recorder.fd, ROWS * ROW_BYTES, writable=False))
            found = tuple(row for data in ring.after(0) if (row := decode(data)) is not None)
            rows.append([ProcessRows(recorder.about, found)])
    finally:
        for _, _, recorder in ranks if leads else reversed(ranks):
            recorder.close()
    return rows, told


def at(*places: tuple[int, int, str]) -> Change:
    """Changes a weight or a batch at these ranks and steps."""

    def change(rank: int, step: int, model: torch.nn.Module, batch: torch.Tensor) -> None:
        for where in places:
            if where == (rank, step, "batch"):
                batch += 1.0
            elif where == (rank, step, "weights"):
                for parameter in model.parameters():
                    parameter.data += 1.0

    return change


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([(1, 3, "weights"), (0, 5, "weights")], (1, 3, "weights")),
        ([(0, 2, "weights"), (2, 4, "batch")], (0, 2, "weights")),
        ([(0, 4, "weights"), (1, 4, "batch")], (1, 4, "batch")),
        ([(2, 6, "batch")], (2, 6, "batch")),
    ],
    ids=["another rank is first", "rank 0 is first", "a batch causes weights of the same step", "the last step"],
)
def test_the_earliest_difference_of_all_ranks_is_reported(
    places: list[tuple[int, int, str]], first: tuple[int, int, str]
) -> None:
    """By rank 0, once, with the rank that has seen it."""
    _, told = life(at(*places), life()[0])
    (replay,) = told[0]
    assert replay.first is not None
    assert (replay.first.step, replay.first.what) == first[1:]
    assert replay.why.startswith(f"on rank {first[0]}: ")


def test_a_resume_is_proved_where_all_ranks_have_proved_it() -> None:
    """Each rank has repeated all its steps; the other ranks report nothing at the time."""
    _, told = life(earlier=life()[0])
    assert [one.result for one in told[0]] == ["exact"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_without_a_record_keeps_the_resume_from_being_proved(rank: int) -> None:
    """As where its machine was lost; it is named."""
    earlier, _ = life()
    earlier[rank] = []
    _, told = life(earlier=earlier)
    assert [(one.result, one.why) for one in told[0]] == [
        ("not compared", f"on rank {rank}: no earlier process has left a record")
    ]


@pytest.mark.parametrize(
    ("leads", "result", "why"),
    [(False, "exact", "6 of 6"), (True, "not compared", "on rank 2: its steps were not compared until the end")],
)
def test_training_may_end_before_the_last_repeated_step_of_a_rank(*, leads: bool, result: str, why: str) -> None:
    """What it has compared counts. Rank 0 does not wait for it, and then does not call the resume proved."""
    earlier, _ = life()
    (whole,) = earlier[2]
    more = tuple(whole.rows[-1]._replace(calls=STEPS + n, number=STEPS + n) for n in (1, 2))
    earlier[2] = [ProcessRows(whole.about, (*whole.rows, *more))]
    _, told = life(earlier=earlier, leads=leads)
    (replay,) = told[0]
    assert replay.result == result
    assert replay.why.startswith(why)
