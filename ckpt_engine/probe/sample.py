"""Chooses a few words of an optimizer's parameters and of what it knows of them, and reads them where they are.

Of each step other words: half of the parameters are taken in turn, so that all of them come; the other half by size, so
that a change of many words is met soon. Nothing is kept of a tensor but where the optimizer has it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from ckpt_engine.state.sharding import here
from ckpt_engine.store.rows import MOST_WORDS

EACH_WAY = 4
"""So many parameters are looked at in turn, and as many by size."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORD = ctypes.c_uint64
_WORD_BYTES = 8
_MASK = (1 << 64) - 1


class Sampler:
    """Of one optimizer. A parameter that is exchanged is followed, as nothing is remembered of it.

    Args:
        optimizer: whose parameters are looked at.
        name: its name in the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self.checksum = zlib.crc32(name.encode())
        self.plan = 0
        """A digest of the sizes of all parameters: with another one the same step looks at other words."""
        self._counts: list[int] = []
        self._where: list[tuple[int, int]] = []
        self._ends: list[int] = []

    def words(self, calls: int) -> list[int]:
        """The words of this step.

        Args:
            calls: optimizer steps of the run so far.
        """
        return [word for _, _, word in self._looks(calls)]

    def names(self, calls: int, named: Mapping[int, str]) -> list[tuple[str, str]]:
        """Of the words of that step the tensor and its dtype.

        Args:
            named: names of parameters by their ids.
        """
        return [
            (named.get(id(parameter), "a parameter") + (f", {key}" if key else ""), dtype)
            for parameter, key, dtype in self._tensors(calls)
        ]

    def _looks(self, calls: int) -> Iterator[tuple[Any, str, int]]:
        state, found = self.optimizer.state, 0
        for slot, parameter in enumerate(self._parameters(calls)):
            draw = (calls * 0x9E3779B97F4A7C15 + slot * 0xBF58476D1CE4E5B9) & _MASK
            for key, tensor in _tensors_of(parameter, state.get(parameter)):
                if found == MOST_WORDS:
                    return
                word = word_of(tensor, draw >> 16)
                if word is not None:
                    found += 1
                    yield parameter, key, word

    def _tensors(self, calls: int) -> Iterator[tuple[Any, str, str]]:
        state = self.optimizer.state
        for parameter, key, _ in self._looks(calls):
            tensor = parameter if not key else state[parameter][key]
            yield parameter, key, str(here(tensor).dtype).removeprefix("torch.")

    def _parameters(self, calls: int) -> Iterator[Any]:
        groups = self.optimizer.param_groups
        if [len(group["params"]) for group in groups] != self._counts:
            self._make_plan()
        count = len(self._where)
        if not count:
            return
        numbers = [(calls * EACH_WAY + slot) % count for slot in range(min(EACH_WAY, count))]
        for slot in range(EACH_WAY):
            draw = (calls * 0xD6E8FEB86659FD93 + slot * 0xA0761D6478BD642F) & _MASK
            numbers.append(bisect.bisect_right(self._ends, (draw >> 16) % self._ends[-1]))
        for number in numbers:
            group, index = self._where[number]
            yield groups[group]["params"][index]

    def _make_plan(self) -> None:
        groups = self.optimizer.param_groups
        self._counts = [len(group["params"]) for group in groups]
        self._where = [(g, i) for g, group in enumerate(groups) for i in range(len(group["params"]))]
        sizes = [max(1, here(group["params"][i]).numel()) for group in groups for i in range(len(group["params"]))]
        self._ends = list(itertools.accumulate(sizes))
        self.plan = xxhash.xxh3_64_intdigest(repr((self.name, self._counts, sizes)).encode())


def _tensors_of(parameter: Any, state: Any) -> Iterator[tuple[str, Any]]:
    yield "", parameter
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            if isinstance(value := state[key], torch.Tensor):
                yield key, value


def word_of(tensor: Any, draw: int) -> int | None:
    """As many neighbouring elements as fill 8 bytes, or fewer where there are fewer; None: they cannot be read here.

    The same elements are read however they lie in memory.

    Args:
        draw: which ones, any number.
    """
    if type(tensor) not in _PLAIN:
        tensor = here(tensor)
        if type(tensor) not in _PLAIN:
            return None
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    address, size, count = tensor.data_ptr(), tensor.itemsize, tensor.numel()
    if not address or not count:
        return 0
    many = min(count, max(1, _WORD_BYTES // size))
    first = draw % (count // many) * many
    if tensor.is_contiguous():
        if many * size >= _WORD_BYTES:
            return _WORD.from_address(address + first * size).value
        return int.from_bytes(ctypes.string_at(address + first * size, many * size), "little")
    parts = (ctypes.string_at(address + _offset(tensor, first + n) * size, size) for n in range(many))
    return int.from_bytes(b"".join(parts)[:_WORD_BYTES], "little")


def _offset(tensor: torch.Tensor, index: int) -> int:
    """Where the element of this number is, in elements from the first one."""
    offset = 0
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, at = divmod(index, length)
        offset += at * stride
    return offset
