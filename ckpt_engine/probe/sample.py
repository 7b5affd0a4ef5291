"""Chooses a few words of an optimizer's parameters and of what it knows of them, and reads them where they are.

Of each step other words: half of the parameters are taken in turn, so that all of them come; the other half by size, so
that a change of many words is met soon. No tensor is kept, and a parameter that is exchanged is followed.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.nn.parameter import is_lazy

from ckpt_engine.state.sharding import here
from ckpt_engine.store.rows import CHUNK_BYTES, MOST_CHUNKS

EACH_WAY = 2
"""So many parameters are looked at in turn, and as many by size."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CHUNK = ctypes.c_char * CHUNK_BYTES
_MASK = (1 << 64) - 1


class Sampler:
    """Of one optimizer.

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
        self._keys: dict[int, tuple[int, list[Any]]] = {}

    def look(self, calls: int) -> bytes:
        """The words of this step, in chunks of `CHUNK_BYTES`.

        Args:
            calls: optimizer steps of the run so far.
        """
        found = list[bytes]()
        for number, parameter, known, draw in self._parameters(calls):
            moments = map(known.get, self._moments(number, parameter, known))
            found += filter(None, map(chunk_of, (parameter, *moments), itertools.repeat(draw)))
        return b"".join(found[:MOST_CHUNKS])

    def names(self, calls: int, named: Mapping[int, str]) -> list[tuple[str, str]]:
        """Of the chunks of that step the tensor and its dtype.

        Args:
            named: names of parameters by their ids.
        """
        found = []
        for number, parameter, known, draw in self._parameters(calls):
            name = named.get(id(parameter), "a parameter")
            moments = [(f"{key} of {name}", known[key]) for key in self._moments(number, parameter, known)]
            for called, tensor in [(name, parameter), *moments]:
                if chunk_of(tensor, draw) is not None:
                    found.append((called, str(tensor.dtype).removeprefix("torch.")))
        return found

    def _parameters(self, calls: int) -> list[tuple[int, Any, dict[Any, Any], int]]:
        """Those of this step: a number, the parameter, what the optimizer knows of it, and a draw for its words."""
        groups = self.optimizer.param_groups
        if [len(group["params"]) for group in groups] != self._counts:
            self._make_plan()
        ends = self._ends
        if not ends:
            return []
        found, begin, count, total = [], calls * EACH_WAY, len(ends), ends[-1]
        for slot in range(begin, begin + EACH_WAY):
            draw = slot * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 & _MASK
            draw = (draw ^ draw >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            for number in (slot % count, bisect.bisect_right(ends, (draw >> 20) % total)):
                group, index = self._where[number]
                parameter = groups[group]["params"][index]
                known = self.optimizer.state.get(parameter)
                found.append((number, parameter, known if isinstance(known, dict) else {}, draw >> 16))
        return found

    def _moments(self, number: int, parameter: Any, known: dict[Any, Any]) -> list[Any]:
        """The names of what an optimizer has for each element of a parameter, in order: a resume may change theirs."""
        if not known:
            return []
        many, keys = self._keys.get(number, (-1, []))
        if many != len(known):
            size = parameter.numel()
            keys = [key for key, one in known.items() if isinstance(one, torch.Tensor) and one.numel() == size]
            self._keys[number] = len(known), sorted(keys, key=str)
        return self._keys[number][1]

    def _make_plan(self) -> None:
        groups = self.optimizer.param_groups
        self._counts = [len(group["params"]) for group in groups]
        self._where = [(g, i) for g, group in enumerate(groups) for i in range(len(group["params"]))]
        sizes = [_size_of(here(one)) for group in groups for one in group["params"]]
        self._ends, self._keys = list(itertools.accumulate(sizes)), {}
        self.plan = xxhash.xxh3_64_intdigest(repr((self.name, self._counts, sizes)).encode())


def _size_of(parameter: Any) -> int:
    """Its elements; of one that is not initialised yet 1."""
    return 1 if is_lazy(parameter) else max(1, parameter.numel())


def chunk_of(tensor: Any, draw: int) -> bytes | None:
    """Neighbouring elements of `CHUNK_BYTES` bytes in all, filled up with zeros; None: they cannot be read here.

    The same elements are read however they lie in memory.

    Args:
        draw: which ones, any number.
    """
    if type(tensor) not in _PLAIN:
        tensor = here(tensor)
        if type(tensor) not in _PLAIN:
            return None
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if not address:
        return bytes(CHUNK_BYTES)
    count = nbytes // CHUNK_BYTES
    if tensor.is_contiguous():
        if count:
            return _CHUNK.from_address(address + draw % count * CHUNK_BYTES).raw
        return ctypes.string_at(address, nbytes).ljust(CHUNK_BYTES, b"\0")
    size = tensor.itemsize
    first, many = (draw % count, CHUNK_BYTES // size) if count else (0, tensor.numel())
    places = (address + _offset(tensor, first * many + n) * size for n in range(many))
    return b"".join(ctypes.string_at(place, size) for place in places).ljust(CHUNK_BYTES, b"\0")


def _offset(tensor: torch.Tensor, index: int) -> int:
    """Where the element of this number is, in elements from the first one."""
    offset = 0
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, at = divmod(index, length)
        offset += at * stride
    return offset
