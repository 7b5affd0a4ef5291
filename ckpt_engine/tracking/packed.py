"""Packs a small tree whose structure changes all the time into one tensor whose shape does not.

The engine plans a snapshot once and reuses the plan while the structure of the state stays the same. Loader positions,
metrics and logged values differ in structure from step to step, so they travel as the bytes of one array:

    8 bytes, little endian: length of the text; the text: JSON {"tree": ..., "arrays": [...]}; the arrays; padding

`tree` is of the same typed JSON as a manifest's (docs/format.md, "Tree"); its array leaves have as `entry` an index
into `arrays`, each of which says dtype, shape and the byte range behind the text.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ckpt_engine.errors import CorruptError
from ckpt_engine.persist.skeleton import Skeleton as Filler
from ckpt_engine.restore.named import dtype_of
from ckpt_engine.restore.rebuild import Rebuilder
from ckpt_engine.snapshot.flatten import Flattener
from ckpt_engine.store.tree import check

_SMALLEST_BYTES = 16 << 10


class Packer:
    """Packs the trees of one run; the result never gets smaller, so that it seldom changes its shape.

    Args:
        root: where the tree sits in the state, for error messages.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._flattener = Flattener()
        self._nbytes = _SMALLEST_BYTES

    def pack(self, tree: Any) -> torch.Tensor:
        """The tree as a uint8 tensor; copies everything, so that later changes of the tree do not reach it.

        Raises:
            UnstorableLeafError: a leaf would need pickle; names it.
        """
        scan = self._flattener.scan(tree, (self._root,))
        skeleton = self._flattener.describe(tree, (self._root,))
        arrays, blocks, at = [], [], 0
        for index, (leaf, array) in enumerate(zip(skeleton.leaves, scan.arrays, strict=True)):
            leaf.node["entry"] = str(index)
            block = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dtype = str(array.dtype).removeprefix("torch.")
            arrays.append({"dtype": dtype, "shape": list(array.shape), "at": at, "nbytes": block.numel()})
            blocks.append(block)
            at += block.numel()
        text = json.dumps(
            {"tree": Filler(skeleton.tree).fill(scan.values), "arrays": arrays}, separators=(",", ":")
        ).encode()
        self._nbytes = max(self._nbytes, _rounded(8 + len(text) + at))
        packed = torch.zeros(self._nbytes, dtype=torch.uint8)
        head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        packed[: len(head)] = head
        if blocks:
            packed[len(head) : len(head) + at] = torch.cat(blocks)
        return packed


def unpack(packed: torch.Tensor) -> tuple[Any, list[str]]:
    """The tree, and notes about classes that came back as plain equivalents.

    Raises:
        CorruptError: these are not the bytes of `Packer.pack`.
        FormatError: as `restore.rebuild.Rebuilder.node`.
    """
    data = packed.contiguous().numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    try:
        content = json.loads(data[8 : 8 + length])
        entries = {
            str(index): _tensor(data[8 + length + a["at"] : 8 + length + a["at"] + a["nbytes"]], a)
            for index, a in enumerate(content["arrays"])
        }
        tree = content["tree"]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as err:
        raise CorruptError(f"the packed part of the snapshot cannot be read: {err}") from err
    rebuilder = Rebuilder(entries)
    check({"packed": tree}, None)
    return rebuilder.node(tree, ()), rebuilder.notes


def _tensor(data: bytes, array: Any) -> torch.Tensor:
    dtype = dtype_of(array["dtype"])
    if not data:
        return torch.empty(array["shape"], dtype=dtype)
    # A copy of its own is aligned as torch aligns, which the last bit of a sum may depend on.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(array["shape"]).clone()


def _rounded(nbytes: int) -> int:
    """The next size in steps of an eighth to a quarter, so that small changes of the tree keep the size."""
    step = max(4096, 1 << (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
