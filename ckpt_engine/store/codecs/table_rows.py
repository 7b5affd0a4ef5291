"""The rows codec: only the rows of a table that differ from an older snapshot.

```
header   as in planes.py, with the width of a word 1 and blocks of any size
more     bytes of a row (u64), changed rows (u64), stored bytes of the map (u64), codec of the changed rows (u64: 0 raw,
         1 delta-byteplane-zstd against the same rows of the base)
map      one bit per row, the first row in the highest bit: set if it changed; a zstd frame if that is shorter
rows     the changed rows, then the bytes after the last whole row
```
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ckpt_engine.store.codecs.codec import Chunk, damaged
from ckpt_engine.store.codecs.numbers import DeltaCodec
from ckpt_engine.store.codecs.planes import (
    HEADER_BYTES,
    Bytes,
    PlanesHeader,
    base_digest,
)
from ckpt_engine.store.codecs.zstd_frames import PAYS, Compressor, decompress_into

_ROWS_MAGIC = b"CKR1"
_MORE = struct.Struct("<QQQQ")
_COMPRESSOR = Compressor(compression_level=3)
_RAW, _DELTA = 0, 1
_BLOCK_BYTES = 1 << 19
_DELTA_PAYS = 2 / 3
"""Differences of changed rows are stored if they have at most this share of their bytes: decoding them takes ten times
as long as putting rows where they belong, and chains of them are what a restore waits for."""
_MOST_CHANGED = 0.5
"""With more than this share of rows changed the plain delta is as good, and quicker."""


class RowsCodec:
    """Stores which rows changed, and those."""

    name = "rows"
    needs_base = True

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | None:
        """At most the changed rows, a bit for each row, and 64 bytes; None if more than half of the rows changed."""
        if base is None or base.nbytes != data.nbytes or not chunk.shape or not chunk.shape[0]:
            return None
        row_nbytes = data.nbytes // chunk.shape[0]
        if not row_nbytes:
            return None
        new, old = _rows(data, row_nbytes), _rows(base, row_nbytes)
        changed = _changed(new, old)
        count = int(np.count_nonzero(changed))
        if count > _MOST_CHANGED * len(new):
            return None
        bitmap = np.packbits(changed).tobytes()
        bitmap = min(bitmap, _COMPRESSOR.compress(memoryview(bitmap)), key=len)
        touched = memoryview(new[changed].reshape(-1))  # type: ignore[arg-type]
        delta = DeltaCodec().encode(touched, chunk, memoryview(old[changed].reshape(-1)))  # type: ignore[arg-type]
        if delta is not None and delta.nbytes > _DELTA_PAYS * touched.nbytes:
            delta = None
        header = PlanesHeader(_ROWS_MAGIC, 1, False, data.nbytes, base_digest(base)).pack()
        more = _MORE.pack(row_nbytes, count, len(bitmap), _RAW if delta is None else _DELTA)
        stored = b"".join((header, more, bitmap, touched if delta is None else delta, data[new.nbytes :]))
        return stored if len(stored) <= PAYS * data.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        """Copy the base and put the changed rows over it.

        Where `out` is the base itself nothing is copied, and the caller MUST compare what comes of it with its
        digest: whether it was the right base is not looked at then.
        """
        if base is None:
            raise damaged(self.name, "the bytes it was made against are missing")
        in_place = out is base
        header = PlanesHeader.read(self.name, _ROWS_MAGIC, stored, out.nbytes, None if in_place else base, _MORE)
        row_nbytes, count, map_nbytes, kind = header.more
        if not 1 <= row_nbytes <= out.nbytes or kind not in (_RAW, _DELTA):
            raise damaged(self.name, "its header makes no sense")
        rest = stored[HEADER_BYTES + _MORE.size :]
        old, new = _rows(base, row_nbytes), _rows(out, row_nbytes)
        tail_nbytes = out.nbytes - new.nbytes
        if map_nbytes + tail_nbytes > rest.nbytes:
            raise damaged(self.name, "it is cut short")
        changed = self._changed_in(rest[:map_nbytes], len(new))
        if len(changed) != count:
            raise damaged(self.name, "its map and its number of rows differ")
        rest = rest[map_nbytes:]
        coded, tail = rest[: rest.nbytes - tail_nbytes], rest[rest.nbytes - tail_nbytes :]
        if kind == _RAW:
            if coded.nbytes != count * row_nbytes:
                raise damaged(self.name, f"{coded.nbytes} bytes of rows where {count * row_nbytes} belong")
            touched = np.frombuffer(coded, np.uint8).reshape(count, row_nbytes)
        else:
            touched = np.empty((count, row_nbytes), np.uint8)
            into = memoryview(touched.reshape(-1))  # type: ignore[arg-type]
            DeltaCodec().decode(coded, into, memoryview(old[changed].reshape(-1)))  # type: ignore[arg-type]
        if not in_place:
            np.copyto(new, old)
        new[changed] = touched
        out[new.nbytes :] = tail

    def _changed_in(self, stored: memoryview, rows: int) -> NDArray[np.intp]:
        """Numbers of the rows whose bit is set; numpy puts rows by number ten times as fast as by a mask."""
        plain = -(-rows // 8)
        packed = np.frombuffer(stored, np.uint8)
        if stored.nbytes != plain:
            packed = np.empty(plain, np.uint8)
            decompress_into(self.name, stored, memoryview(packed))  # type: ignore[arg-type]
        bits = np.unpackbits(packed)
        if bits[rows:].any():
            raise damaged(self.name, "its map is longer than its rows")
        return np.flatnonzero(bits[:rows].view(np.bool_))


def _rows(data: memoryview, row_nbytes: int) -> Bytes:
    rows = data.nbytes // row_nbytes
    return np.frombuffer(data, np.uint8, rows * row_nbytes).reshape(rows, row_nbytes)


def _changed(new: Bytes, old: Bytes) -> NDArray[np.bool_]:
    """Which rows differ; compares eight bytes at a time where rows allow it, a block of rows at a time."""
    width = next(width for width in (8, 4, 2, 1) if new.shape[1] % width == 0)
    wide = np.dtype(f"<u{width}")
    a, b = new.view(wide), old.view(wide)
    changed = np.empty(len(new), np.bool_)
    step = max(1, _BLOCK_BYTES // new.shape[1])
    for start in range(0, len(new), step):
        np.any(a[start : start + step] != b[start : start + step], axis=1, out=changed[start : start + step])
    return changed
