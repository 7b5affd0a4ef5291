"""Random streams in the form of Accelerate and transformers.

They are converted to that of `data.rng` and back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_engine.data import rng
from ckpt_engine.errors import MismatchError
from ckpt_engine.state.flatten import bytes_tensor

Legacy = tuple[tuple[Any, ...], Any, torch.Tensor, Sequence[torch.Tensor]]
"""What `random.getstate()`, `np.random.get_state()` and torch's `get_rng_state` functions return; the last ones are of
the devices that were in use."""


def to_legacy(state: Mapping[str, Any]) -> Legacy:
    """The foreign form of recorded streams.

    Raises:
        MismatchError: numpy's global generator is not the usual one, which these formats cannot hold.
    """
    python, numpy = random.Random(), np.random.RandomState()
    rng.decode_python(python, state["python"])
    try:
        numpy.set_state(rng.decode_numpy(state["numpy"]))
    except (TypeError, ValueError) as err:
        raise MismatchError(f"numpy's random stream has no form that others read: {err}") from err
    cuda = list(map(bytes_tensor, state.get("cuda") or ()))
    return python.getstate(), numpy.get_state(), bytes_tensor(state["torch"]), cuda


def from_legacy(legacy: Legacy) -> rng.RngState:
    """Our form of what another library recorded.

    Raises:
        TypeError, ValueError: these are no states of random streams.
    """
    (version, words, gauss), of_numpy, cpu, cuda = legacy
    python, numpy = random.Random(), np.random.RandomState()
    python.setstate((version, tuple(words), gauss))
    numpy.set_state(of_numpy)
    torch.Generator().set_state(cpu)  # refuses what is none
    recorded: Any = numpy.get_state(legacy=False)
    state: rng.RngState = {
        "python": rng.encode_python(python),
        "numpy": rng.encode_numpy(recorded),
        "torch": cpu.numpy().tobytes(),
    }
    if cuda:
        state["cuda"] = [one.cpu().numpy().tobytes() for one in cuda]
    return state
