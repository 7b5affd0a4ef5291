"""The other ways to save, each driven as its documentation says, keeping the two newest snapshots."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks.workloads import State

FINISH_SECONDS = 600.0


class Peer(Protocol):
    """Saves the state of a plain loop. `finish` returns when all saves are on disk; `close` gives everything back."""

    def save(self, state: State, step: int) -> float:
        """Save; seconds until training may go on."""
        ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class TorchSave:
    """`torch.save` into a temporary file, fsync, rename, fsync of the folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        temp = self._folder / ".tmp.pt"
        with temp.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(self._folder / f"{step % 2}.pt")
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Every save is finished when it returns."""

    def close(self) -> None:
        """There is nothing to release."""


class DcpAsync:
    """`torch.distributed.checkpoint.async_save` with synced files; waits for the save before, as it must.

    Args:
        process: save in a process instead of a thread.
        cached: reuse staging memory (shared memory) from save to save, instead of allocating it every time.
    """

    def __init__(self, folder: Path, *, process: bool = False, cached: bool = False) -> None:
        self._folder = folder
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(StagingOptions(False, True, False, False)) if cached else None
        self._running: Future[Any] | None = None
        # Its thread talks to the other ranks while the caller does: in one group the two can meet, and none goes on.
        self._thread_group = dist.new_group() if dist.is_initialized() and not process else None
        self._group = process and not dist.is_initialized()
        if self._group:
            file = folder.parent / "rendezvous"
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        self.finish()
        target = self._folder / str(step % 2)
        shutil.rmtree(target, ignore_errors=True)
        found = async_save(
            state,
            storage_writer=FileSystemWriter(target, sync_files=True),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            process_group=self._thread_group,
        )
        if isinstance(found, AsyncSaveResponse):
            found.staging_completion.result(FINISH_SECONDS)
            self._running = found.upload_completion
        else:
            self._running = found
        return time.perf_counter() - began

    def finish(self) -> None:
        if self._running is not None:
            self._running.result(FINISH_SECONDS)
            self._running = None

    def close(self) -> None:
        self.finish()
        if self._stager is not None:
            self._stager.close()
        if self._group:
            dist.destroy_process_group()
