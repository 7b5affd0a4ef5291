"""What every storage and every codec promises, as tests that a new one inherits.

```python
class TestMine(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Mine(f"mine://{tmp_path}", {})
```
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    NewerFormatError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
)
from ckpt_engine.store import names
from ckpt_engine.store.codecs.codec import Chunk, Codec
from ckpt_engine.store.container import item_bytes
from ckpt_engine.store.storage.base import ObjectInfo, Storage

PATIENCE_SECONDS = 60.0
_EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)
FENCE = b"\xa5" * 64
DTYPES = (
    *("bool", "uint8", "float8_e4m3fn", "int16", "float16", "bfloat16"),
    *("float32", "int32", "complex64", "float64", "int64", "complex128"),
)
UNKNOWN = "quaternion512"
_BYTES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "random": lambda nbytes, rng: rng.integers(0, 256, size=nbytes, dtype=np.uint8),
    "normal": lambda nbytes, rng: np.frombuffer(
        (rng.standard_normal(nbytes // 4 + 1) * 0.02).astype(np.float32).tobytes(), np.uint8, nbytes
    ),
    "zero": lambda nbytes, _: np.zeros(nbytes, np.uint8),
    "few": lambda nbytes, rng: rng.integers(0, 3, size=nbytes).astype(np.uint8),
}


def put(storage: Storage, name: str, *parts: bytes, exclusive: bool = True) -> None:
    """`put` with bytes."""
    storage.put(name, [memoryview(part) for part in parts], exclusive=exclusive)


def listed(storage: Storage, prefix: str = "") -> list[ObjectInfo]:
    """The listing in order of names."""
    return sorted(storage.list(prefix), key=lambda item: item.name)


def aligned(data: bytes) -> memoryview:
    """`data` in memory that starts at a page, as an arena's slot does."""
    block = mmap.mmap(-1, max(1, len(data)))
    block.write(data)
    return memoryview(block)[: len(data)]


class StorageContract:
    """Tests of the `Storage` protocol; the fixture `storage` is empty, and only the test uses it."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    def test_an_object_is_what_was_put(self, storage: Storage) -> None:
        """Blocks are stored back to back, whatever their sizes; none at all is an empty object."""
        put(storage, "data/a", b"one", b"", b"two")
        put(storage, "data/empty")
        assert storage.get("data/a") == b"onetwo"
        assert storage.get("data/empty") == b""

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 4097])
    def test_big_aligned_blocks_keep_their_bytes(self, storage: Storage, nbytes: int) -> None:
        """The fast path for an arena's slot stores the same bytes, tail included, and reads them back."""
        data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        storage.put("data/big", [aligned(data)])
        assert listed(storage) == [ObjectInfo("data/big", nbytes)]
        assert storage.get("data/big") == data
        out = aligned(bytes(nbytes))
        storage.get_into("data/big", 0, out)
        assert bytes(out) == data  # a view is compared byte by byte

    def test_several_big_blocks_keep_their_bytes(self, storage: Storage) -> None:
        """Aligned or not, in any order."""
        blocks = [aligned(b"a" * (2 << 20)), memoryview(b"b" * 77), aligned(b"c" * ((2 << 20) + 5))]
        storage.put("data/big", blocks)
        assert storage.get("data/big") == b"".join(blocks)

    def test_a_range_is_read_without_the_rest(self, storage: Storage) -> None:
        """From `start`, at most `nbytes`; fewer where the object ends."""
        put(storage, "a", b"0123456789")
        ranges = {(3,): b"3456789", (3, 4): b"3456", (8, 100): b"89", (10, 1): b"", (50,): b""}
        for where, expected in ranges.items():
            assert storage.get("a", *where) == expected

    @_EXAMPLES
    @given(st.integers(0, 3 << 20), st.integers(0, 3 << 20), st.integers(0, 64))
    def test_any_range_can_be_read_into_memory(self, storage: Storage, start: int, nbytes: int, shift: int) -> None:
        """Any offset, size and alignment."""
        total = 3 << 20
        data = (bytes(range(253)) * (total // 253 + 1))[:total]
        if not listed(storage):
            storage.put("data/x", [aligned(data)])
        nbytes = min(nbytes, total - start)
        out = aligned(bytes(nbytes + shift))[shift:]
        storage.get_into("data/x", start, out)
        assert bytes(out) == data[start : start + nbytes]

    def test_memory_is_never_filled_by_half(self, storage: Storage) -> None:
        """An object that ends too early is damage, said with its name."""
        put(storage, "data/short", b"abc")
        with pytest.raises(CorruptError, match="data/short"):
            storage.get_into("data/short", 1, memoryview(bytearray(3)))

    def test_typed_memory_is_filled_as_bytes(self, storage: Storage) -> None:
        """The view may have any item format."""
        put(storage, "a", b"\1\0\0\0\2\0\0\0")
        out = memoryview(bytearray(8)).cast("i")
        storage.get_into("a", 0, out)
        assert out.tolist() == [1, 2]
        storage.put("b", [out])
        assert storage.get("b") == b"\1\0\0\0\2\0\0\0"

    def test_whole_reads_are_capped(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """An object that is larger than the format allows is damage, said with its name."""
        monkeypatch.setattr(names, "SMALL_BYTES", 10)
        put(storage, names.STATUS, b"0123456789")
        assert storage.get(names.STATUS) == b"0123456789"
        put(storage, names.STATUS, b"0123456789a", exclusive=False)
        with pytest.raises(CorruptError, match=f"{names.STATUS} has 11 bytes; the format allows 10"):
            storage.get(names.STATUS)

    def test_what_is_missing_is_said_to_be(self, storage: Storage) -> None:
        """Reading an object that does not exist names it."""
        for read in (
            lambda: storage.get("data/none"),
            lambda: storage.get_into("data/none", 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(StorageMissingError, match="data/none"):
                read()

    def test_exclusive_put_never_replaces(self, storage: Storage) -> None:
        """The second put of a name fails and leaves the first one's bytes, and nothing else."""
        put(storage, "a", b"first")
        with pytest.raises(StorageExistsError):
            put(storage, "a", b"second")
        assert storage.get("a") == b"first"
        assert storage.sweep() == 0

    def test_put_replaces_where_asked_to(self, storage: Storage) -> None:
        """Without `exclusive` the new object takes the old one's place."""
        put(storage, "a", b"first")
        put(storage, "a", b"2nd", exclusive=False)
        put(storage, "b", b"new", exclusive=False)
        assert (storage.get("a"), storage.get("b")) == (b"2nd", b"new")

    def test_a_listing_is_by_prefix_of_the_name(self, storage: Storage) -> None:
        """A prefix is any start of a name, as on object stores, and goes into folders."""
        below = ["data/a1", "data/a2", "data/b", "data/deep/er/c"]
        for name in ("top", *below, "database", "snapshots/s.json"):
            put(storage, name, b"x")
        for prefix, expected in {
            "": [*below, "database", "snapshots/s.json", "top"],
            "data/": below,
            "data/a": ["data/a1", "data/a2"],
            "data": [*below, "database"],
            "data/deep/e": ["data/deep/er/c"],
            "none/": [],
        }.items():
            assert [item.name for item in listed(storage, prefix)] == expected

    def test_an_untouched_root_is_empty(self, storage: Storage) -> None:
        """Looking makes nothing."""
        assert listed(storage) == []
        assert storage.sweep() == 0
        storage.delete("data/none")
        assert listed(storage) == []

    def test_delete_is_idempotent_and_takes_many(self, storage: Storage) -> None:
        """What is gone is gone; what never was is no error."""
        for name in ("data/a", "data/b", "c"):
            put(storage, name, b"x")
        storage.delete("data/a", "c", "data/never")
        storage.delete("data/a")
        storage.delete()
        assert [item.name for item in listed(storage)] == ["data/b"]

    @pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/./b", "a\0b"])
    def test_a_name_cannot_leave_the_root(self, storage: Storage, name: str) -> None:
        """Names are checked, wherever they come from."""
        for use in (
            lambda: put(storage, name, b"x"),
            lambda: storage.get(name),
            lambda: storage.get_into(name, 0, memoryview(bytearray(1))),
            lambda: storage.delete(name),
        ):
            with pytest.raises(StorageError, match="name"):
                use()

    def test_of_several_exclusive_puts_at_once_one_wins_whole(self, storage: Storage) -> None:
        """Concurrent writers of one name: one object, one success, an error for each of the others."""
        start = threading.Barrier(6)

        def write(number: int) -> bool:
            start.wait(PATIENCE_SECONDS)
            try:
                put(storage, "data/one", bytes([number]) * 50_000)
            except StorageExistsError:
                return False
            return True

        won = _together([partial(write, number) for number in range(6)])
        assert won.count(True) == 1
        assert storage.get("data/one") == bytes([won.index(True)]) * 50_000
        assert storage.sweep() == 0

    def test_threads_may_read_and_write_at_once(self, storage: Storage) -> None:
        """Reads of one object from many threads, beside writes of others."""
        data = bytes(range(256)) * 8192
        storage.put("data/x", [aligned(data)])
        out = aligned(bytes(len(data)))
        quarter = len(data) // 4

        def read(part: int) -> None:
            storage.get_into("data/x", part * quarter, out[part * quarter : (part + 1) * quarter])

        writes = [partial(put, storage, f"data/{part}", b"x") for part in range(4)]
        _together([*(partial(read, part) for part in range(4)), *writes])
        assert bytes(out) == data
        assert len(listed(storage)) == 5

    def test_free_space_is_a_number_or_unknown(self, storage: Storage) -> None:
        """Asking needs no root."""
        free_bytes = storage.capabilities.free_bytes()
        assert free_bytes is None or free_bytes > 0

    def test_the_url_leads_to_the_same_objects(self, storage: Storage) -> None:
        """Another process finds the storage by its URL."""
        from ckpt_engine.store.storage import open_storage

        put(storage, "a", b"x")
        assert open_storage(storage.url).get("a") == b"x"


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes to encode, what a codec may know about them, and the bytes of an older snapshot."""

    data: bytes
    base: bytes
    chunk: Chunk

    def encoded(self, codec: Codec) -> bytes | None:
        """What the codec stores; None: it does not pay."""
        stored = codec.encode(memoryview(self.data), self.chunk, memoryview(self.base) if codec.needs_base else None)
        return None if stored is None else bytes(stored)

    def decoded(self, codec: Codec, stored: bytes, nbytes: int | None = None) -> bytes:
        """Decode in the middle of a larger buffer, and see that nothing around it is written."""
        nbytes = len(self.data) if nbytes is None else nbytes
        buffer = bytearray(FENCE + bytes(nbytes) + FENCE)
        out = memoryview(buffer)[len(FENCE) : len(FENCE) + nbytes]
        try:
            codec.decode(memoryview(stored), out, memoryview(self.base) if codec.needs_base else None)
        finally:
            assert buffer.startswith(FENCE) and buffer.endswith(FENCE)
        return bytes(out)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any dtype, any length (0, 1, odd ones), any bits (NaN payloads), any likeness of data and base."""
    dtype = draw(st.sampled_from([*DTYPES, UNKNOWN]))
    nbytes = draw(
        st.one_of(st.integers(0, 40), st.integers(0, 40), st.integers(41, 3000), st.sampled_from([9_999, 300_001]))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = _BYTES[draw(st.sampled_from(list(_BYTES)))](nbytes, rng)
    data = base.copy()
    change = draw(st.sampled_from(["none", "one", "some", "small", "all"]))
    if change == "one" and nbytes:
        data[rng.integers(nbytes)] ^= 1 + rng.integers(255)
    elif change == "some" and nbytes:
        data[rng.integers(0, nbytes, size=1 + nbytes // 50)] ^= 0xA5
    elif change == "small":
        data[::4] += rng.integers(0, 3, size=data[::4].size).astype(np.uint8)
    elif change == "all":
        data = _BYTES["random"](nbytes, rng)
    width = item_bytes(dtype) or 1
    columns = draw(st.sampled_from([1, 3, 16]))
    rows = nbytes // (width * columns)
    return Sample(data.tobytes(), base.tobytes(), Chunk(dtype, (rows, columns), "weight"))


class CodecContract:
    """Tests of the `Codec` protocol. A codec that needs a base is given other bytes of the same length."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError

    @_EXAMPLES
    @given(st.data())
    def test_decoding_gives_back_every_bit(self, codec: Codec, data: st.DataObject) -> None:
        """What is encoded decodes to the same bytes, and takes less room than they."""
        sample = data.draw(samples())
        stored = sample.encoded(codec)
        if stored is None:
            return
        assert len(stored) < len(sample.data)
        assert sample.decoded(codec, stored) == sample.data

    @_EXAMPLES
    @given(st.data())
    def test_damaged_bytes_raise_an_error_of_the_tree_or_decode_to_something(
        self, codec: Codec, data: st.DataObject
    ) -> None:
        """Flipped, cut and lengthened bytes never crash and never write outside; lengths that do not fit are seen."""
        sample = data.draw(samples())
        stored = sample.encoded(codec)
        if not stored:
            return
        damaged = bytearray(stored)
        # Headers are where damage hurts: half of the flips go there.
        reach = data.draw(st.sampled_from([min(64, len(stored)), len(stored)]))
        for position in data.draw(st.lists(st.integers(0, reach - 1), min_size=1, max_size=4)):
            damaged[position] ^= data.draw(st.integers(1, 255))
        with pytest.raises(CorruptError):
            sample.decoded(codec, stored + b"\0")
        for bad in (bytes(damaged), stored[: data.draw(st.integers(0, len(stored) - 1))]):
            try:
                sample.decoded(codec, bad)
            except CkptError as err:
                assert isinstance(err, CorruptError | NewerFormatError)
        nbytes = len(sample.data)
        for other in {0, 1, nbytes - 1, nbytes + 1, 2 * nbytes} - {nbytes}:
            with pytest.raises(CorruptError):
                sample.decoded(codec, stored, other)

    @_EXAMPLES
    @given(st.binary(max_size=200), st.integers(0, 300))
    def test_foreign_bytes_raise_an_error_of_the_tree(self, codec: Codec, stored: bytes, nbytes: int) -> None:
        """Any bytes at all either decode or raise CorruptError or NewerFormatError."""
        sample = Sample(bytes(nbytes), bytes(nbytes), Chunk("uint8", (nbytes,)))
        try:
            sample.decoded(codec, stored)
        except (CorruptError, NewerFormatError):
            return
        assert nbytes == 0 or stored


def _together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    pool = ThreadPoolExecutor(len(jobs))
    try:
        return list(pool.map(lambda job: job(), jobs, timeout=PATIENCE_SECONDS))
    finally:
        pool.shutdown(wait=False)
