"""Puts a snapshot into the user's live state, in place, from whatever pieces are stored.

Any number of ranks reads what any other has written. A piece of which at least half is needed is read whole and
verified. Of a large raw piece that is hardly needed only the needed run of bytes is read; nothing can verify that, and
it is counted. Host tensors are read directly, device tensors through page-locked memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ckpt_engine.copy import host_memory
from ckpt_engine.errors import CorruptError, MismatchError, StateError
from ckpt_engine.ranks.boxes import Box, boxes_of, runs
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.read import READ_BYTES, Landing, Move, moves_of, private_memory, read_moves
from ckpt_engine.snapshot.cuda import CUDA, Cuda, Pinned, home, split
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.state.sharding import FlatPart, is_sharded, local, shard_of
from ckpt_engine.state.sharding import problem as sharding_problem
from ckpt_engine.state.wrapped import Wrapped
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.tree import TreePath, keyed


@dataclass(frozen=True, slots=True)
class Targets:
    """The live tensors that take what is read without a second copy.

    Args:
        plain: by entry name those that take the bytes of an entry as they are.
        regions: parts of arrays: of DTensors, and of what DTensors were stored as.
        stored: of the entries of `regions` the boxes that they have one behind another.
        filled: what those entries are in the state.
    """

    plain: dict[str, torch.Tensor]
    regions: list[ArrayRegion]
    stored: dict[str, tuple[Box, ...]]
    filled: dict[str, torch.Tensor]


def fill_live(
    sources: Sources, manifest: Manifest, into: Any
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], int]:
    """Fill what of the live state `into` takes entries without a second copy, see `live_targets`: by entry name.

    Returns:
        What is filled; what of it is as it is to be in the state; and bytes as of `read_regions`.

    Raises:
        StateError, CorruptError, NewerFormatError, StorageError: as `live_targets` and `read_moves`.
    """
    targets = live_targets(manifest.tree, into, manifest.entries)
    fill(sources, manifest, targets.plain)
    unverified_bytes = read_regions(sources, manifest, targets.regions, targets.stored)
    return {**targets.plain, **targets.filled}, targets.filled, unverified_bytes


def live_targets(tree: Mapping[str, Any], into: Any, entries: Mapping[str, Entry]) -> Targets:
    """The live tensors for the entries of a tree.

    Left out: entries of tensors that are views, not C-contiguous when saved, or not in `into`; of plain tensors also
    those that are shared, of another dtype, on other devices than GPUs, or not C-contiguous.

    Raises:
        StateError: a live DTensor cannot be filled; names the entry.
    """
    uses: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
    _visit(tree[""] if list(tree) == [""] else dict(tree), into, uses)
    found = Targets({}, [], {}, {})
    for name, pairs in uses.items():
        node, live = pairs[0]
        if any(one["$"] == "sharded" or is_sharded(it) for one, it in pairs):
            regions = [_regions(name, entries[name], *pair) for pair in pairs]
            if all(region is not None for region in regions):
                found.regions.extend(one for region in regions if region is not None for one in region)
                found.stored[name] = boxes_of(node, entries[name].shape)
                found.filled[name] = live
        elif len(pairs) == 1 and "view" not in node and "stride" not in node and _takes_bytes(live, entries[name]):
            found.plain[name] = live
    return found


def _visit(node: Any, live: Any, uses: dict[str, list[tuple[Mapping[str, Any], Any]]]) -> None:
    """Collect by entry the nodes of tensors, each with what is at its place in the live state; None: nothing is."""
    if isinstance(node, dict) and node.get("$") in ("tensor", "sharded"):
        uses.setdefault(node["entry"], []).append((node, live))
    for key, child in keyed(node):
        if isinstance(live, Mapping):
            if key in live:
                _visit(child, live[key], uses)
        elif isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
            _visit(child, live[key], uses)


def _regions(name: str, entry: Entry, node: Mapping[str, Any], live: Any) -> list[ArrayRegion] | None:
    """What of an entry a live tensor takes; None: it has to be read as it is first."""
    if "view" in node or "stride" in node or not isinstance(live, torch.Tensor | FlatPart):
        return None
    if tuple(live.shape) != entry.shape:
        return None
    if isinstance(live, FlatPart):
        return _runs(name, live)
    if not is_sharded(live):
        return [ArrayRegion(name, Box.whole(entry.shape), live.detach())]
    return [ArrayRegion(name, _box(name, live), local(live).detach())]


def _runs(name: str, live: FlatPart) -> list[ArrayRegion]:
    """The boxes that a run of elements is, one behind another in its tensor."""
    (first,), (count,) = live.box.offsets, live.box.shape
    found, at, flat = [], 0, live.part.detach()
    for box in runs(live.shape, first, first + count):
        found.append(ArrayRegion(name, box, flat[at : at + box.count].view(box.shape)))
        at += box.count
    return found


def _box(name: str, live: torch.Tensor) -> Box:
    problem = sharding_problem(live)
    if problem:
        raise StateError(f"cannot fill the DTensor for {name!r}: {problem}", hint="load without `into`")
    return shard_of(live).box


def _takes_bytes(live: Any, entry: Entry) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and live.device.type in ("cpu", "cuda")
        and str(live.dtype) == f"torch.{entry.dtype}"
        and tuple(live.shape) == entry.shape
        and live.is_contiguous()
        and not live.is_conj()
        and not live.is_neg()
    )


def copy_into(loaded: Any, into: Any) -> Any:
    """`loaded`, with every tensor replaced by the live tensor of `into` at the same place, which now has its values.

    Raises:
        MismatchError: the structures differ; names the path.
    """
    with torch.no_grad():
        return _copy_into(loaded, into, ())


def _copy_into(loaded: Any, into: Any, path: TreePath) -> Any:
    if into is None and len(path) == 1:
        return loaded
    if isinstance(loaded, Wrapped):
        loaded.fill(into)
        return into
    where = "/".join(map(str, path)) or "(root)"
    if isinstance(into, FlatPart):
        if isinstance(loaded, torch.Tensor) and tuple(loaded.shape) == into.shape:
            (first,), (count,) = into.box.offsets, into.box.shape
            into.part.copy_(loaded.reshape(-1)[first : first + count])
        elif loaded is not into:
            raise MismatchError(f"{where} is not a tensor of shape {list(into.shape)} in the snapshot, as in `into`")
        return into
    if isinstance(loaded, torch.Tensor):
        if not isinstance(into, torch.Tensor) or into.shape != loaded.shape:
            raise MismatchError(f"{where} is a tensor of shape {list(loaded.shape)} in the snapshot, not so in `into`")
        if is_sharded(into):
            if not is_sharded(loaded):  # else all live DTensors of that entry are filled
                local(into).copy_(loaded[_box(where, into).slices(Box.whole(loaded.shape))])
            return into
        if is_sharded(loaded):
            return into
        if into.data_ptr() != loaded.data_ptr() or into.stride() != loaded.stride():
            into.copy_(loaded)
        return into
    if isinstance(loaded, dict) and isinstance(into, Mapping):
        for key, value in loaded.items():
            loaded[key] = _copy_into(value, into[key], (*path, key)) if key in into else value
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(into, list | tuple) and len(loaded) == len(into):
        items = [_copy_into(a, b, (*path, i)) for i, (a, b) in enumerate(zip(loaded, into, strict=True))]
        if isinstance(loaded, list):
            return items
        return type(loaded)(items) if type(loaded) in (tuple, torch.Size) else tuple.__new__(type(loaded), items)
    return loaded


WHOLE_BYTES = 64 << 10
"""Pieces up to this size are read whole: a request costs more than the bytes."""
WHOLE_SHARE = 0.5
"""Others too if at least this share of them is needed."""


@dataclass(frozen=True, slots=True)
class ArrayRegion:
    """A part of an array to fill.

    Args:
        entry: the array.
        box: the part.
        tensor: plain tensor of the shape of the box.
    """

    entry: str
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Copy:
    """A box of an array on its way: it begins `at` elements into the piece, which has it in `run`."""

    region: ArrayRegion
    run: Box
    at: int
    box: Box

    @property
    def strides(self) -> list[int]:
        """Of the run."""
        return [prod(self.run.shape[dimension + 1 :]) for dimension in range(len(self.run.shape))]

    def bounds(self) -> tuple[int, int]:
        """The first element of the piece that is needed, and the one after the last."""
        place = list(zip(self.box.slices(self.run), self.strides, strict=True))
        first = sum(one.start * stride for one, stride in place)
        last = sum((one.stop - 1) * stride for one, stride in place)
        return self.at + first, self.at + last + 1


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece with what is needed of it: bytes `first` to `last` of its decoded ones; `start` is where it begins."""

    entry: str
    piece: Piece
    start: int
    dtype: torch.dtype
    copies: Sequence[_Copy]
    first: int
    last: int

    @property
    def is_whole(self) -> bool:
        piece = self.piece
        return piece.codec != RAW or piece.nbytes <= WHOLE_BYTES or self.last - self.first >= WHOLE_SHARE * piece.nbytes

    def place(self, address: int, nbytes: int, skipped: int = 0) -> None:
        """Copy what is needed of the decoded piece, all of it but its first `skipped` bytes, from where it is."""
        flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=self.dtype)
        for copy in self.copies:
            # The run may reach beyond what was read; what is needed of it does not.
            first = copy.bounds()[0] - skipped // self.dtype.itemsize
            source = flat.as_strided(copy.box.shape, copy.strides, first)
            with torch.no_grad():
                copy.region.tensor[copy.box.slices(copy.region.box)].copy_(source)


def read_regions(
    sources: Sources, manifest: Manifest, regions: Sequence[ArrayRegion], stored: Mapping[str, Sequence[Box]]
) -> int:
    """Fill `regions`; on return all of them are complete.

    Args:
        stored: of every entry the boxes that it has one behind another.

    Returns:
        Bytes that were read without the rest of their pieces: no digest is of them.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry. Regions are
            undefined then.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    if not regions:
        return 0
    by_entry: dict[str, list[ArrayRegion]] = {}
    for region in regions:
        by_entry.setdefault(region.entry, []).append(region)
    wanted = [one for name, found in by_entry.items() for one in _wanted(manifest, name, found, stored[name])]
    whole = {(one.entry, one.start): one for one in wanted if one.is_whole}
    parts = [one for one in wanted if not one.is_whole]
    moves = [Move(one.entry, one.piece, one.start, 0) for one in whole.values()]
    read_moves(
        sources, manifest, moves, _Scatter(whole), [partial(_read_part, sources, manifest, one) for one in parts]
    )
    return sum([one.last - one.first for one in parts])


def _read_part(sources: Sources, manifest: Manifest, one: _Wanted) -> None:
    data = bytearray(one.last - one.first)
    sources.read(manifest.files[one.piece.file].name, one.piece.offset + one.first, memoryview(data))
    one.place(address_of(memoryview(data)), len(data), one.first)


class _Scatter(Landing):
    """Copies what is needed of pieces to all regions that overlap them."""

    is_host = True

    def __init__(self, wanted: Mapping[tuple[str, int], _Wanted]) -> None:
        self._wanted = wanted
        self._own = threading.local()

    def room(self, nbytes: int, entry: str) -> int:  # noqa: ARG002
        kept: mmap.mmap | None = getattr(self._own, "kept", None)
        if kept is None or len(kept) < nbytes:
            kept = self._own.kept = private_memory(max(nbytes, READ_BYTES))
        return address_of(memoryview(kept))

    def send(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._wanted[move.entry, move.start].place(move.address, move.piece.raw_nbytes)


def _wanted(manifest: Manifest, name: str, regions: Sequence[ArrayRegion], boxes: Sequence[Box]) -> Iterator[_Wanted]:
    """The pieces of an entry that regions overlap."""
    entry = manifest.entries[name]
    dtype = dtype_of(entry.dtype)
    size = dtype.itemsize
    if entry.nbytes != prod(entry.shape) * size:
        raise CorruptError(f"the pieces of {name!r} do not have the bytes of {entry.dtype} of shape {entry.shape}")
    ends = list(accumulate(box.count for box in boxes))
    number = 0
    for start, piece in entry.placed():
        first, last = start // size, (start + piece.raw_nbytes) // size
        copies: list[_Copy] = []
        while number < len(boxes):
            box, box_start = boxes[number], ends[number] - boxes[number].count
            for one in runs(box.shape, max(first - box_start, 0), min(last - box_start, box.count)):
                at = box_start + _position(one, box) - first
                run = Box(tuple(a + b for a, b in zip(box.offsets, one.offsets, strict=True)), one.shape)
                both = ((region, region.box.overlap(run)) for region in regions)
                copies += [_Copy(region, run, at, box) for region, box in both if box is not None]
            if ends[number] > last:
                break
            number += 1
        if copies:
            bounds = [copy.bounds() for copy in copies]
            low, high = min(a for a, _ in bounds) * size, max(b for _, b in bounds) * size
            yield _Wanted(name, piece, start, dtype, copies, low, high)


def _position(run: Box, box: Box) -> int:
    """Elements of `box` before the first one of `run`, whose offsets are in the box."""
    return sum(at * prod(box.shape[dimension + 1 :]) for dimension, at in enumerate(run.offsets))


_STRIP_UNIT = 2 << 20
"""Pieces of one request may take some more bytes than it has, to be aligned."""


def fill(sources: Sources, manifest: Manifest, targets: Mapping[str, torch.Tensor], runtime: Cuda = CUDA) -> None:
    """Fill `targets` (contiguous tensors by entry name) with their entries; on return all of them are complete.

    Every piece is verified before its bytes reach a tensor. If an error is raised, other pieces may have been copied.

    Raises:
        CorruptError, NewerFormatError, StorageError: as `read_moves`.
    """
    if not targets:
        return
    away = {name: target for name, target in targets.items() if runtime.device(target) is not None and target.numel()}
    read_moves(sources, manifest, moves_of(manifest, {name: one for name, one in targets.items() if name not in away}))
    if not away:
        return
    landing = _PageLocked(away, runtime)
    try:
        read_moves(sources, manifest, moves_of(manifest, away), landing)
    finally:
        landing.close()


class _Strip:
    """Page-locked host memory from where a device copies."""

    def __init__(self, nbytes: int, runtime: Cuda, device: torch.device) -> None:
        memory = private_memory(nbytes)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.sent: list[Any] = []
        """Happen when what was sent from it has arrived."""
        self._runtime = runtime
        host_memory.populate(self.bytes.data_ptr(), nbytes)
        # Where it cannot be page-locked the copies are slower, and nothing else changes.
        self._pinned = Pinned(self.bytes.data_ptr(), nbytes, runtime)
        self._pinned.pin(device)

    def wait(self) -> None:
        """Return when everything sent has arrived."""
        for event in self.sent:
            self._runtime.wait(event)
        self.sent = []

    def close(self) -> None:
        """Give the memory back, after what was sent has arrived."""
        self.wait()
        self._pinned.unpin()


class _PageLocked(Landing):
    """Two strips for each thread: one is filled while a device copies from the other.

    Copies are queued behind what is queued in the streams that are current where this is made.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], runtime: Cuda) -> None:
        self._runtime = runtime
        self._targets = {name: target.detach().view(-1).view(torch.uint8) for name, target in targets.items()}
        self._homes = {name: home(runtime, target) for name, target in targets.items()}
        self._streams = {device: runtime.current(device) for device in self._homes.values()}
        self._own = threading.local()
        self._strips: list[_Strip] = []

    def room(self, nbytes: int, entry: str) -> int:
        self._own.strip = strip = self._next(nbytes, self._homes[entry])
        return strip.bytes.data_ptr()

    def send(self, moves: Sequence[Move]) -> None:
        strip: _Strip = self._own.strip
        first = strip.bytes.data_ptr()
        for device, stream in self._streams.items():
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for move in moves:
                if self._homes[move.entry] == device:
                    target, start = self._targets[move.entry], move.address - first
                    for a, b in split(start, start + move.piece.raw_nbytes):
                        pairs.append((target[a - start + move.start : b - start + move.start], strip.bytes[a:b]))
            if pairs:
                with self._runtime.copies(stream) as copy:
                    copy(*zip(*pairs, strict=True))
                    strip.sent.append(self._runtime.mark(stream))

    def _next(self, nbytes: int, device: torch.device) -> _Strip:
        """The strip of this thread that was sent before its last one, or a new one; nothing is under way from it."""
        own: list[_Strip] = self._own.__dict__.setdefault("strips", [])
        strip = own.pop(0) if len(own) == 2 else None
        if strip is not None:
            strip.wait()
        if strip is None or strip.bytes.numel() < nbytes:
            if strip is not None:
                strip.close()
                self._strips.remove(strip)
            strip = _Strip(-(-max(nbytes, READ_BYTES) // _STRIP_UNIT) * _STRIP_UNIT, self._runtime, device)
            self._strips.append(strip)
        own.append(strip)
        return strip

    def close(self) -> None:
        """Wait for what was sent, and give the memory back. No thread may use it any more."""
        for strip in self._strips:
            strip.close()
