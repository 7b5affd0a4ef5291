"""The rows codec: bytes in proportion to the rows that were touched."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ckpt_engine.errors import CorruptError
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.codecs.planes import HEADER_BYTES
from tests.store.codecs.samples import weights

ROWS = get_codec("rows")


def _table(rows: int, columns: int, touched: int, noise: bool) -> tuple[memoryview, memoryview]:
    rng = np.random.default_rng(5)
    old = weights(rows * columns).reshape(rows, columns)
    new = old.copy()
    which = rng.choice(rows, touched, replace=False)
    fresh = rng.integers(0, 2**32, (touched, columns), dtype=np.uint32).view(np.float32)
    new[which] = fresh if noise else new[which] * np.float32(1.001)
    return memoryview(new.reshape(-1).view(np.uint8)), memoryview(old.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize(("rows", "columns", "touched"), [(20_000, 64, 200), (1000, 7, 10), (5000, 16, 1), (64, 64, 0)])
def test_bytes_are_those_of_the_touched_rows_and_the_index(rows: int, columns: int, touched: int, noise: bool) -> None:
    """At most 1.05 times the touched rows, a bit for each row, and a header; less where the rows changed a little."""
    data, base = _table(rows, columns, touched, noise)
    stored = ROWS.encode(data, Chunk("float32", (rows, columns)), base)
    assert stored is not None
    assert len(stored) <= 1.05 * touched * columns * 4 + -(-rows // 8) + 64
    out = bytearray(data.nbytes)
    ROWS.decode(memoryview(stored), memoryview(out), base)
    assert out == data


def test_dense_changes_are_left_to_other_codecs() -> None:
    """With most rows touched there is nothing to gain."""
    data, base = _table(1000, 16, 501, True)
    assert ROWS.encode(data, Chunk("float32", (1000, 16)), base) is None
    assert ROWS.encode(data, Chunk("float32", ()), base) is None


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("value", [0, 1, 7, 1 << 40, (1 << 64) - 1])
def test_headers_that_make_no_sense_are_refused(field: int, value: int) -> None:
    """Sizes of rows, counts and lengths are compared with each other before they are used."""
    data, base = _table(1000, 16, 10, True)
    stored = bytearray(ROWS.encode(data, Chunk("float32", (1000, 16)), base) or b"")
    at = HEADER_BYTES + 8 * field
    if struct.unpack_from("<Q", stored, at)[0] == value:
        return
    struct.pack_into("<Q", stored, at, value)
    with pytest.raises(CorruptError):
        ROWS.decode(memoryview(stored), memoryview(bytearray(data.nbytes)), base)
