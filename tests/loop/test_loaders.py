"""Every loader of a plain or Accelerate loop goes on where it was: evaluation, and samplers with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from tests.accelerate.runs import train_accelerate
from tests.loop.runs import (
    BATCH,
    SAMPLES,
    Augmented,
    Case,
    Train,
    assert_continues,
    shuffled,
    taken,
    train_plain,
)

_KEPT = {"num_workers": 2, "persistent_workers": True}
TRAINERS: Mapping[str, Train] = {"plain": train_plain, "accelerate": train_accelerate}


class Counting(Sampler[int]):
    """Draws by weights that its own passes move, and can save them."""

    def __init__(self) -> None:
        self.weights = torch.ones(SAMPLES, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for index in torch.multinomial(self.weights, SAMPLES, replacement=True).tolist():
            self.weights[index] += 1.0
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"].clone()


def counting(**options: Any) -> Any:
    return lambda: DataLoader(Augmented(), batch_size=BATCH, sampler=Counting(), **options)


CASES: Mapping[str, Case] = {
    "evaluation with persistent workers": Case(evaluation=shuffled(8, **_KEPT), evaluate_every=2),
    "evaluation with persistent workers per epoch": Case(evaluation=shuffled(8, **_KEPT)),
    "persistent workers in both": Case(
        loader=shuffled(**_KEPT), evaluation=shuffled(12, **_KEPT), evaluate_every=3, accumulate=2
    ),
    "a sampler with a state": Case(loader=counting(), evaluation=counting(), evaluate_every=2),
    "a sampler with a state, workers": Case(loader=counting(**_KEPT), evaluation=counting(num_workers=2)),
}
QUICK = [
    ("plain", "evaluation with persistent workers"),
    ("plain", "a sampler with a state"),
    ("accelerate", "evaluation with persistent workers per epoch"),
    ("accelerate", "a sampler with a state"),
]


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        pytest.param(trainer, name, marks=() if (trainer, name) in QUICK else pytest.mark.slow)
        for trainer in TRAINERS
        for name in CASES
    ],
)
def test_every_loader_resumes_exactly(trainer: str, name: str, tmp_path: Path) -> None:
    """Three generations deep, under other seeds; quickly from a boundary in the middle."""
    train, case = TRAINERS[trainer], CASES[name]
    every = 3 if (trainer, name) in QUICK else 1
    reference, snapshots = taken(train, case, tmp_path / "run", every)
    half = len(snapshots) // 2
    some = snapshots[half : half + 1] if every > 1 else snapshots[2 :: max(1, half // 3)]
    for number, snapshot in enumerate(some):
        assert_continues(train, case, reference, snapshot, tmp_path / "run", tmp_path / str(number), every)
