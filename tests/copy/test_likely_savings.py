"""An image is digested before it is written only where some of its bytes are those of earlier images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.copy import encoded_copy
from ckpt_engine.copy.write_snapshot import Staged
from tests.copy.test_writing import Life

ROWS, WIDTH = 4096, 256
NBYTES = 4 * ROWS * WIDTH
HEADERS = 3 * 4096


def weights(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def table(step: int) -> torch.Tensor:
    """Each step changes the first rows, and one row in a hundred of the others."""
    found = weights(0)
    for one in range(1, step + 1):
        found[: ROWS // 16] = weights(one)[: ROWS // 16]
        found[one::100] += 1
    return found


def states(kind: str) -> Iterator[dict[str, Any]]:
    for step in range(1, 4):
        different = weights(step)
        yield {
            "frozen": {"frozen": weights(0), "adapter": different[:9], "step": step},
            "comes back": {"w": weights(step % 2), "step": step},
            "swapped": {"a": weights(step % 2), "b": weights((step + 1) % 2), "step": step},
            "table": {"table": table(step), "step": step},
        }[kind]


def test_a_state_that_changes_everywhere_is_digested_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the image nor a piece of it is digested before, in a first snapshot and in later ones."""
    monkeypatch.setattr(Staged, "timed_digest", lambda _: pytest.fail("the image is digested before"))
    monkeypatch.setattr(encoded_copy, "digest", lambda _: pytest.fail("a piece is digested before"))
    life = Life(tmp_path / "run", writer="thread")
    saved = {step: {"w": weights(step), "m": weights(-step), "step": step} for step in range(1, 5)}
    life.save(*saved.values())
    assert all(life.written(one) >= 2 * NBYTES for one in life.manifests())
    life.check(saved)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("kind", "most"), [("frozen", 0.0), ("comes back", 0.0), ("swapped", 0.0), ("table", 0.15)], ids=str
)
def test_what_two_earlier_images_have_is_found(tmp_path: Path, kind: str, most: float) -> None:
    """Frozen weights, weights of one snapshot ago, weights of another name, and the rows of a table that stay."""
    life = Life(tmp_path / "run", writer="thread")
    saved = {one["step"]: one for one in states(kind)}
    life.save(*saved.values())
    *_, newest = life.manifests()
    assert life.written(newest) <= most * NBYTES + WIDTH * 40 + HEADERS
    life.check(saved)


def test_what_an_earlier_process_has_written_is_found(tmp_path: Path) -> None:
    """Its images were not looked at: the first image of the next process is digested before it is written."""
    life = Life(tmp_path / "run", writer="thread")
    saved = {step: {"frozen": weights(0), "step": step} for step in (1, 2)}
    for state in saved.values():
        life.save(state)
    *_, newest = life.manifests()
    assert life.written(newest) <= HEADERS
    life.check(saved)
