"""Lazy copies are the default only where training leaves a core for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ckpt_engine.snapshot.stage import copies_lazily

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def test_training_on_all_cores_is_copied_eagerly() -> None:
    """No core is left for a copy behind training."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    assert not copies_lazily("auto", CPU)


def test_a_spare_core_copies_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core that training does not use is enough."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(torch.get_num_threads() + 1)))
    assert copies_lazily("auto", CPU)


def test_training_on_an_accelerator_leaves_the_cores_free() -> None:
    """The host only drives it."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    assert copies_lazily("auto", GPU)


def test_a_user_can_choose() -> None:
    """`on` and `off` count whatever the machine has."""
    assert copies_lazily("on", CPU)
    assert not copies_lazily("off", GPU)
