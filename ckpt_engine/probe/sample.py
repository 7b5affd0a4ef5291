"""Chooses a few words of an optimizer's parameters and of what it knows of them, and reads them where they are.

Of each step other words: half of the parameters are taken in turn, so that all of them come; the other half by size, so
that a change of many words is met soon. Of each one tensor is read, itself or a moment: to touch a tensor costs more
than its words do. No tensor is kept, and a parameter that is exchanged is followed.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.nn.parameter import is_lazy

from ckpt_engine.probe.raw_memory import MEMORY, PLAIN, elements
from ckpt_engine.state.sharding import here
from ckpt_engine.store.rows import CHUNK_BYTES

EACH_WAY = 2
"""So many parameters are looked at in turn, and as many by size."""
_APART = 32
"""A chunk begins at a multiple of so many bytes."""


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
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._keys: list[tuple[int, Sequence[Any]]] = []

    def look(self, calls: int) -> bytes:
        """The words of this step, in chunks of `CHUNK_BYTES`.

        Args:
            calls: optimizer steps of the run so far.
        """
        found = (chunk_of(tensor, draw) for _, _, tensor, draw in self._tensors(calls))
        return b"".join(filter(None, found))

    def names(self, calls: int, named: Mapping[int, str]) -> list[tuple[str, str]]:
        """Of the chunks of that step the tensor and its dtype.

        Args:
            named: names of parameters by their ids.
        """
        found = []
        for parameter, key, tensor, draw in self._tensors(calls):
            name = named.get(id(parameter), "a parameter")
            if chunk_of(tensor, draw) is not None:
                called = name if key is None else f"{key} of {name}"
                found.append((called, str(tensor.dtype).removeprefix("torch.")))
        return found

    def _tensors(self, calls: int) -> Iterator[tuple[Any, Any, Any, int]]:
        """Those of this step: each with its parameter, its name in what is known of that, and a draw for its words."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if [len(group["params"]) for group in groups] != self._counts:
            self._make_plan()
        ends, begin, count = self._ends, calls * EACH_WAY, len(self._ends)
        for slot in range(begin, begin + EACH_WAY) if ends else ():
            draw = xxhash.xxh3_64_intdigest(slot.to_bytes(8, "little"))
            by_size = bisect.bisect_right(ends, draw % ends[-1])
            for number, turn in ((slot % count, slot // count), (by_size, draw >> 40)):
                group = bisect.bisect_right(self._begins, number) - 1
                parameter = groups[group]["params"][number - self._begins[group]]
                known = state.get(parameter)
                if not isinstance(known, dict):
                    known = {}
                many, keys = self._keys[number]
                if many != len(known):
                    keys = _moments(parameter, known)
                    self._keys[number] = len(known), keys
                key = keys[turn % len(keys)]
                yield parameter, key, parameter if key is None else known.get(key), draw >> 16

    def _make_plan(self) -> None:
        groups = self.optimizer.param_groups
        self._counts = [len(group["params"]) for group in groups]
        self._begins = [0, *itertools.accumulate(self._counts)]
        sizes = [_size_of(here(one)) for group in groups for one in group["params"]]
        self._ends, self._keys = list(itertools.accumulate(sizes)), [(0, [None])] * len(sizes)
        self.plan = xxhash.xxh3_64_intdigest(repr((self.name, self._counts, sizes)).encode())


def _size_of(parameter: Any) -> int:
    """Its elements; of one that is not initialised yet 1."""
    return 1 if is_lazy(parameter) else max(1, parameter.numel())


def _moments(parameter: Any, known: Mapping[Any, Any]) -> Sequence[Any]:
    """None, and the names of what an optimizer has for each element, in order: a resume may change theirs."""
    size = parameter.numel()
    found = [key for key, one in known.items() if isinstance(one, torch.Tensor) and one.numel() == size]
    return [None, *sorted(found, key=str)]


def chunk_of(tensor: Any, draw: int) -> bytes | None:
    """Neighbouring elements of `CHUNK_BYTES` bytes in all, filled up with zeros; None: they cannot be read here.

    The same elements are read however they lie in memory.

    Args:
        draw: which ones, any number.
    """
    if type(tensor) not in PLAIN:
        tensor = here(tensor)
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    start = draw % ((nbytes - CHUNK_BYTES) // _APART + 1) * _APART if nbytes > CHUNK_BYTES else 0
    end = min(nbytes, start + CHUNK_BYTES)
    if not address:
        words = b""
    elif tensor.is_contiguous():
        words = MEMORY[address + start : address + end]
    else:
        size = tensor.itemsize
        words = elements(tensor).flat[start // size : end // size].tobytes()
    return words.ljust(CHUNK_BYTES, b"\0")
