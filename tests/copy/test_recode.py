"""Copies that are stored encoded: bit for bit the same state, visible only when whole, shared where nothing changed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt_engine import Checkpointer
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import collect
from ckpt_engine.copy.transfer import CopySourceError, RunText, adopt_run, copy_snapshot
from ckpt_engine.copy.write_plan import plan
from ckpt_engine.errors import StorageError, StorageMissingError
from ckpt_engine.restore.load import load
from ckpt_engine.store import codecs, names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import RAW
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.cli.conftest import Outcome
from tests.copy.scattered import Scatter, with_flip
from tests.snapshot.passage import same
from tests.store.test_transfer import Remote
from tests.support.bounds import bounds
from tests.support.copies import copy_encoded


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """A codec with a base, in which sources may be stored."""
    with_flip()
    yield
    codecs.codec._known.pop("flip")


def state(seed: int, frozen: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {f"t{n}": torch.randn(n, generator=generator) for n in (1, 7, 300, 5000)}
    tensors["half"] = torch.randn(40, 300, generator=generator).bfloat16()
    tensors["zeros"] = torch.zeros(3000, dtype=torch.int64)
    tensors["none"] = torch.empty(0, 4)
    still = torch.randn(60_000, generator=torch.Generator().manual_seed(frozen))
    return {"model": tensors, "frozen": still, "step": seed}


def run_of(root: Path, *steps: int) -> Repository:
    with Checkpointer(str(root), keep={"last": 99}, writer="thread") as ckpt:
        for step in steps:
            ckpt.save(state(step), step=step).wait(60)
    return Repository(LocalStorage(root))


def far_of(near: Repository, root: Path) -> Repository:
    return adopt_run(RunText.of(near), LocalStorage(root))


def encoded(near: Repository, far: Repository, snapshot: str, codec: str = "byteplane-zstd", **more: Any) -> Any:
    return copy_encoded(near, far, snapshot, lambda _: codec, EncodeStats(), **more)


def restored(root: Path, step: int) -> bool:
    found = load([Repository(LocalStorage(root))], step=step)
    assert found is not None
    return same(found.state, state(step))


def data_names(far: Repository) -> set[str]:
    return {item.name for item in far.storage.list(names.DATA)}


def needed(far: Repository) -> set[str]:
    return {file.name for info in far.list() for file in far.read(info.id).files}


@pytest.mark.parametrize("codec", ["zstd", "byteplane-zstd", RAW])
def test_the_far_copy_alone_gives_the_same_state(codec: str, tmp_path: Path) -> None:
    """Encoded pieces are in the manifest with both digests; what does not pay is stored as it is."""
    near = run_of(tmp_path / "near", 1)
    far = far_of(near, tmp_path / "far")
    [parsed] = near.ids()
    done = encoded(near, far, parsed.id, codec)
    manifest = far.read(parsed.id)
    assert done.sent_bytes == sum(file.nbytes for file in manifest.files)
    assert manifest.info == near.read(parsed.id).info
    pieces = [piece for entry in manifest.entries.values() for piece in entry.pieces]
    assert {piece.codec for piece in pieces} == {RAW, codec}
    assert all(piece.raw_digest and piece.nbytes < piece.raw_nbytes for piece in pieces if piece.codec != RAW)
    assert restored(tmp_path / "far", 1)
    assert encoded(near, far_of(near, tmp_path / "other"), parsed.id, codec) == done
    for file in manifest.files:
        with safe_open(tmp_path / "far" / file.name, "pt") as opened:
            assert opened.keys()


@settings(max_examples=settings.default.max_examples // 33)
@given(seed=st.integers(0, 10**6), part_bytes=st.sampled_from([1, 3000, 50_000, 1 << 27]))
def test_random_layouts_come_back(seed: int, part_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """However a snapshot is cut, encoded and based at its source, and however small the parts are."""
    root = tmp_path_factory.mktemp("law")
    near = run_of(root / "near", 1, 2)
    _, newest = near.ids()
    Scatter(near, seed).rewrite(newest.id)
    near = Repository(LocalStorage(root / "near"))
    far = far_of(near, root / "far")
    codec = random.Random(seed).choice(["zstd", "byteplane-zstd"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("ENCODED", part_bytes=part_bytes))
        for parsed in near.ids():
            encoded(near, far, parsed.id, codec)
    assert restored(root / "far", 1)
    assert restored(root / "far", 2)


def test_what_has_not_changed_is_sent_once(tmp_path: Path) -> None:
    """A later copy refers to what an older one wrote, and outlives it."""
    near = run_of(tmp_path / "near", 1, 2, 3)
    far = far_of(near, tmp_path / "far")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("ENCODED", part_bytes=240_000))  # the frozen tensor has a part of its own
        first, second, third = [encoded(near, far, parsed.id) for parsed in near.ids()]
    assert second.sent_bytes < first.sent_bytes / 2
    assert third.sent_bytes < first.sent_bytes / 2
    assert {names.data_owner(name).id for name in needed(far)} >= {near.ids()[0].id}  # type: ignore[union-attr]
    with acquire(far.storage) as lease:
        far.forget([parsed.id for parsed in far.ids()[:2]])
        collect(far, lease)
    assert data_names(far) == needed(far)
    assert restored(tmp_path / "far", 3)


def test_a_file_of_which_little_is_needed_is_not_kept_for_it(tmp_path: Path) -> None:
    """What lies unchanged in it moves once to a file of its own, and stays there."""
    near = run_of(tmp_path / "near", 1)
    with Checkpointer(str(tmp_path / "near"), keep={"last": 99}, writer="thread") as ckpt:
        for step in (2, 3):
            ckpt.save({**state(step), "more": torch.randn(200_000)}, step=step).wait(60)
            ckpt.save({**state(step + 10), "more": torch.randn(200_000)}, step=step + 10).wait(60)
    near = Repository(LocalStorage(tmp_path / "near"))
    far = far_of(near, tmp_path / "far")
    done = [encoded(near, far, parsed.id) for parsed in near.ids()[1:]]
    still = [far.read(parsed.id).entries["frozen"].pieces[0] for parsed in far.ids()]
    owners = [far.read(i.id).files[p.file].name for i, p in zip(far.ids(), still, strict=True)]
    assert len(set(owners)) == 2, "moved once"
    assert owners[1] == owners[2] == owners[3]
    assert done[3].sent_bytes < done[1].sent_bytes


def test_the_manifest_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails, no snapshot is there that is not whole; the next attempt sends only what is missing."""
    monkeypatch.setattr(*bounds("ENCODED", part_bytes=60_000))
    near = run_of(tmp_path / "near", 1)
    [parsed] = near.ids()
    whole = encoded(near, far_of(near, tmp_path / "whole"), parsed.id).sent_bytes
    for failing in range(4):
        puts: list[str] = []

        def before(what: str, name: str, puts: list[str] = puts, failing: int = failing) -> None:
            if what == "put":
                if len(puts) == failing:
                    raise StorageError("broken")
                puts.append(name)

        root = tmp_path / f"far{failing}"
        far_of(near, root)
        target = Repository(Remote(root, before))
        with pytest.raises(StorageError, match="broken"):
            encoded(near, target, parsed.id)
        assert target.ids() == ()
        again = Repository(LocalStorage(root))
        done = encoded(near, again, parsed.id)
        assert done.sent_bytes + done.present_bytes == whole
        assert (done.present_bytes > 0) == (failing > 0)
        assert data_names(again) == needed(again)
        assert restored(root, 1)


def test_damage_does_not_spread(tmp_path: Path) -> None:
    """A flipped bit at the source stops the copy, and it is the source that is blamed."""
    near = run_of(tmp_path / "near", 1)
    far = far_of(near, tmp_path / "far")
    [parsed] = near.ids()
    flip(tmp_path / "near" / near.read(parsed.id).files[0].name, -50)
    with pytest.raises(CopySourceError):
        encoded(near, far, parsed.id)
    assert far.ids() == ()


def test_damage_at_the_far_place_is_noticed(tmp_path: Path) -> None:
    """An encoded piece that rots is not used: another place has the snapshot, or an older one is taken."""
    near = run_of(tmp_path / "near", 1, 2)
    far = far_of(near, tmp_path / "far")
    one, two = near.ids()
    encoded(near, far, one.id)
    encoded(near, far, two.id)
    manifest = far.read(two.id)
    piece = next(p for entry in manifest.entries.values() for p in entry.pieces if p.codec != RAW and p.nbytes > 99)
    assert names.data_owner(manifest.files[piece.file].name) == two
    flip(tmp_path / "far" / manifest.files[piece.file].name, piece.offset + 60)
    found = load([Repository(LocalStorage(tmp_path / "far"))])
    assert found is not None
    assert found.state["step"] == 1
    both = load([Repository(LocalStorage(tmp_path / "far")), Repository(LocalStorage(tmp_path / "near"))])
    assert both is not None
    assert same(both.state, state(2))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_is_referred_to_must_still_be_there(tmp_path: Path) -> None:
    """If somebody forgets the older snapshot while a copy is under way, the copy fails, and nothing is visible."""
    near = run_of(tmp_path / "near", 1, 2)
    far = far_of(near, tmp_path / "far")
    one, two = near.ids()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("ENCODED", part_bytes=240_000))
        encoded(near, far, one.id)

    class Forgetting(LocalStorage):
        def put(self, name: str, blocks: Any, *, exclusive: bool = True) -> None:
            super().put(name, blocks, exclusive=exclusive)
            other = Repository(LocalStorage(tmp_path / "far"))
            with acquire(other.storage) as lease:
                other.forget([parsed.id for parsed in other.ids()])
                collect(other, lease, in_flight=[two.id])

    with pytest.raises(StorageMissingError, match="removed while a copy"):
        encoded(near, Repository(Forgetting(tmp_path / "far")), two.id)
    assert far.ids() == ()
    encoded(near, far, two.id)
    assert restored(tmp_path / "far", 2)


def test_what_is_planned_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy never writes more than room is made for, not even if nothing can be encoded."""
    near = run_of(tmp_path / "near", 1, 2)
    for part_bytes in (1, 1 << 27):
        monkeypatch.setattr(*bounds("ENCODED", part_bytes=part_bytes))
        for codec in ("zstd", "byteplane-zstd", RAW):
            far = far_of(near, tmp_path / f"{codec}-{part_bytes}")
            for parsed in near.ids():
                text = near.storage.get(names.manifest_name(parsed.id))
                most = plan(near.read(parsed.id), far).most_bytes(text)
                sent = encoded(near, far, parsed.id, codec).sent_bytes
                [written] = far.storage.list(names.manifest_name(parsed.id))
                assert sent + written.nbytes <= most


def test_copies_between_places_that_store_differently(tmp_path: Path, ckpt: Any) -> None:
    """`ckpt cp` takes an encoded copy as it is, also to where older snapshots are stored plainly."""
    near = run_of(tmp_path / "near", 1, 2)
    far, third = far_of(near, tmp_path / "far"), far_of(near, tmp_path / "third")
    one, two = near.ids()
    encoded(near, far, one.id)
    encoded(near, far, two.id)
    copy_snapshot(near, third, one.id)
    outcome: Outcome = ckpt("cp", str(tmp_path / "far"), str(tmp_path / "third"))
    assert outcome.code == 0, outcome
    assert restored(tmp_path / "third", 1)
    assert restored(tmp_path / "third", 2)
    assert ckpt("verify", str(tmp_path / "third")).code == 0
    back = far_of(near, tmp_path / "back")
    encoded(third, back, two.id, "zstd")
    assert restored(tmp_path / "back", 2)
