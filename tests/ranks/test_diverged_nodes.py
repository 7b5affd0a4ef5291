"""Ranks on nodes with disks of their own go back: the history of rollbacks is that of all nodes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CorruptError, DivergedError, RollbackRequestedError
from ckpt_engine.loop.diverging import Rollbacks
from ckpt_engine.preempt.divergence import RollbackRecord
from tests.ranks.node_roots.nodes import load_all, open_nodes
from tests.ranks.runs import on_all
from tests.ranks.test_checkpointer import close_all, save_all
from tests.ranks.test_diverging import LOST, End

NODES = ["a", "b"]
_log = logging.getLogger("test")


def opened(folder: Path, at_most: int = 2) -> list[Checkpointer]:
    """One rank on each node; whole snapshots go to a tier that both see."""
    options: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 5, "at_most": at_most}, "keep": {"last": 100}}
    return open_nodes(folder, NODES, 1, further=[str(folder / "far")], **options)


def diverged(engines: list[Checkpointer]) -> DivergedError:
    """All end at the same step, of which rank 1 has lost the loss."""
    ends = [End(engine) for engine in engines]
    errors = on_all(lambda rank: ends[rank].together(LOST if rank == 1 else None), 2)
    assert {str(error) for error in errors} == {str(errors[0])}
    return errors[0]


def remembered(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / name / "rollback.json").read_text()) for name in NODES]


def pending(engines: list[Checkpointer], newest: str) -> list[RollbackRecord | None]:
    return on_all(lambda rank: Rollbacks(engines[rank].engine, _log).pending(newest), 2)


@pytest.mark.long
def test_a_new_node_of_rank_0_does_not_begin_the_history_again(tmp_path: Path) -> None:
    """It has no part of any snapshot, and whole ones from the further tier: the others know what happened before."""
    engines = opened(tmp_path)
    for step in (1, 2):
        save_all(engines, step)
    assert isinstance(diverged(engines), RollbackRequestedError)
    close_all(engines)
    shutil.rmtree(tmp_path / "a")
    engines = opened(tmp_path)
    on_all(lambda rank: engines[rank].engine.start(), 2)
    load_all(engines)
    error = diverged(engines)
    assert isinstance(error, RollbackRequestedError)
    assert "rollback 2 of 2" in str(error) and "resumes at step 1 " in str(error)
    close_all(engines)
    first, second = remembered(tmp_path)
    assert first == second and first["count"] == 2
    engines = opened(tmp_path)
    on_all(lambda rank: engines[rank].engine.start(), 2)
    load_all(engines)
    assert "rolled back 2 times already" in str(diverged(engines))
    close_all(engines)


def test_of_what_nodes_remember_that_of_this_start_counts(tmp_path: Path) -> None:
    """It is of the snapshot that is the newest now; else it is the one with most rollbacks."""
    engines = opened(tmp_path)
    save_all(engines, 1)
    rows = [RollbackRecord("s", 1, newest, 3, 5, count, "why", 2) for newest, count in (("now", 1), ("lost since", 2))]
    for name, row in zip(NODES, rows, strict=True):
        text = {field: getattr(row, field) for field in RollbackRecord.__slots__}
        (tmp_path / name / "rollback.json").write_text(json.dumps(text))
    assert pending(engines, "now") == [rows[0]] * 2
    assert pending(engines, "lost since") == [rows[1]] * 2
    assert pending(engines, "another") == [None] * 2
    close_all(engines)


def test_a_damaged_one_is_reported_with_its_node(tmp_path: Path) -> None:
    """The folder has the same name on all nodes, and removing one file is not forgetting the rollback."""
    engines = opened(tmp_path)
    save_all(engines, 1)
    (tmp_path / "b" / "rollback.json").write_text("{")
    with pytest.raises(CorruptError, match="remove it there, on b: others may have it; or on all nodes"):
        pending(engines, "any")
    close_all(engines)
