"""Exported numbers in a smaller format are rounded as torch rounds them, and the loss is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import load_file

from ckpt_engine import Checkpointer
from ckpt_engine.tools.float_formats import FLOAT_FORMATS, Loss, is_wider, narrow

Ckpt = Callable[..., Any]
MIXED = np.array(
    [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-45, 65504.0, 65520.0, math.inf, -math.inf, math.nan]
)


@pytest.mark.cells(2)
@pytest.mark.parametrize("target", FLOAT_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(drawn=npst.arrays("float64", st.integers(0, 40)))
@example(drawn=MIXED)
def test_rounding_is_that_of_torch(dtype: str, target: str, drawn: np.ndarray[Any, Any]) -> None:
    """Bit for bit but for the payload of NaN: ties, subnormal numbers, infinities, what overflows."""
    if not is_wider(dtype, target):
        return
    with np.errstate(over="ignore"):
        numbers = drawn.astype(dtype)
    wanted = torch.from_numpy(numbers.copy()).to(getattr(torch, target))
    stored = bytearray(narrow(numbers.tobytes(), dtype, target, Loss()))
    found = torch.frombuffer(stored, dtype=wanted.dtype) if stored else wanted.clone()
    assert torch.equal(found.isnan(), wanted.isnan())
    bits = torch.int32 if target == "float32" else torch.int16
    same = found.view(bits) == wanted.view(bits)
    assert bool((same | wanted.isnan()).all())


def test_what_is_lost_is_counted() -> None:
    """The largest error of what stays finite, and what does not."""
    loss = Loss()
    narrow(np.array([1.0, 1.001, 70000.0, math.inf, math.nan], "<f4").tobytes(), "float32", "float16", loss)
    assert loss.overflowed == 1
    assert 0 < loss.largest_error < 0.001
    assert loss.text("float16").endswith("1 numbers are too large for it and became infinite")


def test_a_file_of_smaller_numbers_loads_as_the_converted_weights(ckpt: Ckpt, tmp_path: Path) -> None:
    """Only wider floats are converted; other tensors, and those that are no whole array, stay right."""
    torch.manual_seed(0)
    wide = torch.randn(6, 8)
    weights = {
        "a": wide,
        "last": wide.to(memory_format=torch.contiguous_format).t(),
        "half": torch.randn(3).to(torch.float16),
        "long": torch.arange(5),
        "double": torch.randn(4, dtype=torch.float64),
    }
    with Checkpointer(tmp_path / "run") as saver:
        saver.save({"state_dict": weights}, step=1).wait()
    out = tmp_path / "small.safetensors"
    done = ckpt("export", tmp_path / "run", out, "--to", "safetensors", "--dtype", "bfloat16")
    assert done.code == 0 and "numbers differ by at most" in done.out, done.err
    found = load_file(out)
    for name, value in weights.items():
        wanted = value.to(torch.bfloat16) if value.dtype in (torch.float32, torch.float64) else value
        assert torch.equal(found[name], wanted) and found[name].dtype == wanted.dtype
