"""Reading a snapshot costs a multiple of its size, whatever its manifest says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from ckpt_engine import Checkpointer
from ckpt_engine.copy.memory_limits import MemoryLimit
from ckpt_engine.errors import CorruptError, FormatError
from ckpt_engine.restore import read
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.store import container, manifest_codec
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.decode import BufferPool, GroupDecoder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.support.forged import forge, newest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two snapshots; the newest is what is changed."""
    with Checkpointer(tmp_path, writer="thread", keep={"last": 2}) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.arange(512.0), "step": step}, step=step).wait(30)
    return tmp_path


def refused(root: Path) -> str:
    """Why the newest manifest is refused; the snapshot before it is loaded instead."""
    checkpointer = Checkpointer(root)
    state = checkpointer.load()
    assert state is not None and state["step"] == 1
    assert checkpointer.loaded is not None
    (rejected,) = checkpointer.loaded.rejected
    return rejected.reason


def the_piece(body: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = body["entries"]["w"]["pieces"][0]
    return piece


def test_a_piece_that_would_be_larger_than_16_mib_is_not_decoded(root: Path) -> None:
    """A few hundred bytes of a frame can stand for gigabytes of zeros."""
    frame = zstandard.ZstdCompressor().compress(bytes(2 * PIECE_BYTES))

    def change(body: dict[str, Any]) -> None:
        path = root / body["files"][0]["name"]
        data = path.read_bytes()
        path.write_bytes(data + frame)
        body["files"][0]["nbytes"] = len(data) + len(frame)
        piece = {"offset": len(data), "nbytes": len(frame), "digest": digest(frame), "codec": "zstd"}
        the_piece(body).update(piece, raw_nbytes=2 * PIECE_BYTES)
        body["entries"]["w"]["shape"] = [2 * PIECE_BYTES // 4]

    forge(root, change)
    assert "cannot have 33554432 bytes" in refused(root)


def test_the_same_bytes_are_not_read_again_and_again(root: Path) -> None:
    """Pieces that overlap would have a small file read, and digested, as often as they are named."""
    forge(root, lambda body: body["entries"].update({f"w{n}": body["entries"]["w"] for n in range(40)}))
    assert "name 83968 bytes of files that have" in refused(root)


def test_aliases_take_memory_of_their_own(root: Path) -> None:
    """They may be many: what bounds them is the memory of their arrays, which no two share."""
    alias = {f"w{n}": None for n in range(40)}

    def change(body: dict[str, Any]) -> None:
        piece = {**the_piece(body), "alias": True}
        body["entries"].update({name: {**body["entries"]["w"], "pieces": [piece]} for name in alias})
        body["tree"].update({name: {"$": "tensor", "entry": name} for name in alias})

    forge(root, change)
    state = Checkpointer(root).load()
    assert state is not None and state["step"] == 2
    state["w0"].zero_()
    assert all(torch.equal(state[name], torch.arange(512.0)) for name in ["w", *alias][2:])


def test_a_file_that_is_named_twice_is_read_once(root: Path) -> None:
    """It is there, with the size it must have, and nothing is wrong."""
    forge(root, lambda body: body["files"].append(body["files"][0]))
    state = Checkpointer(root).load()
    assert state is not None and state["step"] == 2


def test_what_does_not_fit_into_memory_is_refused_before_it_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of zeros is small on disk: what counts is the memory that is left."""
    monkeypatch.setattr(read, "UNASKED_BYTES", 1000)
    monkeypatch.setattr(read.memory_limits, "look", lambda: MemoryLimit(1500, "the limit of a test"))
    manifest = Repository(LocalStorage(root)).read(newest(root).stem)
    with pytest.raises(FormatError, match="the limit of a test"):
        read.read_entries(Sources([LocalStorage(root)]), manifest)


def test_leaves_that_share_an_entry_cost_no_memory_each() -> None:
    """Bytes, parameters and strided tensors are made once for all leaves that name them."""
    strided = {"$": "tensor", "entry": "s", "stride": [1, 2]}
    nodes = [{"$": "bytes", "entry": "w"}, {"$": "bytearray", "entry": "w"}, strided,
             {**strided, "parameter": {"requires_grad": True, "more": 1}}]  # fmt: skip
    entries = {"w": torch.arange(9, dtype=torch.uint8), "s": torch.randn(2, 3)}
    one, other = Rebuilder(entries).state({"a": nodes, "b": [dict(node) for node in nodes]}).values()
    assert all(a is b for a, b in zip(one, other, strict=True))
    assert one[3].data_ptr() == one[2].data_ptr(), "a parameter and a tensor that shared memory do so again"
    with pytest.raises(FormatError, match="another form"):
        Rebuilder({"s": torch.randn(2, 3, 1)}).state(
            {"a": [{"$": "tensor", "entry": "s", "stride": [1, 2, step]} for step in (1, 2)]}
        )


def test_groups_of_groups_do_not_take_for_ever(root: Path) -> None:
    """What is decoded is counted: groups could be arranged so that each has to be made again for each."""
    manifest = Repository(LocalStorage(root)).read(newest(root).stem)
    groups = GroupDecoder(manifest, lambda *_: None, lambda *_: None, BufferPool())
    groups._count(8 * 2048)
    with pytest.raises(CorruptError, match="as long to decode"):
        groups._count(1)


def test_sizes_of_dtypes_are_those_of_torch() -> None:
    """What is checked without torch is what torch does."""
    names = {str(one).removeprefix("torch."): one.itemsize for one in vars(torch).values() if type(one) is torch.dtype}
    known = {name: container.item_bytes(name) for name in names}
    assert {name: size for name, size in known.items() if size is not None} == {
        name: size for name, size in names.items() if known[name] is not None
    }
    assert known.keys() - {name for name, size in known.items() if size is not None} <= {"bit"}


def test_views_of_several_dtypes_at_an_odd_address_come_back(tmp_path: Path) -> None:
    """Memory is stored from an address on at which each view is aligned."""
    memory = torch.arange(64, dtype=torch.uint8)
    state = {"bytes": memory[5:40], "floats": memory[8:24].view(torch.float32)}
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.save(state, step=1).wait(30)
    back = Checkpointer(tmp_path).load()
    assert back is not None
    assert torch.equal(back["bytes"], state["bytes"])
    assert torch.equal(back["floats"].view(torch.uint8), state["floats"].view(torch.uint8))


def test_a_manifest_whose_beginning_is_out_of_order_is_refused(root: Path) -> None:
    """What says the version comes first: a later version cannot hide behind another order of keys."""
    path = newest(root)
    body = json.loads(path.read_bytes())["manifest"]
    forge(root, lambda one: [one.clear(), one.update({"info": body["info"], **body, "version": 99})])
    with pytest.raises(CorruptError, match="does not begin with"):
        manifest_codec.decode(path.read_bytes())
