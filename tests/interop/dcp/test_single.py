"""dcp.save and dcp.load in one process: what is stored, what is read, what is refused; no code of a snapshot runs."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.cli.main import main
from ckpt_engine.dcp import CkptReader, CkptWriter, manifest_of
from ckpt_engine.errors import ConfigError, SnapshotFailedError
from ckpt_engine.interop import dcp_reader
from ckpt_engine.interop.dcp_container import Block, Container, DcpArray, DcpItem
from ckpt_engine.ranks.boxes import Box
from ckpt_engine.store.manifest import DataFile, Entry, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.servers.fixtures import bucket, moto  # noqa: F401
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "nested": {"list": [1, {"x": torch.full((3,), float(seed))}], "plain": [seed, None, "text"], "f": 0.5 * seed},
        "empty": torch.empty(0, 4),
        "half": torch.full((3, 2), seed, dtype=torch.bfloat16),
        "raw": bytes([seed]) * 100,
    }


def equal(one: Any, two: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype and torch.equal(one, two)
    elif isinstance(one, dict):
        assert list(map(str, one)) == list(map(str, two))
        for a, b in zip(one.values(), two.values(), strict=True):
            equal(a, b)
    elif isinstance(one, list | tuple):
        for a, b in zip(one, two, strict=True):
            equal(a, b)
    else:
        assert one == two and type(one) is type(two)


def run_command(*arguments: str) -> None:
    """A command of `ckpt`, which must succeed."""
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code


def steps(root: Path) -> list[int]:
    return [parsed.step for parsed in Repository(open_storage(root)).ids()]


def test_what_dcp_saves_is_a_snapshot_like_any_other(tmp_path: Path) -> None:
    """It comes back through DCP and through Checkpointer; the step is that of its name, or the next one."""
    root = tmp_path / "run"
    dcp.save(trained(1), checkpoint_id="step-40", storage_writer=CkptWriter(root))
    dcp.save(trained(2), storage_writer=CkptWriter(root))
    assert steps(root) == [40, 41]
    into = trained(9)
    reader = CkptReader(root)
    dcp.load(into, checkpoint_id="run/step-40", storage_reader=reader)
    equal(into, trained(1))
    assert reader.snapshot is not None and reader.snapshot.step == 40
    assert reader.unverified_bytes == 0
    state = Checkpointer(root).load()
    equal(state, trained(2))


@pytest.mark.slow
def test_the_commands_know_what_dcp_has_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, verify, show, and an export that other programs read."""
    root = tmp_path / "run"
    dcp.save(trained(2), storage_writer=CkptWriter(root))
    for command in (["ls", str(root)], ["verify", str(root)], ["show", str(root)]):
        run_command(*command)
    out = tmp_path / "out.safetensors"
    run_command("export", str(root), str(out), "--to", "safetensors", "--only", "model")
    exported, wanted = load_file(out), trained(2)["model"]
    equal({name: exported[name] for name in wanted}, dict(wanted))
    assert "ok" in capsys.readouterr().out


def test_dcp_reads_what_a_checkpointer_has_saved(tmp_path: Path) -> None:
    """Tensors with strides, views and parameters, and without knowing the state beforehand."""
    base = torch.arange(24.0).view(4, 6)
    state = {
        "a": base,
        "columns": base[:, 2:4],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "p": nn.Parameter(torch.ones(3)),
        "numbers": {"tuple": (1, 2), "text": "x"},
        1: torch.ones(2),
    }
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.save({"all": state}, step=3).wait()
    blank = {
        "all": {
            key: torch.zeros_like(value, memory_format=torch.contiguous_format)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in state.items()
        }
    }
    dcp.load(blank, storage_reader=CkptReader(tmp_path))
    for key in ("a", "columns", "channels", "p", 1):
        assert torch.equal(blank["all"][key], state[key])
    found = _load_state_dict_from_keys({"all.a", "all.numbers"}, storage_reader=CkptReader(tmp_path))
    assert torch.equal(found["all"]["a"], base)


def test_tensors_of_another_memory_format_are_filled_where_they_are(tmp_path: Path) -> None:
    """DCP's promise: the live tensor has the values, also one that is stored as channels_last."""
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save({"model": model.state_dict()}, step=1).wait()
    wanted = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    dcp.load({"model": model.state_dict()}, storage_reader=CkptReader(tmp_path))
    assert torch.equal(model.weight, wanted)


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    """A part of less than half a big piece is read alone, and counted as unverified."""
    whole = torch.arange(600_000.0).view(100_000, 6)
    dcp.save({"w": whole}, storage_writer=CkptWriter(tmp_path))
    reader = CkptReader(tmp_path)
    metadata = reader.read_metadata()

    class Planned(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            [item] = plan.items
            size = torch.Size([100, 2])
            small = type(item)(
                item.type, item.dest_index, torch.Size([0, 0]), item.storage_index, torch.Size([300, 3]), size
            )
            plan.items[:] = [small]
            return plan

    target = {"w": torch.zeros(100_000, 6)}
    dcp.load(target, storage_reader=reader, planner=Planned())
    assert torch.equal(target["w"][:100, :2], whole[300:400, 3:5])
    assert reader.unverified_bytes == (99 * 6 + 2) * 4
    assert metadata.state_dict_metadata["w"].size == whole.shape


def test_a_damaged_piece_is_found(tmp_path: Path) -> None:
    """One flipped byte: the load fails and names the entry; the older snapshot is still there."""
    dcp.save({"model": {"w": torch.ones(5000)}}, checkpoint_id="1", storage_writer=CkptWriter(tmp_path))
    [file] = (tmp_path / "data").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException, match="model/w"):
        dcp.load({"model": {"w": torch.zeros(5000)}}, storage_reader=CkptReader(tmp_path))


class Unknown:
    value = 1


def test_unknown_objects_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    """The error names the leaf, nothing is committed, and opting in stores it and gives it back."""
    state = {"model": torch.ones(2), "deep": {"thing": Unknown()}}
    with pytest.raises(dcp.api.CheckpointException, match="deep/thing"):
        dcp.save(state, storage_writer=CkptWriter(tmp_path / "a"))
    assert steps(tmp_path / "a") == []
    dcp.save(state, storage_writer=CkptWriter(tmp_path / "b", pickle=["deep/*"]))
    into: dict[str, Any] = {"model": torch.zeros(2), "deep": {"thing": None}}
    with pytest.raises(dcp.api.CheckpointException, match="pickle"):
        dcp.load(into, storage_reader=CkptReader(tmp_path / "b"))
    dcp.load(into, storage_reader=CkptReader(tmp_path / "b", pickle=["deep/*"]))
    assert isinstance(into["deep"]["thing"], Unknown)


class Evil:
    """Says so if it is ever unpickled."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return (Evil.ran.append, (1,))


def test_nothing_in_a_snapshot_is_unpickled(tmp_path: Path) -> None:
    """A pickle that somebody has put into a manifest is refused, not run."""
    dcp.save({"thing": 1, "w": torch.ones(2)}, storage_writer=CkptWriter(tmp_path))
    repository = Repository(open_storage(tmp_path))
    manifest = repository.read(repository.ids()[0].id)
    evil = {"$": "pickle", "b64": base64.b64encode(pickle.dumps(Evil())).decode()}
    info = replace(manifest.info, id="00000009-s0000000009-0123abcd", seq=9, step=9)
    repository.commit(replace(manifest, info=info, tree={**manifest.tree, "thing": evil}))
    with pytest.raises(dcp.api.CheckpointException, match="can run code"):
        dcp.load({"thing": None}, storage_reader=CkptReader(tmp_path))
    assert Evil.ran == []


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    """A checkpoint_id without a number, several tiers, a memory tier, saving without collectives, an empty place."""
    with pytest.raises(ConfigError, match="number of a step"):
        dcp.save({}, checkpoint_id="last", storage_writer=CkptWriter(tmp_path))
    with pytest.raises(ConfigError, match="one tier"):
        CkptWriter({"tiers": [str(tmp_path / "a"), str(tmp_path / "b")]})
    with pytest.raises(ConfigError, match="memory"):
        CkptReader({"tiers": ["memory", str(tmp_path / "b")]})
    with pytest.raises(ConfigError, match="use_collectives"):
        CkptWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(dcp.api.CheckpointException, match="no snapshot at"):
        dcp.load({"a": torch.ones(1)}, storage_reader=CkptReader(tmp_path / "nowhere"))
    assert CkptWriter.validate_checkpoint_id("a/step-7") and not CkptReader.validate_checkpoint_id("latest")


def test_a_run_that_somebody_writes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Checkpointer has the lease: the save fails and names it. After a save of dcp the lease is free again."""
    monkeypatch.setattr("ckpt_engine.interop.dcp_reader.LEASE_WAIT_SECONDS", 0.1)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.save({"a": 1}, step=1).wait()
        with pytest.raises(dcp.api.CheckpointException, match="is being written by"):
            dcp.save({"a": torch.ones(1)}, storage_writer=CkptWriter(tmp_path))
    dcp.save({"a": torch.ones(1)}, storage_writer=CkptWriter(tmp_path))
    with Checkpointer(tmp_path, writer="thread", keep={"last": 9}) as ckpt:
        ckpt.save({"a": 1}, step=3).wait()
    assert steps(tmp_path) == [1, 2, 3]


def block(
    name: str, whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...], rank: int
) -> tuple[str, DcpItem]:
    nbytes = 4 * shape[0] * shape[1]
    entry = Entry("float32", shape, (Piece(0, 4096, nbytes, f"d{rank}", nbytes),), "F32")
    file = DataFile(f"data/00000001-s0000000001-0123abcd-r{rank:05d}.safetensors", 4096 + nbytes)
    return name, DcpItem((Block(name, whole, Box(offsets, shape), entry),), {"$": "tensor", "entry": name}, file)


ID = "00000001-s0000000001-0123abcd"


def test_rows_are_one_array_and_columns_are_blocks() -> None:
    """Shards by rows make a plain array, in whatever order they came; others lie one behind another, and the tree
    says how."""
    rows = manifest_of(ID, "r", 2, [block("w", (4, 6), (3, 0), (1, 6), 1), block("w", (4, 6), (0, 0), (3, 6), 0)], {})
    assert rows.tree == {"w": {"$": "tensor", "entry": "w"}}
    assert [piece.digest for piece in rows.entries["w"].pieces] == ["d0", "d1"]
    columns = manifest_of(
        ID, "r", 2, [block("w", (4, 6), (0, 4), (4, 2), 1), block("w", (4, 6), (0, 0), (4, 4), 0)], {}
    )
    assert columns.tree == {"w": {"$": "sharded", "entry": "w", "blocks": [[[0, 0], [4, 4]], [[0, 4], [4, 2]]]}}
    entry = columns.entries["w"]
    assert entry == Entry("float32", (4, 6), entry.pieces, "F32")
    json.dumps(columns.tree)


def test_a_shard_has_smaller_pieces_than_an_array() -> None:
    """Other numbers of ranks need other parts of it; each piece has a digest of its own."""
    tensor = torch.randn(1024, 1024)
    arrays = [DcpArray("whole", tensor, (1024, 1024), (0, 0)), DcpArray("shard", tensor, (2048, 1024), (1024, 0))]
    assert [len(block.entry.pieces) for block in Container(arrays).blocks()] == [1, 16]


def test_a_missing_shard_and_shapes_that_differ_are_no_snapshot() -> None:
    """As shards that overlap, both are errors that name the array."""
    with pytest.raises(SnapshotFailedError, match="'w' overlap or are incomplete: they have 18 of its 24 elements"):
        manifest_of(ID, "r", 2, [block("w", (4, 6), (0, 0), (3, 6), 0)], {})
    with pytest.raises(SnapshotFailedError, match="overlap or are incomplete"):
        manifest_of(ID, "r", 2, [block("w", (4, 6), (at, 0), (2, 6), at) for at in (0, 1)], {})
    with pytest.raises(SnapshotFailedError, match="different shapes"):
        manifest_of(ID, "r", 2, [block("w", (4, 6), (0, 0), (3, 6), 0), block("w", (5, 6), (3, 0), (1, 6), 1)], {})


@pytest.mark.slow
def test_an_s3_bucket_is_as_good_as_a_folder(moto: S3Server, bucket: str) -> None:  # noqa: F811
    """Save, retention and load against a real server."""
    options = {"tiers": [{"url": f"s3://{bucket}/run", "storage_options": moto.options()}], "keep": {"last": 2}}
    for step in (1, 2, 3):
        dcp.save(trained(step), checkpoint_id=f"step-{step}", storage_writer=CkptWriter(options))
    into = trained(9)
    dcp.load(into, checkpoint_id="step-2", storage_reader=CkptReader(options))
    equal(into, trained(2))
    assert [info.step for info in Checkpointer(options).snapshots()] == [2, 3]


def test_retention_leaves_what_this_process_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """A process that saves without a load begins a line; one that has loaded goes on with that of the snapshot."""
    dcp_reader._lines.clear()
    writer = {"storage_writer": CkptWriter(tmp_path, keep={"last": 1})}
    repository = Repository(open_storage(str(tmp_path)))

    def save(*steps: int) -> None:
        for step in steps:
            dcp.save({"w": torch.ones(4)}, checkpoint_id=f"step-{step}", **writer)

    save(1, 2)
    dcp_reader._lines.clear()
    save(3, 4)
    assert [info.step for info in repository.list()] == [2, 4]
    dcp_reader._lines.clear()
    dcp.load({"w": torch.ones(4)}, storage_reader=CkptReader(tmp_path))
    save(5, 6)
    assert [info.step for info in repository.list()] == [2, 6]
