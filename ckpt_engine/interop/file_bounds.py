"""Refuses files of `torch.save` that hold far more than their bytes account for.

Pickles share what is in them: thirty lists that each contain the one before twice are a few hundred bytes, and a
thousand million values to code that walks through them.
"""

from __future__ import annotations

import argparse
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ckpt_engine.errors import CorruptError, MismatchError
from ckpt_engine.interop.imported import Advance
from ckpt_engine.state.flatten import MAX_DEPTH
from ckpt_engine.store.json_checks import reading

ANOTHER_COPY = "it is damaged or was not written to its end: take another copy, or an older checkpoint"
_CHUNK_BYTES = 1 << 20
_FOLDER = 0x10
"""torch reads nothing of what a zip file says to be one, and gives memory as it finds it."""
MOST_TIMES = 64
"""What is read, written out, has at most so many times the bytes of its file,"""
FREE_BYTES = 64 << 20
"""and so many more."""
_FREE_VALUES = 200_000
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
_MEMO = frozenset({"PUT", "LONG_BINPUT"})


def require_bounded(value: Any, nbytes: int, what: str) -> None:
    """Refuse a value that is far larger than `nbytes` bytes of a pickle are without sharing.

    Raises:
        MismatchError: says in which way.
    """
    left: list[tuple[Any, int]] = [(value, 1)]
    values, most_values = 0, _FREE_VALUES + MOST_TIMES * min(nbytes, FREE_BYTES)
    written, most_bytes = 0, FREE_BYTES + MOST_TIMES * nbytes
    seen: set[int] = set()
    while left:
        one, depth = left.pop()
        values += 1
        if isinstance(one, torch.Tensor | np.ndarray):
            if id(one) not in seen:
                seen.add(id(one))
                written += _nbytes(one)
        elif isinstance(one, str | bytes | bytearray):
            written += len(one)
        else:
            left += [(child, depth + 1) for _, child in children(one)]
        if depth > MAX_DEPTH:
            raise MismatchError(f"{what} is nested deeper than {MAX_DEPTH} levels, or contains itself")
        if values > most_values or written > most_bytes:
            raise MismatchError(
                f"{what} has {nbytes:,} bytes, and what is in it would have more than {MOST_TIMES} times as many: its "
                "parts are shared, or repeat their elements",
                hint="do not trust it; if you have made it yourself, save it again with copies of what is shared",
            )


def children(one: Any) -> Iterable[tuple[Any, Any]]:
    """What is right below a value that a file of torch.save has, keys included, each with the name of its place."""
    if isinstance(one, Mapping):
        more = [("_metadata", one._metadata)] if hasattr(one, "_metadata") else []
        return [*(("(key)", key) for key in one), *one.items(), *more]
    if isinstance(one, list | tuple | set | frozenset):
        return enumerate(one)
    return vars(one).items() if isinstance(one, argparse.Namespace) else ()


def _nbytes(array: Any) -> int:
    """What an array takes when it is written; of one whose elements are there, nothing that the file does not have."""
    if isinstance(array, np.ndarray):
        return int(array.nbytes)
    if array.layout is not torch.strided or array.device.type == "meta":
        return 0  # refused where it is stored
    nbytes = int(array.numel()) * array.element_size()
    return nbytes if nbytes > array.untyped_storage().nbytes() else 0


def require_stored(file: Path | IO[bytes], size: int, what: str, advance: Advance | None = None) -> None:
    """Refuse a zip file that is compressed, as torch compresses nothing, or damaged; without `advance` see `load`.

    Raises:
        CorruptError
    """
    with zipfile.ZipFile(file) as opened:
        parts = opened.infolist()
        nbytes = sum(one.file_size for one in parts)
        if nbytes > size or any(one.compress_type or one.external_attr & _FOLDER for one in parts):
            raise CorruptError(f"{what} is compressed, or its parts overlap: {nbytes:,} bytes in a file of {size:,}")
        try:
            for one in parts:
                if one.CRC == 0:
                    del one.CRC  # torch writes none after set_crc32_options(False)
                if one.filename.endswith("data.pkl"):
                    require_honest(opened.read(one), what)
                elif advance is not None:
                    with opened.open(one) as part:
                        while data := part.read(_CHUNK_BYTES):
                            advance(len(data))
        except (zipfile.BadZipFile, EOFError) as err:
            raise CorruptError(f"{what} is damaged: {err}", hint=ANOTHER_COPY) from err


def require_honest(pickle: bytes, what: str) -> None:
    """Refuse a pickle that makes its reader reserve room for far more than it has.

    Raises:
        CorruptError
    """
    makes_room = b"bytearray" in pickle
    with reading(f"{what} is no whole pickle"):
        for code, argument, _ in pickletools.genops(pickle):
            number = isinstance(argument, int) and argument > len(pickle)
            if (number and (code.name in _MEMO or (makes_room and code.name in _NUMBERS))) or code.name == "BYTEARRAY8":
                raise CorruptError(f"{what} asks for room for {argument} bytes, more than it has")
