"""Containers are valid safetensors files, and every damage of a container is found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import CorruptError, ForeignError, FormatError
from ckpt_engine.store.container import DTYPES, build_header, container_form, data_header, header_nbytes, parse_header

_OTHER = [
    "complex128",
    "complex32",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    *(["float8_e8m0fnu"] if hasattr(torch, "float8_e8m0fnu") else []),
]


def _tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape, dtype=np.int64))
    raw = torch.arange(count * kind.itemsize, dtype=torch.int64).remainder(2 if dtype == "bool" else 120)
    return raw.to(torch.uint8).view(kind).reshape(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _file(tensors: dict[str, tuple[str, torch.Tensor]]) -> bytes:
    entries, data = [], b""
    for name, (dtype, tensor) in tensors.items():
        raw = _bytes(tensor)
        code, shape = container_form(dtype, tuple(tensor.shape), len(raw))
        entries.append((name, code, shape, len(raw)))
        data += raw
    return build_header(entries, {"made_by": "a test"}) + data


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 3)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_known_dtype_is_read_back_by_safetensors_itself(dtype: str, shape: tuple[int, ...]) -> None:
    """Any safetensors reader finds the array with its own dtype, shape and bytes, 0-d and empty ones included."""
    tensor = _tensor(dtype, shape)
    found = safetensors.torch.load(_file({"x": (dtype, tensor), "behind": ("uint8", _tensor("uint8", (5,)))}))
    assert found["x"].dtype == getattr(torch, dtype)
    assert tuple(found["x"].shape) == shape
    assert _bytes(found["x"]) == _bytes(tensor)
    assert _bytes(found["behind"]) == _bytes(_tensor("uint8", (5,)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _OTHER)
def test_a_dtype_that_safetensors_lacks_is_readable_as_its_bytes(dtype: str) -> None:
    """The file stays readable by everyone: such an array appears as plain bytes."""
    tensor = _tensor(dtype, (3, 2))
    found = safetensors.torch.load(_file({"x": (dtype, tensor)}))
    assert found["x"].dtype == torch.uint8
    assert found["x"].numpy().tobytes() == _bytes(tensor)


def test_the_table_covers_what_torch_and_safetensors_call_the_same(tmp_path: Path) -> None:
    """Every code of the table is the one the package itself writes for that dtype."""
    for dtype, (code, item_bytes) in DTYPES.items():
        kind = getattr(torch, dtype)
        path = tmp_path / f"{dtype}.safetensors"
        safetensors.torch.save_file({"x": torch.zeros(2, dtype=kind)}, path)
        entry = parse_header(path.read_bytes()).entries[0]
        assert (entry.container_dtype, kind.itemsize) == (code, item_bytes)


def test_data_starts_at_a_page_and_arrays_follow_in_the_given_order() -> None:
    """The order is the caller's, so that an arena can be laid out like the file."""
    header = build_header([("z", "F32", (2,), 8), ("a", "U8", (3,), 3)], {"k": "v"})
    assert len(header) % 4096 == 0
    assert len(header) == header_nbytes(header[:8])
    parsed = parse_header(header)
    assert [(e.name, e.start - len(header), e.end - len(header)) for e in parsed.entries] == [("z", 0, 8), ("a", 8, 11)]
    assert parsed.metadata == {"k": "v"}
    assert parsed.nbytes == len(header) + 11


def test_a_container_without_arrays_is_valid() -> None:
    """A state without tensors still has a data file any reader accepts."""
    assert safetensors.torch.load(build_header([])) == {}
    assert parse_header(build_header([])).nbytes == 4096


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "U8", (1,), 1), ("a", "U8", (1,), 1)],
        [("__metadata__", "U8", (1,), 1)],
        [("a", "F32", (2,), 7)],
        [("a", "F3", (1,), 4)],
    ],
)
def test_a_header_no_reader_accepts_is_not_made(entries: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    """Names used twice or reserved, sizes that do not fit and unknown codes are refused."""
    with pytest.raises(ValueError, match="array"):
        build_header(entries)


def test_a_size_that_contradicts_the_dtype_is_refused() -> None:
    """`container_form` notices a wrong byte count before it is written."""
    with pytest.raises(ValueError, match="float32"):
        container_form("float32", (3,), 11)


@given(st.integers(0, 400), st.integers(0, 7))
def test_a_flipped_bit_in_a_header_never_crashes_the_reader(position: int, bit: int) -> None:
    """A damaged header parses to something, or is a clear error; nothing else."""
    data = bytearray(build_header([("weight", "F32", (4,), 16), ("bias", "U8", (4,), 4)], {"a": "b"}))
    data[position] ^= 1 << bit
    with suppress(FormatError):
        parse_header(bytes(data))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 4095])
def test_a_truncated_header_is_corrupt(keep: int) -> None:
    """Cut anywhere, a header is reported as damaged."""
    with pytest.raises(CorruptError):
        parse_header(build_header([("w", "U8", (4,), 4)])[:keep])


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00X" + b"m" * 90, bytes(64)])
def test_another_kind_of_file_is_foreign(data: bytes) -> None:
    """A zip (torch.save), a pickle and zeros are foreign files and not damaged containers."""
    with pytest.raises(ForeignError):
        parse_header(data)


def test_holes_and_overlaps_are_corrupt() -> None:
    """Arrays that do not lie back to back are damage."""
    text = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    with pytest.raises(CorruptError, match="'a'"):
        parse_header(len(text).to_bytes(8, "little") + text)


def test_every_flipped_bit_in_the_header_of_a_data_file_is_found() -> None:
    """In names, types, sizes, padding, length and digest; other programs read such headers as any other."""
    entries = [("w~[0:8]~rows", "U8", (8,), 8), ("grüße", "F32", (2, 1), 8)]
    header = data_header(entries)
    parsed = parse_header(header)
    assert [(one.name, one.shape) for one in parsed.entries] == [("w~[0:8]~rows", (8,)), ("grüße", (2, 1))]
    assert parsed.metadata["format"] == "pt"
    assert set(safetensors.torch.load(header + bytes(16))) == {"w~[0:8]~rows", "grüße"}
    assert len(header) == len(build_header(entries)) == 4096
    text = len(header.rstrip())
    for bit in [*range(8 * text), *range(8 * text, 8 * len(header), 997)]:
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_header(bytes(damaged))
