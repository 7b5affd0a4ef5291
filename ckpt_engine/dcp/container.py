"""One rank's data file of a save: what the plan gave to it, as a container, with a digest of every piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ckpt_engine.errors import UnstorableLeafError
from ckpt_engine.persist.job import EntryLayout
from ckpt_engine.persist.pieces import cut
from ckpt_engine.snapshot.flatten import tensor_problem
from ckpt_engine.store.container import container_form, data_header
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import DataFile

JOIN_BYTES = 1 << 20
"""Arrays below this are copied together: a system call each would take longer."""
DIGEST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A box of an array, as some rank has stored it. Crosses between ranks.

    Args:
        name: of the entry.
        dtype: torch dtype name without `torch.`.
        whole: shape of the whole array.
        offsets, shape: the box.
        pieces: (offset in the file, bytes, digest), in order.
    """

    name: str
    dtype: str
    container_dtype: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """What one item of a plan has become. Crosses between ranks.

    Args:
        blocks: its arrays.
        node: of the tree, as yet without how a tensor is divided.
        file: where the blocks are; None: it has none.
    """

    blocks: tuple[Block, ...]
    node: Any
    file: DataFile | None


@dataclass(frozen=True, slots=True)
class Array:
    """A box of an array to store: a host tensor, and where it belongs."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    offsets: tuple[int, ...]


def host(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The plain dense bytes of a tensor in host memory; the tensor itself if it is that already.

    Raises:
        UnstorableLeafError: it has none; names it.
    """
    problem = tensor_problem(tensor)
    if problem:
        raise UnstorableLeafError(
            f"cannot store tensor at {where}: {problem}", hint="convert it to a dense tensor in the state you save"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


class Container:
    """The image of a data file over live tensors: nothing big is copied.

    Args:
        arrays: with host tensors.
    """

    def __init__(self, arrays: Iterable[Array]) -> None:
        # Largest element first: every array is aligned without holes.
        self._arrays = sorted(arrays, key=lambda one: -one.tensor.element_size())
        self._header = data_header(list(self._rows()))

    def _rows(self) -> Iterator[tuple[str, str, Sequence[int], int]]:
        taken: set[str] = set()
        for one in self._arrays:
            name, n = one.name, 2
            while name in taken:  # several boxes of one array
                name, n = f"{one.name}~{n}", n + 1
            taken.add(name)
            yield (
                name,
                *container_form(_dtype(one.tensor), tuple(one.tensor.shape), one.tensor.nbytes),
                one.tensor.nbytes,
            )

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self._header) + sum(one.tensor.nbytes for one in self._arrays)

    def contents(self) -> list[memoryview]:
        """The file, as blocks back to back."""
        found = [memoryview(self._header)]
        small = bytearray()
        for one in self._arrays:
            data = _bytes(one.tensor)
            if len(data) < JOIN_BYTES:
                small += data
                continue
            if small:
                found.append(memoryview(small))
                small = bytearray()
            found.append(data)
        return [*found, memoryview(small)] if small else found

    def blocks(self) -> list[Block]:
        """What the manifest says of each array, in the order of the file."""
        at = len(self._header)
        layouts = []
        for one in self._arrays:
            dtype, shape, nbytes = _dtype(one.tensor), tuple(one.tensor.shape), one.tensor.nbytes
            layouts.append(EntryLayout(one.name, dtype, shape, container_form(dtype, shape, nbytes)[0], at, nbytes))
            at += nbytes
        with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="ckpt-digest") as pool:
            return list(pool.map(_block, self._arrays, layouts))


def _block(array: Array, entry: EntryLayout) -> Block:
    data = _bytes(array.tensor)
    pieces = []
    for extent in cut(entry):
        start = extent.offset - entry.offset
        pieces.append((extent.offset, extent.nbytes, digest(data[start : start + extent.nbytes])))
    return Block(array.name, entry.dtype, entry.container_dtype, array.whole, array.offsets, entry.shape, tuple(pieces))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not prod(tensor.shape):
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data
