"""The random streams of a GPU go on where they were, in a process that has not used it yet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_engine.data import rng

pytestmark = pytest.mark.gpu

SCRIPT = """
import base64, json, sys, torch
from ckpt_engine.data import rng
torch.manual_seed(5)
state = rng.capture()
state["cuda"] = [base64.b64decode(one) for one in json.load(sys.stdin)]
assert rng.restore(state) == ()
print(json.dumps(torch.rand(4, device="cuda").tolist()))
"""


def test_a_seed_that_was_set_before_does_not_win() -> None:
    """torch keeps seeds for a device that is not in use yet, and puts them in last."""
    import base64

    torch.rand(7, device="cuda")
    state = [base64.b64encode(one).decode() for one in rng.capture()["cuda"]]
    expected = torch.rand(4, device="cuda").tolist()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(state),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(done.stdout) == expected


def test_capturing_waits_for_no_kernel() -> None:
    """The streams are counted on the host."""
    rng.capture()
    torch.cuda._sleep(1_000_000_000)
    rng.capture()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
