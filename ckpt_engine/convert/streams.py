"""Random streams between our form (`data.rng`) and the tuples that Accelerate and transformers store."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt_engine.data import rng
from ckpt_engine.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Legacy:
    """What `random.getstate()`, `np.random.get_state()` and torch's `get_rng_state` functions return.

    Args:
        cuda: one state per device; empty if none was in use.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...] = ()


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
    legacy: Any = numpy.get_state()
    return Legacy(
        python.getstate(), legacy, _tensor(state["torch"]), tuple(_tensor(one) for one in state.get("cuda") or ())
    )


def from_legacy(legacy: Legacy) -> rng.RngState:
    """Our form of what another library recorded.

    Raises:
        TypeError, ValueError: these are no states of random streams.
    """
    python, numpy = random.Random(), np.random.RandomState()
    python.setstate(_tuples(legacy.python))
    numpy.set_state(legacy.numpy)
    torch.Generator().set_state(legacy.cpu)  # refuses what is none
    recorded: Any = numpy.get_state(legacy=False)
    state: rng.RngState = {
        "python": rng.encode_python(python),
        "numpy": rng.encode_numpy(recorded),
        "torch": legacy.cpu.numpy().tobytes(),
    }
    if legacy.cuda:
        state["cuda"] = [one.cpu().numpy().tobytes() for one in legacy.cuda]
    return state


def looks_recorded(node: Any) -> bool:
    """Whether a value has the form of `data.rng.capture()`."""
    return isinstance(node, Mapping) and {"python", "numpy", "torch"} <= node.keys()


def _tuples(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
