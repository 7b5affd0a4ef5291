"""Reads the memory of this process where it is: a few bytes of a tensor without a call of torch for each of them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import torch

_ALL = ctypes.c_char * (sys.maxsize - 7)
MEMORY = memoryview(_ALL.from_address(0)).cast("B")
"""All of it, by address. Who reads keeps the memory alive."""
_BY_WORDS = [memoryview(_ALL.from_address(at)).cast("B").cast("Q") for at in range(8)]
"""The same as words of eight bytes: those at multiples of eight, then those one byte behind them, and so on."""
WORDS = 64
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors of these types, and of no other, have memory themselves."""
_MT19937_BYTES = 624 * 4 + 4
_STREAM_BYTES = 256


def words(address: int, nbytes: int) -> bytes:
    """`WORDS` words of memory, as far from each other as can be."""
    begin, apart = address // 8, nbytes // WORDS // 8
    return _BY_WORDS[address % 8][begin : begin + apart * WORDS : apart].tobytes()


def elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A strided tensor as an array over the same memory, whatever its dtype is; `flat` has its elements in order."""
    size = tensor.itemsize
    memory: Any = _ALL.from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), f"V{size}", memory, 0, [size * stride for stride in tensor.stride()])


def numpy_stream() -> bytes | None:
    """The raw state of numpy's global generator, or None if it is not the usual one.

    The second of a pair of legacy normals is not in it.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    address = generator.ctypes.state_address
    return MEMORY[address : address + _MT19937_BYTES].tobytes()


def _copied_stream() -> bytes:
    state = torch.default_generator.get_state().numpy()
    return state[16 : 16 + 2 * _STREAM_BYTES].view(np.uint64).astype(np.uint32).tobytes()


def _address_of_stream() -> int | None:
    """Where the generator has that in its memory; None: elsewhere."""
    address = getattr(torch.default_generator, "_cdata", 0)
    at = MEMORY[address : address + 2 * _STREAM_BYTES].tobytes().find(_copied_stream()) if address else -1
    return None if at < 0 else address + at


_STREAM = _address_of_stream()


def torch_stream() -> bytes:
    """Which word of torch's generator for the CPU is the next one, and the first words.

    Streams that differ do so there. The second of a pair of normals is not in it.
    """
    return _copied_stream() if _STREAM is None else MEMORY[_STREAM : _STREAM + _STREAM_BYTES].tobytes()
