"""Writes arrays of a snapshot as a file of safetensors.

They are verified on the way. No torch.

The metadata of the file maps each other name of a tied tensor to the stored one; `safetensors.torch.load_model` ties
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from ckpt_engine.errors import CorruptError
from ckpt_engine.ranks.boxes import Box
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.store import container
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tools.float_formats import Loss, narrow
from ckpt_engine.tools.selection import ExportedArray, Selection, item_bytes

_BLOCK_BYTES = 4 << 20


def write_arrays(
    sources: Sources, manifest: Manifest, selection: Selection, out: BinaryIO, advance: Callable[[int], object]
) -> Loss:
    """Write the file; `advance` gets the bytes written. What conversion has lost.

    Raises:
        CorruptError: the snapshot is damaged in all sources; names the entry.
        NewerFormatError: it is encoded in a way this version does not know.
    """
    rows = [(a.name, *container.container_form(a.dtype, a.shape, a.nbytes), a.nbytes) for a in selection.arrays]
    metadata = {"format": "pt", **selection.tied}
    metadata |= {
        f"ckpt-engine.{a.name}": f"{a.dtype} {list(a.shape)}"
        for a in selection.arrays
        if a.dtype not in container.DTYPES
    }
    out.write(container.build_header(rows, metadata))
    loss = Loss()
    views: dict[str, bytes] = {}
    for array in selection.arrays:
        parts: Iterable[bytes | bytearray] = _blocks(sources, manifest, array)
        if array.view is not None:  # thousands of them may lie in one entry
            if array.entry not in views:
                views[array.entry] = b"".join(parts)
            parts = _cut_view(array, array.view, views[array.entry])
        elif array.boxes:
            parts = [_put_together(array, b"".join(parts))]
        for stored in parts:
            block = stored if array.stored is None else narrow(stored, array.stored, array.dtype, loss)
            out.write(block)
            advance(len(block))
    return loss


def _blocks(sources: Sources, manifest: Manifest, array: ExportedArray) -> Iterator[bytearray]:
    """The entry's bytes, piece by piece, each verified."""
    decoder = sources.decoder(manifest)
    for start, piece in manifest.entries[array.entry].placed():
        block = bytearray(piece.raw_nbytes)
        try:
            decoder.read(array.entry, start, piece, memoryview(block))
        except CorruptError as err:
            file = manifest.files[piece.file].name
            raise CorruptError(
                f"{array.entry!r} in {file} is not what was written",
                hint="`ckpt verify` shows which snapshots are whole",
            ) from err
        yield block


def _put_together(array: ExportedArray, stored: bytes) -> bytes:
    """The bytes of an array whose boxes lie one behind another."""
    size = item_bytes(array.stored or array.dtype)
    out = np.empty((*array.shape, size), np.uint8)
    whole, at = Box.whole(array.shape), 0
    for box in array.boxes:
        end = at + box.count * size
        out[box.slices(whole)] = np.frombuffer(stored[at:end], np.uint8).reshape(*box.shape, size)
        at = end
    return out.tobytes()


def _cut_view(array: ExportedArray, view: Mapping[str, Any], whole: bytes) -> Iterator[bytes]:
    """The bytes of a view in C order; a few at a time, as it may repeat what it has."""
    size = item_bytes(array.stored or array.dtype)
    strides = [step * size for step in view["stride"]]
    elements = np.ndarray(array.shape, f"V{size}", whole, view["byte_offset"], strides).flat
    for start in range(0, len(elements), _BLOCK_BYTES // size):
        yield elements[start : start + _BLOCK_BYTES // size].tobytes()
