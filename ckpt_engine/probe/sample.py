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
        self._places: list[tuple[int, int]] = []
        """Of each parameter its group, and its place there."""
        self._known: tuple[Any, ...] = ()
        self._keys: list[Any] = [None]
        """None, and the names of what an optimizer knows of a parameter, in order: a resume may change theirs."""
        self._by_size: list[tuple[int, int]] = []
        """A large parameter is in several of these places."""

    def look(self, calls: int) -> bytes:
        """The words of this step, in chunks of `CHUNK_BYTES`.

        Args:
            calls: optimizer steps of the run so far.
        """
        return b"".join([chunk_of(tensor, draw) or b"" for _, _, tensor, draw in self._choose_tensors(calls)])

    def names(self, calls: int, named: Mapping[int, str]) -> list[tuple[str, str]]:
        """Of the chunks of that step the tensor and its dtype.

        Args:
            named: names of parameters by their ids.
        """
        found = []
        for parameter, key, tensor, draw in self._choose_tensors(calls):
            if chunk_of(tensor, draw) is not None:
                name = named.get(id(parameter), "a parameter")
                called = name if key is None else f"{key} of {name}"
                found.append((called, str(tensor.dtype).removeprefix("torch.")))
        return found

    def _choose_tensors(self, calls: int) -> Iterator[tuple[Any, Any, Any, int]]:
        """What this step looks at: a parameter, a name in what is known of it or None, the tensor that this is, and a
        number that says which of its elements."""
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
                if not isinstance(one, torch.Tensor) or not one.ndim:  # a step counter, say
                    one, key = parameter, None
                yield parameter, key, one, draw >> 12
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
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    is_part = nbytes > CHUNK_BYTES
    start = draw % ((nbytes - CHUNK_BYTES) // _APART + 1) * _APART if is_part else 0
    end = start + CHUNK_BYTES if is_part else nbytes
    if not address:
        words = b""
    elif tensor.is_contiguous():
        words = MEMORY[address + start : address + end].tobytes()
    else:
        words = elements(tensor).flat[start // tensor.itemsize : end // tensor.itemsize].tobytes()
    return words if end - start == CHUNK_BYTES else words.ljust(CHUNK_BYTES, b"\0")


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
