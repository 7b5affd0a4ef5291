"""Ways to encode bytes, ours and others, and what each takes: processor seconds and bytes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckpt_engine.store.codecs.adam import AdamCodec
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.codecs.numbers import fold_difference
from ckpt_engine.store.codecs.planes import PlaneEncoder, PlanesHeader, base_digest, words_in

PIECE_BYTES = 16 << 20


class Way(Protocol):
    """Encodes and decodes one piece."""

    def encode(self, piece: Piece) -> bytes | memoryview: ...

    def decode(self, stored: memoryview, piece: Piece, out: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows of one array, with the same rows of an older state where there is one."""

    data: memoryview
    chunk: Chunk
    base: memoryview | None = None


def pieces_of(
    arrays: Mapping[str, NDArray[Any]], dtype: str, bases: Mapping[str, NDArray[Any]] | None = None
) -> list[Piece]:
    """Pieces as the writer cuts them: between rows, at most 16 MiB."""
    pieces = []
    for name, array in arrays.items():
        rows, old = (None if a is None else a[name].reshape(len(array), -1) for a in (arrays, bases))
        assert rows is not None
        step = max(1, PIECE_BYTES // rows[0].nbytes)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            base = None if old is None else view(old[start : start + step])
            pieces.append(Piece(view(part), Chunk(dtype, part.shape, name), base))
    return pieces


def view(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))


class Ours:
    """One of our codecs; a piece for which it does not pay is stored as it is."""

    def __init__(self, name: str) -> None:
        self._codec = get_codec(name)

    def encode(self, piece: Piece) -> bytes | memoryview:
        stored = self._codec.encode(piece.data, piece.chunk, piece.base)
        return piece.data if stored is None else stored

    def decode(self, stored: memoryview, piece: Piece, out: memoryview) -> None:
        if stored.nbytes == piece.data.nbytes:
            out[:] = stored
        else:
            self._codec.decode(stored, out, piece.base)


class PlanesOnly(Ours):
    """Our differences without the form for few changed words, as every version can read them."""

    def __init__(self) -> None:
        super().__init__("delta-byteplane-zstd")

    def encode(self, piece: Piece) -> bytes | memoryview:
        assert piece.base is not None
        width = _width(piece)
        new, old = words_in(piece.data, width), words_in(piece.base, width)
        header = PlanesHeader(b"CKD1", width, False, piece.data.nbytes, base_digest(piece.base))
        return PlaneEncoder(header).encode(
            lambda start, stop: fold_difference(new[start:stop], old[start:stop]), piece.data[new.nbytes :]
        )


class Zstd:
    """Zstandard alone."""

    def __init__(self, level: int) -> None:
        self._level = level

    def encode(self, piece: Piece) -> bytes | memoryview:
        return zstandard.ZstdCompressor(level=self._level).compress(piece.data)

    def decode(self, stored: memoryview, piece: Piece, out: memoryview) -> None:
        out[:] = zstandard.ZstdDecompressor().decompress(stored)


class ShuffledGzip:
    """What HDF5 does with its filters shuffle and gzip (level 4): byte planes one after the other, then deflate."""

    def encode(self, piece: Piece) -> bytes | memoryview:
        width = _width(piece)
        shuffled = np.frombuffer(piece.data, np.uint8).reshape(-1, width).T
        return zlib.compress(np.ascontiguousarray(shuffled), 4)

    def decode(self, stored: memoryview, piece: Piece, out: memoryview) -> None:
        shuffled = np.frombuffer(zlib.decompress(stored), np.uint8).reshape(_width(piece), -1)
        np.copyto(np.frombuffer(out, np.uint8).reshape(shuffled.shape[::-1]), shuffled.T)


class ZipNN:
    """The library of that name, with one thread."""

    def __init__(self) -> None:
        import zipnn

        self._make: Callable[[str], Any] = lambda dtype: zipnn.ZipNN(
            input_format="byte", bytearray_dtype=dtype, threads=1
        )
        self._made: dict[str, Any] = {}

    def _for(self, piece: Piece) -> Any:
        dtype = piece.chunk.dtype
        if dtype not in self._made:
            self._made[dtype] = self._make(dtype)
        return self._made[dtype]

    def encode(self, piece: Piece) -> bytes | memoryview:
        # The library wants bytes, and may change what it is given: a copy.
        return self._for(piece).compress(bytearray(piece.data))  # type: ignore[no-any-return]

    def decode(self, stored: memoryview, piece: Piece, out: memoryview) -> None:
        out[:] = self._for(piece).decompress(bytearray(stored))


def zipnn_installed() -> bool:
    """Whether the reference is there; it is no dependency of this project."""
    try:
        import zipnn  # noqa: F401
    except ImportError:
        return False
    return True


class Coding:
    """One way on some pieces, measured again and again."""

    def __init__(self, way: Way, pieces: Sequence[Piece]) -> None:
        self._way, self._pieces = way, pieces
        self.nbytes = sum(piece.data.nbytes for piece in pieces)
        self._stored = [bytes(way.encode(piece)) for piece in pieces]
        self._out = np.ones(PIECE_BYTES * 2, np.uint8)
        for piece, stored in zip(pieces, self._stored, strict=True):
            if bytes(self._decode(piece, stored)) != bytes(piece.data):
                raise AssertionError(f"{type(way).__name__} does not give back {piece.chunk}")

    @property
    def ratio(self) -> float:
        """Bytes before, divided by bytes after."""
        return self.nbytes / sum(map(len, self._stored))

    def encode(self) -> float:
        """Processor seconds of encoding everything once."""
        seconds = 0.0
        for piece in self._pieces:
            began = time.process_time()
            kept = self._way.encode(piece)
            seconds += time.process_time() - began
            del kept
        return seconds

    def decode(self) -> float:
        """Processor seconds of decoding everything once, into touched memory."""
        seconds = 0.0
        for piece, stored in zip(self._pieces, self._stored, strict=True):
            began = time.process_time()
            self._decode(piece, stored)
            seconds += time.process_time() - began
        return seconds

    def _decode(self, piece: Piece, stored: bytes) -> memoryview:
        out = memoryview(self._out)[: piece.data.nbytes]
        self._way.decode(memoryview(stored), piece, out)
        return out


class AdamCoding:
    """The adam codec on whole arrays: weights and moments one step apart."""

    def __init__(
        self, new: Mapping[str, Mapping[str, Any]], old: Mapping[str, Mapping[str, Any]], hyper: Mapping[str, float]
    ) -> None:
        self._codec, self._hyper = AdamCodec(), [hyper]
        self._groups = [
            ({role: view(new[role][name]) for role in new}, {role: view(old[role][name]) for role in old})
            for name in new["p"]
        ]
        self.nbytes = sum(data.nbytes for group, _ in self._groups for data in group.values())
        self._stored = [self._encode(*group) for group in self._groups]
        self.bytes_by_role = {role: sum(len(stored[role]) for stored in self._stored) for role in self._codec.roles}
        self.ratio = self.nbytes / sum(self.bytes_by_role.values())
        self._outs = [
            {role: memoryview(bytearray(data.nbytes)) for role, data in group.items()} for group, _ in self._groups
        ]
        self.decode()
        for (group, _), outs in zip(self._groups, self._outs, strict=True):
            if any(outs[role] != group[role] for role in group):
                raise AssertionError("the adam codec does not give back what it was given")

    def _encode(self, group: Mapping[str, memoryview], bases: Mapping[str, memoryview]) -> dict[str, bytes]:
        stored = self._codec.encode(group, bases, self._hyper)
        if stored is None:
            # As the writer does: each array by itself.
            way, width = Ours("delta-byteplane-zstd"), next(iter(group.values())).nbytes // 4
            return {r: bytes(way.encode(Piece(d, Chunk("float32", (width,)), bases[r]))) for r, d in group.items()}
        return {role: bytes(data) for role, data in stored.items()}

    def encode(self) -> float:
        """Processor seconds of encoding everything once."""
        began = time.process_time()
        for group, bases in self._groups:
            self._codec.encode(group, bases, self._hyper)
        return time.process_time() - began

    def decode(self) -> float:
        """Processor seconds of decoding everything once."""
        began = time.process_time()
        for stored, outs, (group, bases) in zip(self._stored, self._outs, self._groups, strict=True):
            if memoryview(stored["p"])[:4] == b"CKA1":
                self._codec.decode({r: memoryview(s) for r, s in stored.items()}, outs, bases)
                continue
            for role, out in outs.items():
                piece = Piece(group[role], Chunk("float32", (out.nbytes // 4,)), bases[role])
                Ours("delta-byteplane-zstd").decode(memoryview(stored[role]), piece, out)
        return time.process_time() - began


def _width(piece: Piece) -> int:
    return 2 if piece.chunk.dtype == "bfloat16" else 4
