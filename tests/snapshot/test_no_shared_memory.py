"""Where the system refuses shared memory, `save` says so at once with a code, and no writer stays behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.host_memory import shared_memory
from ckpt_engine.errors import CkptError, StateError
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.local import LocalStorage

REFUSALS = {errno.ENOSYS: "memfd_create", errno.EPERM: "memfd_create", errno.EMFILE: "ulimit -n", errno.ENOMEM: "slots"}
STATE = {"w": torch.ones(1000)}


def _refuse_from(call: int, code: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Refuse memory from this call on; returns what lifts that."""
    real, calls = os.memfd_create, 0

    def refuse(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, "memfd_create", refuse)
    return lambda: monkeypatch.setattr(os, "memfd_create", real)


@pytest.mark.cells(4)
@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("code", REFUSALS)
def test_each_save_says_what_is_refused_and_the_next_one_works_once_it_is_not(
    code: int, call: int, writer: Literal["process", "thread"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is the page that is shared with the writer, the second one the arena's first slot."""
    ckpt = Checkpointer(tmp_path, writer=writer)
    allow = _refuse_from(call, code, monkeypatch)
    for step in range(2):
        with pytest.raises(StateError, match=f"CKPT200.*cannot reserve.*{REFUSALS[code]}"):
            ckpt.save(STATE, step=step)
    if call == 1:
        acquire(LocalStorage(tmp_path)).release()  # no writer has the lease
    allow()
    assert ckpt.save(STATE, step=2).wait(60)
    ckpt.close()
    acquire(LocalStorage(tmp_path)).release()


def test_a_step_asks_for_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues where memory is refused: only what saves says so."""
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        allow = _refuse_from(1, errno.EMFILE, monkeypatch)
        for step in range(3):
            ckpt.engine.begin_step(step)
        allow()


def test_a_second_slot_that_is_refused_fails_its_own_snapshot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight becomes durable, and the first slot is used again."""
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        _refuse_from(3, errno.EMFILE, monkeypatch)
        first = ckpt.save(STATE, step=1)
        try:
            ckpt.save(STATE, step=2)
        except StateError as err:  # where the first one is not written yet
            assert "ulimit -n" in str(err)
        assert first.wait(60)
        assert ckpt.save(STATE, step=3).wait(60)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_prepare_says_it_and_keeps_no_slot(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either all slots are made ready, or none is, and no descriptor is left."""
    ckpt, before = Checkpointer(tmp_path, writer="thread"), _arena_files()
    allow = _refuse_from(call, errno.ENOMEM, monkeypatch)
    with pytest.raises(StateError, match="cannot reserve"):
        ckpt.prepare(STATE)
    assert _arena_files() <= before
    allow()
    ckpt.prepare(STATE)
    assert ckpt.save(STATE, step=1).wait(60)
    ckpt.close()


def test_a_descriptor_that_cannot_be_duplicated_leaves_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the writer is sent is duplicated for it: with too many open files that is refused after it has started."""
    ckpt, real = Checkpointer(tmp_path), os.dup
    monkeypatch.setattr(os, "dup", _no_more_files)
    with pytest.raises(CkptError, match="ulimit -n"):
        ckpt.save(STATE, step=1)
    acquire(LocalStorage(tmp_path), wait_seconds=30).release()
    monkeypatch.setattr(os, "dup", real)
    assert ckpt.save(STATE, step=2).wait(60)
    ckpt.close()


@pytest.mark.parametrize("name", ["ftruncate", "mmap"])
def test_memory_that_is_refused_later_leaves_no_descriptor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and its mapping are asked for after it is made."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    if name == "ftruncate":
        monkeypatch.setattr(os, "ftruncate", _no_more_files)
    else:
        monkeypatch.setattr("ckpt_engine.copy.host_memory._call_mmap", _no_more_files)
    with pytest.raises(StateError, match="cannot reserve"):
        shared_memory("test", 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _no_more_files(*_: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _arena_files() -> set[int]:
    """Descriptors of slots, those of other tests included."""
    links = {int(one.name): os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    return {fd for fd, target in links.items() if "ckpt-arena" in target}
