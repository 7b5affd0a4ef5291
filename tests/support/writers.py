"""The writers of a process, and one that does nothing for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from ckpt_engine import Checkpointer
from ckpt_engine.writer.launch import ENTRY, ProcessWriter
from tests.support import interpreters

PATIENCE_SECONDS = 60.0


@contextmanager
def no_writing(ckpt: Checkpointer) -> Iterator[psutil.Process]:
    """The writer process is stopped: what is saved in the block stays in flight."""
    ckpt.engine.start()
    process = writer_of(ckpt)
    process.suspend()
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it was resumed before, and has ended
            process.resume()


def writer_of(ckpt: Checkpointer) -> psutil.Process:
    """The one that works for it now. One of an earlier checkpointer may still be ending beside it."""
    assert ckpt.engine._pipeline._writer is not None
    client = ckpt.engine._pipeline._writer.client
    assert isinstance(client, ProcessWriter)
    return psutil.Process(client.pid)


def writers_of(pid: int) -> list[psutil.Process]:
    """Those that a trainer has started and that live: children of it, or forks that it has asked for."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):
                if str(ENTRY) in one.cmdline():
                    found.append(one)
    for one in psutil.Process(interpreters.pid_of_server(interpreters.WRITER)).children():
        with suppress(psutil.NoSuchProcess):
            if one.name() == interpreters.process_name(pid) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
