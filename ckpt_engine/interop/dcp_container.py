"""The data file that one rank stores for `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.copy.job import EntryLayout, Layout
from ckpt_engine.copy.write_snapshot import CutLayout, ParallelMap
from ckpt_engine.errors import UnstorableLeafError
from ckpt_engine.ranks.boxes import Box
from ckpt_engine.state.entries import dtype_name, free_name
from ckpt_engine.state.flatten import tensor_problem
from ckpt_engine.state.rebuild import flat_bytes
from ckpt_engine.store.container import container_form, data_header, digest
from ckpt_engine.store.manifest import DataFile, Entry

DIGEST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A box of an array, as some rank has stored it. Crosses between ranks.

    Args:
        name: of the entry.
        whole: shape of the whole array.
        entry: of the box alone, as if its file were the first.
    """

    name: str
    whole: tuple[int, ...]
    box: Box
    entry: Entry


@dataclass(frozen=True, slots=True)
class DcpItem:
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
class DcpArray:
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
    if problem := tensor_problem(tensor):
        raise UnstorableLeafError(
            f"cannot store tensor at {where}: {problem}", hint="convert it to a dense tensor in the state you save"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def put_at(root: dict[Any, Any], path: Sequence[Any], value: Any, inner: Callable[[], dict[Any, Any]] = dict) -> None:
    """Puts a value into dicts in each other; `inner` makes those that are not there yet."""
    for key in path[:-1]:
        root = root.setdefault(key, inner())
    root[path[-1]] = value


class Container:
    """The image of a data file over live tensors: nothing big is copied.

    Args:
        arrays: with host tensors.
    """

    def __init__(self, arrays: Iterable[DcpArray]) -> None:
        # Largest element first: every array is aligned without holes.
        self._arrays = sorted(arrays, key=lambda one: -one.tensor.element_size())
        self._header = data_header(list(self._rows()))

    def _rows(self) -> Iterator[tuple[str, str, Sequence[int], int]]:
        taken: set[str] = set()
        for one in self._arrays:
            name = free_name(one.name, taken)  # there may be several boxes of one array
            form = container_form(dtype_name(one.tensor.dtype), tuple(one.tensor.shape), one.tensor.nbytes)
            yield name, *form, one.tensor.nbytes

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self._header) + sum(one.tensor.nbytes for one in self._arrays)

    def contents(self) -> list[memoryview]:
        """The file, as blocks back to back."""
        return [memoryview(self._header), *(flat_bytes(one.tensor).data for one in self._arrays)]

    def blocks(self) -> list[Block]:
        """What the manifest says of each array, in the order of the file."""
        at, layouts = len(self._header), list[EntryLayout]()
        for one, (name, code, _, nbytes) in zip(self._arrays, self._rows(), strict=True):
            shape = tuple(one.tensor.shape)
            whole = None if one.whole == shape else one.whole
            layouts.append(EntryLayout(name, dtype_name(one.tensor.dtype), shape, code, at, nbytes, whole))
            at += nbytes
        cut_layout = CutLayout.of(Layout(len(self._header), at, tuple(layouts)))
        pieces = [
            flat_bytes(one.tensor).data[extent.start - layout.offset : extent.stop - layout.offset]
            for one, layout, extents in zip(self._arrays, layouts, cut_layout.extents, strict=True)
            for extent in extents
        ]
        entries = cut_layout.entries(ParallelMap(digest, pieces, DIGEST_THREADS, "ckpt-digest").result())
        return [
            Block(one.name, one.whole, Box(one.offsets, entry.shape), entry)
            for one, entry in zip(self._arrays, entries.values(), strict=True)
        ]
