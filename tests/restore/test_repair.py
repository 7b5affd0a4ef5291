"""Damage to one of two copies while the state is read straight into live tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import NoUsableSnapshotError
from ckpt_engine.restore import load as restore
from ckpt_engine.store import names
from ckpt_engine.store.container import PIECE_BYTES
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.snapshot.passage import same

BIG = PIECE_BYTES // 4 + 100_000
"""Elements of a tensor that has two pieces."""


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(n, generator=generator) for name, n in {"a": 5000, "big": BIG, "z": 7}.items()}
    return {"model": tensors, "step": step, "text": "same in both"}


def blank() -> dict[str, Any]:
    return {"model": {name: torch.full_like(t, torch.nan) for name, t in state(1)["model"].items()}}


class Pair:
    """A run of two snapshots on two tiers, of which one or both get damaged."""

    def __init__(self, root: Path) -> None:
        self.tiers = [str(root / "near"), {"url": str(root / "far"), "keep": {"last": 9}}]
        self.root = root
        for step in (1, 2):
            with Checkpointer(tiers=self.tiers, keep={"last": 9}) as ckpt:
                ckpt.save(state(step), step=step).wait(30)
        self.ids = [parsed.id for parsed in Repository(LocalStorage(root / "far")).ids()]
        assert len(self.ids) == 2

    def data(self, place: str, number: int = -1) -> Path:
        return self.root / place / names.data_name(self.ids[number])

    def flip(self, place: str, entry: str, piece: int = 0) -> None:
        """Change the last bit of a piece."""
        found = Repository(LocalStorage(self.root / "far")).read(self.ids[-1]).entries[entry].pieces[piece]
        with self.data(place).open("r+b") as file:
            file.seek(found.offset + found.nbytes - 1)
            byte = file.read(1)[0]
            file.seek(found.offset + found.nbytes - 1)
            file.write(bytes([byte ^ 1]))

    def load(self, into: Any) -> restore.Loaded:
        where = [Repository(LocalStorage(self.root / name)) for name in ("near", "far")]
        found = restore.load(where, into=into)
        assert found is not None
        return found

    def url(self, place: str) -> str:
        return f"file://{self.root / place}"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def pointers(live: dict[str, Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in live["model"].values()]


@pytest.mark.cells(1)
@pytest.mark.parametrize(("entry", "piece"), [("model/a", 0), ("model/big", 0), ("model/big", 1), ("model/z", 0)])
def test_a_flipped_bit_near_is_mended_from_far_in_the_live_tensor(pair: Pair, entry: str, piece: int) -> None:
    """The tensor that lives gets the right bytes where it lies, and the report names tensor, bytes and both places."""
    pair.flip("near", entry, piece)
    live = blank()
    before = pointers(live)
    found = pair.load(live)
    assert found.info.step == 2
    assert same(found.state, state(2))
    assert same(live["model"], state(2)["model"])
    assert pointers(live) == before
    wrong = Repository(LocalStorage(pair.root / "far")).read(pair.ids[-1]).entries[entry].pieces[piece]
    assert [(r.entry, r.nbytes, r.bad, r.good) for r in found.repairs] == [
        (entry, wrong.nbytes, pair.url("near"), pair.url("far"))
    ]
    note, mends = found.notes
    by_hand = f"`ckpt repair {pair.root}/near --from {pair.root}/far`"
    assert mends == f"the next snapshot of this run mends that copy; if none is taken, run {by_hand}"
    assert entry in note and pair.url("far") in note and "do not match their digest" in note
    assert found.place == pair.url("near")
    assert found.rejected == ()


def test_the_checkpointer_says_it(pair: Pair) -> None:
    """As a user sees it: `load(into=...)` of a `Checkpointer` with tiers, and `loaded.repairs`."""
    pair.flip("near", "model/big", 1)
    live = blank()
    with Checkpointer(tiers=pair.tiers) as ckpt:
        assert same(ckpt.load(into=live), state(2))
        assert ckpt.loaded is not None
        assert [repair.entry for repair in ckpt.loaded.repairs] == ["model/big"]
        assert ckpt.loaded.state is None
    assert same(live["model"], state(2)["model"])


def test_other_tensors_are_damaged_in_each_copy(pair: Pair) -> None:
    """Together the two copies are whole."""
    pair.flip("near", "model/a")
    pair.flip("far", "model/big")
    pair.flip("near", "model/big", 1)
    live = blank()
    found = pair.load(live)
    assert same(live["model"], state(2)["model"])
    assert sorted(repair.entry or "" for repair in found.repairs) == ["model/a", "model/big"]


@pytest.mark.cells(1)
@pytest.mark.parametrize("keep", [0, 100, 4096, -1])
def test_a_truncated_near_file_leaves_the_work_to_far(pair: Pair, keep: int) -> None:
    """Whatever is left of it: the newest snapshot comes back whole, and the report says from where and why."""
    path = pair.data("near")
    path.write_bytes(path.read_bytes()[:keep])
    live = blank()
    found = pair.load(live)
    assert (found.info.step, found.place) == (2, pair.url("far"))
    assert same(live["model"], state(2)["model"])
    assert f"restored from {pair.url('far')}" in found.notes[0]
    assert "bytes instead of" in found.notes[1]


def test_a_missing_near_file_leaves_the_work_to_far(pair: Pair) -> None:
    """The manifest alone is no copy."""
    pair.data("near").unlink()
    live = blank()
    found = pair.load(live)
    assert (found.info.step, found.place) == (2, pair.url("far"))
    assert same(live["model"], state(2)["model"])
    assert "is missing" in found.notes[1]


def test_a_near_file_that_goes_while_it_is_read_is_mended_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention, or a disk that is unmounted, between the choice and the reading."""
    path, real = pair.data("near"), LocalStorage.get_into

    def get_into(self: LocalStorage, name: str, start: int, out: memoryview) -> None:
        if self.root.endswith("near"):
            path.unlink(missing_ok=True)
        real(self, name, start, out)

    monkeypatch.setattr(LocalStorage, "get_into", get_into)
    live = blank()
    found = pair.load(live)
    assert found.info.step == 2
    assert same(live["model"], state(2)["model"])
    assert {repair.good for repair in found.repairs} == {pair.url("far")}
    assert found.repairs[0].entry is None


def test_damage_in_all_copies_costs_the_snapshot(pair: Pair) -> None:
    """The older one fills the live tensors: nothing of the newer one stays in them. The report names the tensor."""
    for place in ("near", "far"):
        pair.flip(place, "model/big", 1)
    live = blank()
    found = pair.load(live)
    assert found.info.step == 1
    assert same(live["model"], state(1)["model"])
    (rejected,) = found.rejected
    assert (rejected.id, rejected.code) == (pair.ids[-1], "CKPT401")
    assert "model/big" in rejected.reason


def test_two_bad_copies_and_nothing_older(pair: Pair) -> None:
    """Nothing is usable, and the error says why for each snapshot."""
    for place in ("near", "far"):
        for number in (0, 1):
            pair.data(place, number).write_bytes(b"")
    with pytest.raises(NoUsableSnapshotError) as caught:
        pair.load(blank())
    assert all(one in caught.value.message for one in pair.ids)


def test_another_run_at_a_place_is_not_resumed_from(pair: Pair, tmp_path: Path) -> None:
    """A far place that holds another, longer run: it is left out and said, however new its snapshots are."""
    with Checkpointer(tmp_path / "other", keep={"last": 9}) as ckpt:
        for step in range(1, 6):
            ckpt.save(state(step), step=100 + step).wait(30)
    where = [Repository(LocalStorage(pair.root / "near")), Repository(LocalStorage(tmp_path / "other"))]
    found = restore.load(where)
    assert found is not None and found.info.step == 2
    assert [one.code for one in found.away] == ["CKPT402"]
    assert "is left out: [CKPT402]" in found.left_out[0] and "holds another run" in found.left_out[0]
