"""Writers that do nothing for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from ckpt_engine import Checkpointer
from ckpt_engine.writer.launch import ProcessWriter

PATIENCE_SECONDS = 60.0


@contextmanager
def no_writing(ckpt: Checkpointer) -> Iterator[None]:
    """The writer process is stopped: what is saved in the block stays in flight."""
    ckpt.engine.start()
    assert ckpt.engine._pipeline._writer is not None
    client = ckpt.engine._pipeline._writer.client
    assert isinstance(client, ProcessWriter)
    process = psutil.Process(client.pid)
    process.suspend()
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield
    finally:
        process.resume()
