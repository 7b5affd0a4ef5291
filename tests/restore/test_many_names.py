"""A manifest with very many names costs what its pieces refer to, however often it says a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import Entry
from ckpt_engine.store.storage.local import LocalStorage
from tests.support.forged import forge

MANY = 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two snapshots; the newest is what is changed."""
    with Checkpointer(tmp_path, writer="thread", keep={"last": 2}) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.arange(512.0), "step": step}, step=step).wait(30)
    return tmp_path


def named_again(body: dict[str, Any]) -> None:
    body["files"] *= MANY


def never_used(body: dict[str, Any]) -> None:
    name = body["files"][0]["name"]
    body["files"] += [{"name": name.replace("-r00000", f"-r{n:05d}"), "nbytes": 9} for n in range(1, MANY)]


def of_many_ranks(body: dict[str, Any]) -> None:
    """As many ranks as there can be have written nothing."""
    never_used(body)
    body["world"]["size"] = MANY - 2


def two_sizes(body: dict[str, Any]) -> None:
    body["files"].append({**body["files"][0], "nbytes": 9})


@pytest.mark.parametrize("change", [never_used, of_many_ranks, two_sizes], ids=lambda one: one.__name__)
def test_files_that_no_piece_lies_in_are_refused(root: Path, change: Any) -> None:
    """More of them than there are ranks; the next older snapshot is loaded."""
    forge(root, change)
    ckpt = Checkpointer(root)
    state = ckpt.load()
    assert state is not None and state["step"] == 1
    assert ckpt.loaded is not None and ckpt.loaded.rejected[0].code == "CKPT401"
    assert CliRunner().invoke(commands, ["verify", str(root)]).exit_code == 1


@pytest.mark.parametrize("split", [False, True], ids=["one piece", "a piece for each name"])
def test_a_file_that_is_named_often_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """Several ranks may name one file; reading it takes as many requests as if one did."""

    def cut(body: dict[str, Any]) -> None:
        named_again(body)
        [piece] = body["entries"]["w"]["pieces"]
        if split:
            data = (root / body["files"][0]["name"]).read_bytes()
            ends = range(piece["offset"], piece["offset"] + piece["nbytes"], 8)
            body["entries"]["w"]["pieces"] = [
                {"file": n, "offset": at, "nbytes": 8, "digest": digest(data[at : at + 8])} for n, at in enumerate(ends)
            ]

    forge(root, cut)
    asked = list[str]()
    for name in ("get", "get_into"):
        before = getattr(LocalStorage, name)

        def counted(self: Any, name: str, *rest: Any, _before: Any = before, **more: Any) -> Any:
            asked.append(name)
            return _before(self, name, *rest, **more)

        monkeypatch.setattr(LocalStorage, name, counted)
    state = Checkpointer(root).load()
    assert state is not None and torch.equal(state["w"], torch.arange(512.0))
    assert CliRunner().invoke(commands, ["verify", str(root)]).exit_code == 0
    assert len([name for name in asked if name.startswith("data/")]) < 20


def test_a_piece_of_a_group_is_found_without_a_search(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of many pieces that are encoded together is looked through once, and not once for each of them."""
    looked = list[str]()
    before = Entry.placed

    def counted(self: Entry) -> Any:
        looked.append(self.dtype)
        return before(self)

    def cut(body: dict[str, Any]) -> None:
        [piece] = body["entries"]["w"]["pieces"]
        pieces = [
            {**piece, "offset": piece["offset"] + 4 * n, "nbytes": 4, "codec": "adam", "base": "b", "group": ["w"]}
            for n in range(512)
        ]
        body["entries"]["w"]["pieces"] = pieces
        plain = [{"file": 0, "offset": one["offset"], "nbytes": 4, "digest": "x"} for one in pieces]
        body["bases"] = {"b": {"w": [{"start": 4 * n, **one} for n, one in enumerate(plain)]}}

    forge(root, cut)
    monkeypatch.setattr(Entry, "placed", counted)
    assert CliRunner().invoke(commands, ["verify", str(root)]).exit_code == 1
    assert len(looked) < 20
