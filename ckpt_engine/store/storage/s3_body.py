"""The body of an upload request: sent straight from the caller's memory, slice by slice.

To botocore it is a file, to aiohttp a payload. The kernel takes the bytes from the caller's memory itself; what it does
not take at once asyncio may keep a view of. So the next slice waits until it keeps nothing, and a connection that is
given up loses what it keeps at once: the caller's memory is somebody else's then. Before it is encrypted a slice is
copied, because that layer keeps views for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.upload_parts import MemoryBlocks

SLICE_BYTES = 512 << 10
_NAP_SECONDS = 0.1


class MeterStoppedError(Exception):
    """A meter has raised `cause`: no other attempt is to be made."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


def wait_of(meter: Meter, nbytes: int) -> float:
    """What `meter` says.

    Raises:
        MeterStoppedError: it has raised.
    """
    try:
        return meter.wait(nbytes)
    except Exception as err:
        raise MeterStoppedError(err) from err


class UploadBody(Payload):
    """Bytes `start` to `start + nbytes` of `blocks`; may be sent several times.

    Args:
        moved: called after each slice was taken by the socket.
    """

    _autoclose = True

    def __init__(
        self, blocks: MemoryBlocks, start: int, nbytes: int, *, moved: Callable[[], None], meter: Meter
    ) -> None:
        super().__init__(None, content_type="application/octet-stream")
        self._blocks = blocks
        self._start = start
        self._size = nbytes
        self._moved = moved
        self._meter = meter
        self._at = 0
        self.stopped: MeterStoppedError | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        transport: Any = getattr(writer, "transport", None)
        plain = transport is not None and transport.get_extra_info("sslcontext") is None
        if plain:
            transport.set_write_buffer_limits(high=0)  # `drain` returns when nothing is kept
        try:
            for view in self._blocks.views(self._start, len(self), SLICE_BYTES):
                with view:
                    await self._wait_for_turn(len(view))
                    await writer.write(view if plain else bytes(view))
                    await writer.drain()
                self._moved()
        except BaseException:
            if plain:
                transport.abort()
            raise

    async def _wait_for_turn(self, nbytes: int) -> None:
        try:
            wait = wait_of(self._meter, nbytes)
        except MeterStoppedError as err:
            self.stopped = err  # aiohttp makes a connection error of what is raised here
            raise
        while wait > 0:
            self._moved()
            await asyncio.sleep(min(wait, _NAP_SECONDS))
            wait -= _NAP_SECONDS
        self._moved()

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length in (None, self._size), (content_length, self._size)
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read().decode(encoding, errors)

    # What botocore reads where it has to sign or to check payloads.

    def __len__(self) -> int:
        return self._size or 0

    def read(self, nbytes: int = -1) -> bytes:
        left = len(self) - self._at
        nbytes = left if nbytes < 0 else min(nbytes, left)
        data = b"".join(self._blocks.views(self._start + self._at, nbytes, SLICE_BYTES)) if nbytes else b""
        self._at += nbytes
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def tell(self) -> int:
        return self._at
