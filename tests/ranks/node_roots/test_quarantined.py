"""What a node has noted as damaged is passed over by a load of all ranks, as by a load alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.node_roots.nodes import check_all, open_nodes
from tests.ranks.node_roots.test_restore import NODES, saved
from tests.ranks.test_checkpointer import close_all


def note(folder: Path, node: str) -> tuple[str, str]:
    """Note the newest snapshot of a node; its id, and the file that is named."""
    place = Repository(open_storage(folder / node))
    newest = place.ids()[-1].id
    file = place.files_of(newest)[0]
    place.damage.note(newest, {file})
    return newest, file


@pytest.mark.parametrize("noting", [("n0",), ("n1",), NODES])
def test_the_one_before_is_loaded_by_all(tmp_path: Path, noting: tuple[str, ...]) -> None:
    """Whichever node has the note; the reason names its file, and is said once."""
    saved(tmp_path)
    noted = [note(tmp_path, node) for node in noting]
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 1)
    loaded = again[0].loaded
    assert loaded is not None
    (rejected,) = loaded.rejected
    assert rejected.id == noted[0][0]
    assert rejected.reason in [f"{file} was found damaged, and nothing mends it" for _, file in noted]
    close_all(again)


def test_where_all_are_noted_the_newest_is_loaded_if_it_is_whole(tmp_path: Path) -> None:
    """It is the last resort, and not lost."""
    saved(tmp_path, (1,))
    note(tmp_path, "n1")
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 1)
    assert again[0].loaded is not None and again[0].loaded.rejected == ()
    close_all(again)


def test_a_further_tier_that_has_it_whole_serves_it(tmp_path: Path) -> None:
    """To the ranks of both nodes."""
    further = [str(tmp_path / "shared")]
    saved(tmp_path, further=further)
    note(tmp_path, "n1")
    again = open_nodes(tmp_path, NODES, 2, further=further)
    check_all(again, 2)
    assert [ckpt.loaded.place for ckpt in again if ckpt.loaded is not None] == [(tmp_path / "shared").as_uri()] * 4
    close_all(again)


def test_a_note_that_is_removed_counts_no_more(tmp_path: Path) -> None:
    """A scrub that finds it whole removes it."""
    saved(tmp_path)
    newest, _ = note(tmp_path, "n1")
    (tmp_path / "n1" / names.quarantine_name(newest)).unlink()
    again = open_nodes(tmp_path, NODES, 2)
    check_all(again, 2)
    close_all(again)
