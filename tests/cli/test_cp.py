"""`ckpt cp`: a run at another place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage

Ckpt = Callable[..., Any]


@pytest.fixture
def ids(run_folder: Any, arrays: Any) -> list[str]:
    return [run_folder.add(step, arrays) for step in (10, 20, 30)]


def files(root: Path) -> dict[str, bytes]:
    skip = {names.LEASE}
    return {
        name: p.read_bytes() for p in root.rglob("*") if p.is_file() and (name := str(p.relative_to(root))) not in skip
    }


def test_a_run_is_copied_whole(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """Byte for byte, pins included; a second time there is nothing to do."""
    pins.pin(run_folder.repository, ids[0], "thesis")
    done = ckpt("cp", run_folder.path, tmp_path / "copy")
    assert done.code == 0
    assert done.out.startswith(f"3 snapshots copied to {tmp_path / 'copy'}, ")
    assert files(tmp_path / "copy") == files(run_folder.path)
    again = ckpt("cp", run_folder.path, tmp_path / "copy", "--json")
    assert again.code == 0
    assert again.json == {
        "source": f"file://{run_folder.path}",
        "target": f"file://{tmp_path / 'copy'}",
        "copied": [],
        "present": 3,
        "sent_bytes": 0,
        "partial": {},
        "failed": [],
        "away": [],
    }


def test_some_snapshots_are_copied(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """An id, a step or `latest` chooses the snapshots."""
    done = ckpt("cp", run_folder.path, tmp_path / "copy", "--snapshot", "latest", "--snapshot", "10", "--json")
    assert done.json["copied"] == [ids[2], ids[0]]
    assert [one.id for one in Repository(LocalStorage(tmp_path / "copy")).list()] == [ids[0], ids[2]]


def test_an_interrupted_copy_goes_on(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest snapshot is there first, and the same command sends only what is missing."""
    real, puts = LocalStorage.put, []

    def put(self: LocalStorage, name: str, *rest: Any, **more: Any) -> None:
        if name.startswith(("data/", "snapshots/")):
            if len(puts) == 3:
                raise StorageError("the cable is out")
            puts.append(name)
        real(self, name, *rest, **more)

    monkeypatch.setattr(LocalStorage, "put", put)
    broken = ckpt("cp", run_folder.path, tmp_path / "copy")
    assert broken.code == 2 and "the cable is out" in broken.err
    assert [one.id for one in Repository(LocalStorage(tmp_path / "copy")).list()] == [ids[2]]
    monkeypatch.setattr(LocalStorage, "put", real)
    whole = sum(run_folder.data_file(one).stat().st_size for one in ids)
    done = ckpt("cp", run_folder.path, tmp_path / "copy", "--json")
    assert done.json["copied"] == [ids[1], ids[0]]
    assert done.json["sent_bytes"] == whole // 3
    assert files(tmp_path / "copy") == files(run_folder.path)


def test_damage_stays_where_it_is(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """A damaged snapshot is named and left out; the exit code says so."""
    run_folder.flip(ids[1], "optimizer/exp_avg")
    done = ckpt("cp", run_folder.path, tmp_path / "copy")
    assert done.code == 1
    assert f"{ids[1]}  not copied: [CKPT401]" in done.out
    assert [one.id for one in Repository(LocalStorage(tmp_path / "copy")).list()] == [ids[0], ids[2]]


def test_what_must_not_be_written_is_refused(
    ckpt: Ckpt, run_folder: Any, ids: list[str], arrays: Any, tmp_path: Path
) -> None:
    """A place with another run, one that somebody writes, foreign files, and no run to copy."""
    other = type(run_folder)(tmp_path / "other")
    other.add(1, arrays)
    before = files(other.path)
    refused = ckpt("cp", run_folder.path, other.path)
    assert (refused.code, refused.out) == (2, "") and "holds another run" in refused.err
    assert files(other.path) == before
    with acquire(LocalStorage(tmp_path / "held")):
        refused = ckpt("cp", run_folder.path, tmp_path / "held")
    assert refused.code == 2 and "[CKPT500]" in refused.err
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").touch()
    assert "[CKPT402]" in ckpt("cp", run_folder.path, tmp_path / "thesis").err
    assert "[CKPT303]" in ckpt("cp", tmp_path / "nothing", tmp_path / "copy").err
