"""The other ways to save, each driven as its documentation says, keeping the two newest snapshots."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks.workloads import State

FINISH_SECONDS = 600.0
_LOOK_SECONDS = 0.002


class Peer:
    """Saves the state of a plain loop, and brings the newest one back."""

    def save(self, state: State, step: int) -> float:
        """Save; seconds until training may go on."""
        raise NotImplementedError

    def load(self, into: State) -> None:
        """Put what was saved last into these tensors, which are live."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Called before the state changes: most have copied it when `save` returns."""

    def finish(self) -> None:
        """Return when all saves are on disk."""

    def close(self) -> None:
        """Give everything back."""


def fill(into: Any, loaded: Any) -> None:
    """Copy tensors to those at the same place."""
    if isinstance(into, torch.Tensor):
        if into is not loaded:
            with torch.no_grad():
                into.copy_(loaded)
    elif isinstance(into, Mapping):
        for key, child in into.items():
            fill(child, loaded[key])
    elif isinstance(into, list | tuple):
        for child, other in zip(into, loaded, strict=True):
            fill(child, other)


class TorchSave(Peer):
    """`torch.save` into a temporary file, fsync, rename, fsync of the folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._newest = folder

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        temp = self._folder / ".tmp.pt"
        with temp.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self._newest = temp.rename(self._folder / f"{step % 2}.pt")
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def load(self, into: State) -> None:
        fill(into, torch.load(self._newest, weights_only=True))


class DcpAsync(Peer):
    """`torch.distributed.checkpoint.async_save` with synced files; waits for the save before, as it must.

    Args:
        process: save in a process instead of a thread.
        cached: reuse staging memory (shared memory) from save to save, instead of allocating it every time.
    """

    def __init__(self, folder: Path, *, process: bool = False, cached: bool = False) -> None:
        self._folder = self._newest = folder
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
        self._newest = self._folder / str(step % 2)
        shutil.rmtree(self._newest, ignore_errors=True)
        found = async_save(
            state,
            storage_writer=FileSystemWriter(self._newest, sync_files=True),
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

    def load(self, into: State) -> None:
        dcp.load(into, checkpoint_id=self._newest)

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


class TorchCheckpointing(Peer):
    """`torch_checkpointing.CheckpointManager`: stages into shared memory beside training, a process writes."""

    def __init__(self, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = self._newest = folder
        # Its direct writes of what is no whole page fail on ext4: "Invalid argument".
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager.Config(storage_config=storage).build()
        self._running: Future[Any] | None = None

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        self.finish()
        self._newest = self._folder / str(step % 2)
        shutil.rmtree(self._newest, ignore_errors=True)
        self._running = self._manager.save(str(self._newest), state)
        return time.perf_counter() - began

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def load(self, into: State) -> None:
        fill(into, self._manager.load(str(self._newest), into=into))

    def finish(self) -> None:
        if self._running is not None:
            self._running.result(FINISH_SECONDS)
            self._running = None

    def close(self) -> None:
        self.finish()
        self._manager.close()


class TorchSnapshot(Peer):
    """`torchsnapshot.Snapshot.async_take`: `save` copies the state, a thread writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = self._newest = folder
        self._running: Any = None

    def save(self, state: State, step: int) -> float:
        from torchsnapshot import Snapshot, StateDict

        began = time.perf_counter()
        self.finish()
        self._newest = self._folder / str(step % 2)
        shutil.rmtree(self._newest, ignore_errors=True)
        self._running = Snapshot.async_take(str(self._newest), {"state": StateDict(**state)})
        return time.perf_counter() - began

    def load(self, into: State) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot(str(self._newest)).restore({"state": StateDict(**into)})

    def finish(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._running = None


class FlashCheckpoint(Peer):
    """DLRover's flash checkpoint: `save` copies into shared memory, a process writes. It skips while that writes."""

    def __init__(self, folder: Path) -> None:
        from dlrover.python.common.storage import KeepLatestStepStrategy
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        logging.getLogger("dlrover").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # It removes the oldest one as soon as there are so many.
        self._checkpointer = DdpCheckpointer(str(folder), deletion_strategy=KeepLatestStepStrategy(3, str(folder)))
        self._step = 0

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        self.finish()
        self._step += 1  # of one that it has seen it takes nothing
        self._checkpointer.save_checkpoint(self._step, state)
        return time.perf_counter() - began

    def load(self, into: State) -> None:
        path = self._folder / str(self._step) / "rank_0.pt"
        fill(into, torch.load(path, weights_only=True))

    def finish(self) -> None:
        """Its own wait looks every 3 s."""
        tracker, deadline = self._folder / "dlrover_latest.txt", time.monotonic() + FINISH_SECONDS
        while self._step and not (tracker.exists() and tracker.read_text() == str(self._step)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step} was not written within {FINISH_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Its shared memory would outlive this process, as it is meant to."""
        from dlrover.python.common.multi_process import clear_sock_dir

        self.finish()
        engine = self._checkpointer._engine
        engine.saver_proc.terminate()
        engine.saver_proc.join()
        engine._shm_handler.unlink()
        engine.close()
        clear_sock_dir()  # the next process would wait for a server that has ended


class LightningIO(Peer):
    """What Lightning writes its checkpoints with; `ModelCheckpoint` decides only when.

    Args:
        asynchronous: with `AsyncCheckpointIO`, which clones the state and queues without bound.
    """

    def __init__(self, folder: Path, *, asynchronous: bool) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._folder, self._newest = folder, folder
        self._io = AsyncCheckpointIO(TorchCheckpointIO()) if asynchronous else TorchCheckpointIO()

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        self._newest = self._folder / f"{step % 2}.ckpt"
        self._io.save_checkpoint(state, self._newest)
        return time.perf_counter() - began

    def load(self, into: State) -> None:
        fill(into, self._io.load_checkpoint(self._newest))

    def finish(self) -> None:
        self._io.teardown()  # a later save begins with a new thread


class AccelerateState(Peer):
    """`Accelerator.save_state` of a model and its optimizer."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from accelerate import Accelerator

        self._folder = self._newest = folder
        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(model, optimizer)

    def save(self, state: State, step: int) -> float:
        began = time.perf_counter()
        self._newest = self._folder / str(step % 2)
        shutil.rmtree(self._newest, ignore_errors=True)
        self._accelerator.save_state(str(self._newest))
        return time.perf_counter() - began

    def load(self, into: State) -> None:
        self._accelerator.load_state(str(self._newest))


@dataclass(frozen=True, slots=True)
class Way:
    """A peer of the bar `peers`.

    Args:
        make: with a folder, the model and its optimizer.
        promises: what a user has of it, beyond a file.
        syncs: what it says is written survives a power cut.
        package: what has to be installed.
    """

    make: Callable[[Path, nn.Module, torch.optim.Optimizer], Peer]
    promises: str
    syncs: bool = False
    package: str = "torch"

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _alone(make: Callable[[Path], Peer]) -> Callable[[Path, nn.Module, torch.optim.Optimizer], Peer]:
    return lambda folder, _, __: make(folder)


_IN_PARTS = "synced; other numbers of ranks can load it"
WAYS: Mapping[str, Way] = {
    "torch.save + fsync": Way(_alone(TorchSave), "synced, whole or not there; training waits", syncs=True),
    "DCP async_save, thread, kept staging memory": Way(_alone(partial(DcpAsync, cached=True)), _IN_PARTS, syncs=True),
    "DCP async_save, process": Way(_alone(partial(DcpAsync, process=True)), _IN_PARTS, syncs=True),
    "torch_checkpointing": Way(
        _alone(TorchCheckpointing),
        "whole or not there; other numbers of ranks can load it",
        package="torch_checkpointing",
    ),
    "torchsnapshot async_take": Way(
        _alone(TorchSnapshot), "other numbers of ranks can load it", package="torchsnapshot"
    ),
    "DLRover flash checkpoint": Way(
        _alone(FlashCheckpoint), "under `dlrover-run` the copy in memory outlives the trainer", package="dlrover"
    ),
    "Lightning's TorchCheckpointIO": Way(
        _alone(partial(LightningIO, asynchronous=False)), "whole or not there", package="lightning"
    ),
    "Lightning's AsyncCheckpointIO": Way(
        _alone(partial(LightningIO, asynchronous=True)), "whole or not there", package="lightning"
    ),
    "accelerator.save_state": Way(AccelerateState, "files that other tools read", package="accelerate"),
}
