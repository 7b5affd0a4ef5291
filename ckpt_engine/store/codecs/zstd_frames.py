"""Zstandard frames of known size.

Each thread compresses with a context of its own. Decompressing trusts nothing that a frame says.
"""

from __future__ import annotations

import threading

import zstandard

from ckpt_engine.store.codecs.codec import damaged

PAYS = 0.97
"""An encoding is worth its time if at most this share of the bytes is left."""
HOPELESS = 0.99
"""Samples that compress worse than this end the attempt: short runs compress a little worse than the whole."""
_RUNS, _RUN_BYTES = 8, 1 << 10


class Compressor(threading.local):
    """Makes frames that state their size, with a context of its own on each thread.

    Args:
        settings: arguments of `zstandard.ZstdCompressionParameters`.
    """

    def __init__(self, **settings: int) -> None:
        parameters = zstandard.ZstdCompressionParameters(write_content_size=1, **settings)
        self.compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        """One frame of some bytes; releases the GIL."""


class _Decompressor(threading.local):
    def __init__(self) -> None:
        self.open = zstandard.ZstdDecompressor().stream_reader


_DECOMPRESSOR = _Decompressor()


def decompress_into(codec: str, stored: memoryview, out: memoryview) -> None:
    """Fill `out` with the bytes of one frame; allocates nothing, whatever the frame says; releases the GIL.

    Args:
        codec: whose frame it is, for messages.

    Raises:
        CorruptError: `stored` is not one whole frame of that size.
    """
    try:
        # Checked first: what is not known to fit is decoded in steps, through memory of the library.
        claimed = zstandard.frame_content_size(stored)
        if claimed != out.nbytes:
            raise damaged(codec, f"a frame of {claimed} bytes where {out.nbytes} belong")
        with _DECOMPRESSOR.open(stored, read_across_frames=True) as reader:
            if reader.readinto(out) != out.nbytes:
                raise damaged(codec, f"a frame of {out.nbytes} bytes ends early")
            if reader.read(1):
                raise damaged(codec, "more than one frame")
    except (zstandard.ZstdError, ValueError) as err:
        raise damaged(codec, str(err)) from err


def sample(data: memoryview) -> bytes:
    """A few runs of `data`, to try on them whether it can be compressed at all; all of it where it is short."""
    nbytes = data.nbytes
    if nbytes <= _RUNS * _RUN_BYTES:
        return bytes(data)
    starts = (i * (nbytes - _RUN_BYTES) // (_RUNS - 1) for i in range(_RUNS))
    return b"".join(data[start : start + _RUN_BYTES] for start in starts)
