"""dcp.save and dcp.load with real ranks: every layout, every number of ranks, and ranks that die in a save."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.interop.dcp.rank import whole
from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.interop.dcp.rank")
    yield made
    made.close()


def run(launcher: Launcher, folder: Path, size: int, verb: str, **job: Any) -> list[int]:
    """The exit statuses of the ranks, which must be 0 unless one of them is to die."""
    log = folder / "log"
    launcher.start({"verb": verb, "root": str(folder / "run"), **job}, size, log)
    statuses = launcher.join()
    if job.get("writer") != "dying":
        assert statuses == [0] * size, "\n".join(path.read_text()[-3000:] for path in folder.glob("log.*"))
    return statuses


def ids(folder: Path) -> list[int]:
    return [parsed.step for parsed in Repository(open_storage(folder / "run")).ids()]


def data_bytes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (folder / "run" / "data").iterdir() if path.name[0] != "."}


def test_two_ranks_save_and_load_every_layout(launcher: Launcher, tmp_path: Path) -> None:
    """Rows, columns, uneven and missing shards, plain tensors and values come back exactly; both ranks have written."""
    run(launcher, tmp_path, 2, "save", steps=[5, 6])
    run(launcher, tmp_path, 2, "load", steps=[None, 5], newest=6)
    assert ids(tmp_path) == [5, 6]
    assert len(data_bytes(tmp_path)) == 4


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_any_number_of_ranks_loads_what_any_other_has_saved(launcher: Launcher, tmp_path: Path, saved: int) -> None:
    """1, 2 and 4 ranks read what 1, 2 or 4 ranks have written, and one process reads it with Checkpointer."""
    run(launcher, tmp_path, saved, "save", steps=[3])
    for size in (1, 2, 4):
        run(launcher, tmp_path, size, "load", steps=[3])
    state = Checkpointer(tmp_path / "run").load()
    assert state is not None
    for name, wanted in whole(3).items():
        assert torch.equal(state["model"][name], wanted), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fsdp2_goes_on_exactly(launcher: Launcher, tmp_path: Path, size: int) -> None:
    """A model and its optimizer under FSDP2, loaded into another model, train on to the same bits."""
    run(launcher, tmp_path, size, "fsdp")


@pytest.mark.parametrize("size", [2, 4])
def test_the_engine_and_dcp_read_what_the_other_has_saved(launcher: Launcher, tmp_path: Path, size: int) -> None:
    """DTensors in every layout, both ways."""
    run(launcher, tmp_path, size, "engine")


@pytest.mark.skipif(not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="this torch has threads only")
@pytest.mark.parametrize("how", ["thread", "process"])
def test_async_save_in_a_thread_and_in_a_process(launcher: Launcher, tmp_path: Path, how: str) -> None:
    """dcp.async_save runs the writer behind training, in a thread or in a process of its own."""
    run(launcher, tmp_path, 2, "save", steps=[1, 2, 3], how=how)
    run(launcher, tmp_path, 2, "load", steps=[1, 2, 3])


def test_a_planner_that_caches_its_plans_writes_new_files(launcher: Launcher, tmp_path: Path) -> None:
    """With plan caching DCP hands out the plan of an earlier save again: its data files are left alone."""
    run(launcher, tmp_path, 2, "save", steps=[1, 2, 3], caching=True)
    run(launcher, tmp_path, 2, "load", steps=[1, 2, 3])
    assert len(data_bytes(tmp_path)) == 6


@pytest.mark.parametrize("where", ["write 0", "write 1", "written 0", "written 1", "finish", "finished"])
def test_a_rank_killed_in_a_save_leaves_it_absent_or_whole(launcher: Launcher, tmp_path: Path, where: str) -> None:
    """kill -9 at every point: what was there stays, the new one is absent unless committed, the next save works."""
    run(launcher, tmp_path, 2, "save", steps=[1])
    statuses = run(launcher, tmp_path, 2, "save", steps=[2], writer="dying", where=where)
    assert -signal.SIGKILL in statuses
    there = [1, 2] if where == "finished" else [1]
    assert ids(tmp_path) == there
    run(launcher, tmp_path, 2, "load", steps=there)
    run(launcher, tmp_path, 2, "save", steps=[3])
    run(launcher, tmp_path, 2, "load", steps=[*there, 3])
    assert len(data_bytes(tmp_path)) == 2 * len([*there, 3]), "what the killed ranks have written is still there"


def test_a_rank_that_fails_makes_the_snapshot_absent_and_the_next_save_works(
    launcher: Launcher, tmp_path: Path
) -> None:
    """All ranks raise, nothing is committed, and the same processes save again right away."""
    run(launcher, tmp_path, 2, "save", steps=[4], writer="failing")
    assert ids(tmp_path) == [5]
    run(launcher, tmp_path, 2, "load", steps=[5])


def test_retention_applies_after_each_save(launcher: Launcher, tmp_path: Path) -> None:
    """`keep` removes older snapshots and their data; without it everything stays."""
    run(launcher, tmp_path, 2, "save", steps=[1, 2, 3], options={"keep": {"last": 1}})
    assert ids(tmp_path) == [3]
    assert len(data_bytes(tmp_path)) == 2
