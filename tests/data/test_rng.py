"""Capture and restore of the global random streams."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.data import rng
from tests.data.loop import seed_everything


def draws() -> list[Any]:
    """Some numbers of every host stream, the cached normals of python and numpy included."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(2).tolist(),
        torch.randn(2).tolist(),
        int(np.random.randint(10**6)),
    ]


def test_restored_streams_repeat_their_draws() -> None:
    """After a restore every stream gives what it gave after the capture, cached normals included."""
    seed_everything(3)
    draws()
    state = rng.capture()
    expected = [draws() for _ in range(3)]
    seed_everything(4)
    assert rng.restore(state) == ()
    assert [draws() for _ in range(3)] == expected


def test_a_capture_draws_nothing_and_never_changes() -> None:
    """Captures with no draw in between are equal, and one taken earlier is untouched by draws made later."""
    seed_everything(5)
    first = rng.capture()
    second = rng.capture()
    assert first == second
    draws()
    assert first == second
    assert rng.capture() != first


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_a_draw_of_any_stream_shows_in_the_next_capture_and_probe(draw: Any) -> None:
    """Each stream alone is seen, many times in a row: nothing is remembered from an earlier capture."""
    for _ in range(700):
        state, seen = rng.capture(), rng.probe()
        draw()
        assert rng.capture() != state
        assert rng.probe() != seen


def test_a_cached_numpy_normal_that_is_consumed_shows_in_the_next_capture() -> None:
    """The second of two legacy normals moves no words of the generator, only the cached number."""
    np.random.seed(1)
    np.random.randn()
    state = rng.capture()
    expected = np.random.randn()
    assert rng.capture() != state
    np.random.seed(2)
    rng.restore(state)
    assert np.random.randn() == expected


def test_another_numpy_bit_generator_survives() -> None:
    """A user who swapped numpy's global generator for PCG64 gets its 128-bit state back."""
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(7))  # type: ignore[attr-defined]
    try:
        state, seen = rng.capture(), rng.probe()
        expected = np.random.rand(3).tolist()
        assert rng.probe() != seen
        rng.restore(state)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


def test_numpy_replaced_between_two_captures_is_not_mistaken_for_the_old_one() -> None:
    """Reading the generator's memory must not confuse one generator with another."""
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    first = rng.capture()
    np.random.set_bit_generator(np.random.MT19937(9))  # type: ignore[attr-defined]
    try:
        assert rng.capture() != first
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]
    assert rng.capture() == first


def test_streams_of_devices_missing_here_are_named() -> None:
    """A snapshot from a machine with accelerators restores what it can and says what it could not."""
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has an accelerator")
    state = {**rng.capture(), "cuda": [b"\0" * 16] * 2, "xpu": [b"\0" * 16], "mps": b"\0" * 16}
    problems = rng.restore(state)
    assert len(problems) == 3
    assert "2 cuda random stream(s)" in problems[0]


@pytest.mark.gpu
def test_cuda_streams_repeat_their_draws() -> None:
    """Every CUDA device's stream is captured once CUDA is in use."""
    torch.rand(1, device="cuda")
    state = rng.capture()
    expected = torch.rand(4, device="cuda").tolist()
    torch.rand(9, device="cuda")
    assert rng.restore(state) == ()
    assert torch.rand(4, device="cuda").tolist() == expected
    assert rng.restore({**state, "cuda": state["cuda"] * 99})


def test_a_device_is_started_before_its_streams_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what is set for a device that has not started, and puts seeds in after states."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: calls.append("set"))
    assert rng.restore({**rng.capture_host(), "cuda": [b"\0" * 16]}) == ()
    assert calls == ["init", "set"]
