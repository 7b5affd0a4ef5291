"""Chooses a few words of an optimizer's parameters and of what it knows of them, and reads them where they are.

Of each step other words: half of the parameters are taken in turn, so that all of them come; the other half by size, so
that a change of many words is met soon. Of each one tensor is read, itself or a moment: to touch a tensor costs more
than its words do. No tensor is kept, and a parameter that is exchanged is followed.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from torch.nn.parameter import is_lazy

from ckpt_engine.probe.raw_memory import MEMORY, PLAIN, elements
from ckpt_engine.state.sharding import here
from ckpt_engine.store.rows import CHUNK_BYTES, Row

EACH_WAY = 2
"""So many parameters are looked at in turn, and as many by size."""
_SHARES = 4096
"""All parameters are divided into so many shares of the same size."""
_APART = 32
"""A chunk begins at a multiple of so many bytes."""
_STRIDED = torch.strided
_AHEAD = 64
_Read = tuple[int, int, Any, int, int, int, int, int, int]
"""Group and place of a parameter, a name in what is known of it or None, how much is known of it, which elements, from
which byte of the tensor on and up to which one, its size and its address; 0 where the step itself has to find that."""


class Sampler:
    """Of one optimizer.

    Where the words of the next steps lie is found for many steps at once: with cold caches, the first call of a
    function costs as much as a hundred in a row. A step reads them there only if each tensor still has that memory,
    all of it: reading memory that was given back to the system would end the process.

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
        self._places: list[tuple[int, int]] = []
        """Of each parameter its group, and its place there."""
        self._known: tuple[Any, ...] = ()
        self._keys: list[Any] = [None]
        """None, and the names of what an optimizer knows of a parameter, in order: a resume may change theirs."""
        self._by_size: list[tuple[int, int]] = []
        """A large parameter is in several of these places."""
        self._first, self._reads = 0, list[list[_Read]]()
        """The reads of this step and of those behind it."""

    def look(self, calls: int) -> bytes:
        """The words of this step, in chunks of `CHUNK_BYTES`.

        Args:
            calls: optimizer steps of the run so far.
        """
        at, ahead = calls - self._first, 1
        if not 0 <= at < len(self._reads):
            ahead = min(2 * len(self._reads) or 1, _AHEAD)
        elif (words := self._read(self._reads[at])) is not None:
            return words
        found = self._read([(*one[:-1], 0) for one in self._reads_of(calls)]) or b""
        self._first, ahead = calls + 1, ahead if found else 0  # weights on a device have no words
        self._reads = [list(self._reads_of(one)) for one in range(calls + 1, calls + 1 + ahead)]
        return found

    def names(self, calls: int, named: Mapping[int, str]) -> list[tuple[str, str]]:
        """Of the chunks of that step the tensor and its dtype.

        Args:
            named: names of parameters by their ids.
        """
        found = []
        for group, place, key, _, draw, *_ in self._reads_of(calls):
            parameter = self.optimizer.param_groups[group]["params"][place]
            tensor = parameter if key is None else self.optimizer.state[parameter][key]
            if chunk_of(tensor, draw) is not None:
                name = named.get(id(parameter), "a parameter")
                called = name if key is None else f"{key} of {name}"
                found.append((called, str(tensor.dtype).removeprefix("torch.")))
        return found

    def _read(self, reads: list[_Read]) -> bytes | None:
        """The words; None: they are not where they were."""
        groups, state, words = self.optimizer.param_groups, self.optimizer.state, b""
        if [len(group["params"]) for group in groups] != self._counts:
            return None
        for number, place, key, many, draw, start, end, nbytes, address in reads:
            parameter = groups[number]["params"][place]
            known = known if isinstance(known := state.get(parameter), dict) else {}
            if len(known) != many:
                return None
            found: Any = parameter if key is None else known.get(key)
            is_there = not address or (
                type(found) in PLAIN
                and found.layout is _STRIDED
                and found.data_ptr() == address
                and found.nbytes == nbytes
            )
            if not is_there:
                return None
            begin = address + start
            chunk = MEMORY[begin : address + end].ljust(CHUNK_BYTES, b"\0") if address else chunk_of(found, draw)
            words += chunk or b""
        return words

    def _reads_of(self, calls: int) -> Iterator[_Read]:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if [len(group["params"]) for group in groups] != self._counts:
            self._make_plan()
        places, draw = self._places, xxhash.xxh3_64_intdigest(calls.to_bytes(8, "little"))
        for slot in range(calls * EACH_WAY, (calls + 1) * EACH_WAY) if places else ():
            turn, number = divmod(slot, len(places))
            for (group, place), way in ((places[number], turn), (self._by_size[draw % _SHARES], draw >> 40)):
                parameter = groups[group]["params"][place]
                known = known if isinstance(known := state.get(parameter), dict) else {}
                if (names := tuple(known)) != self._known:
                    self._known, self._keys = names, [None, *sorted(names, key=str)]
                one = known.get(key := self._keys[way % len(self._keys)])
                if not isinstance(one, torch.Tensor) or not one.dim():  # a step counter, say
                    one, key = parameter, None
                is_here = type(one) in PLAIN and one.is_cpu and one.layout is _STRIDED and one.is_contiguous()
                lies = (*_part_of(one.nbytes, draw >> 12), one.nbytes, one.data_ptr()) if is_here else (0, 0, 0, 0)
                yield group, place, key, len(known), draw >> 12, *lies
            draw //= _SHARES

    def _make_plan(self) -> None:
        groups = self.optimizer.param_groups
        self._counts = [len(group["params"]) for group in groups]
        self._places = [(number, place) for number, count in enumerate(self._counts) for place in range(count)]
        sizes = [_size_of(here(one)) for group in groups for one in group["params"]]
        ends = list(itertools.accumulate(sizes))
        self._by_size = [self._places[bisect.bisect(ends, ends[-1] * at // _SHARES)] for at in range(_SHARES) if ends]
        self.plan = xxhash.xxh3_64_intdigest(repr((self.name, self._counts, sizes)).encode())


def _size_of(parameter: Any) -> int:
    """Its elements; of one that is not initialised yet 1."""
    return 1 if is_lazy(parameter) else max(1, parameter.numel())


def _part_of(nbytes: int, draw: int) -> tuple[int, int]:
    """Where in so many bytes a chunk begins and ends."""
    start = draw % ((nbytes - CHUNK_BYTES) // _APART + 1) * _APART if nbytes > CHUNK_BYTES else 0
    return start, min(nbytes, start + CHUNK_BYTES)


def chunk_of(tensor: Any, draw: int) -> bytes | None:
    """Neighbouring elements of `CHUNK_BYTES` bytes in all, filled up with zeros; None: they cannot be read here.

    The same elements are read however they lie in memory.

    Args:
        draw: which ones, any number.
    """
    if type(tensor) not in PLAIN and type(tensor := here(tensor)) not in PLAIN:
        return None
    if not tensor.is_cpu or tensor.layout is not _STRIDED:
        return None
    address, size, (start, end) = tensor.data_ptr(), tensor.itemsize, _part_of(tensor.nbytes, draw)
    if not address:
        words = b""
    elif tensor.is_contiguous():
        words = MEMORY[address + start : address + end]
    else:
        words = elements(tensor).flat[start // size : end // size].tobytes()
    return words.ljust(CHUNK_BYTES, b"\0")


class Samplers(dict[int, Sampler]):
    """The samplers of a run, by the id of their optimizer, each made at its first step.

    Args:
        optimizers: of the run now, by name.
        modules: names for its parameters.
    """

    def __init__(
        self,
        optimizers: Callable[[], Mapping[str, torch.optim.Optimizer]],
        modules: Callable[[], Mapping[str, torch.nn.Module]],
    ) -> None:
        super().__init__()
        self.optimizers, self._modules = optimizers, modules
        self._by_hand: Any = SimpleNamespace(param_groups=[], state={})

    def by_hand(self) -> Any:
        """What stands for the optimizer of a run without one of torch's."""
        self._by_hand.param_groups = [{"params": [p for one in self._modules().values() for p in one.parameters()]}]
        return self._by_hand

    def follow(self, optimizer: torch.optim.Optimizer) -> Sampler | None:
        """The sampler of an optimizer that has none yet; None: it is not part of the run."""
        for name, one in {**self.optimizers(), "": self._by_hand}.items():
            if one is optimizer or any(each is optimizer for each in vars(one).values()):
                found = name if one is optimizer else f"{name}, inner"
                return self.setdefault(id(optimizer), Sampler(optimizer, found))
        return None

    def names(self, row: Row) -> list[tuple[str, str]]:
        """Of the words of a row the tensor and its dtype."""
        sampler = next(one for one in self.values() if one.checksum == row.optimizer)
        named = {id(p): f"{key}.{name}" for key, m in self._modules().items() for name, p in m.named_parameters()}
        return sampler.names(row.calls, named)
