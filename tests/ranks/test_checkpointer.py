"""Several ranks save one snapshot together: each its share, and it exists when all shares are there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import ConfigError, LeaseHeldError, ResumeError, SnapshotFailedError, StorageFullError
from ckpt_engine.restore.match import require_size
from ckpt_engine.snapshot import writer_link
from ckpt_engine.store import names
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import RANKS
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import part_records
from tests.ranks.runs import Patience, SharedStore, ThreadRanks, on_all, open_ranks
from tests.support.writers import writer_of


def state_of(step: int, rank: int) -> dict[str, Any]:
    """A state in which every byte tells the step, and `own` the rank."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(257, 33, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "column": torch.randn(1, 3001, generator=generator),
            "channels": torch.randn(40, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(step),
            "empty": torch.empty(0, 4),
            "half": torch.randn(500, generator=generator).to(torch.bfloat16),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.randn(257, 33, generator=generator)}}, "lr": 0.1 * step},
        "own": {"rng": torch.full((100 + rank,), 10 * step + rank), "rank": rank},
    }


def save_all(ranks: list[Checkpointer], step: int) -> None:
    handles = on_all(lambda rank: ranks[rank].save(state_of(step, rank), step=step), len(ranks))
    for handle in handles:
        handle.wait(60)


def close_all(ranks: list[Checkpointer]) -> None:
    on_all(lambda rank: ranks[rank].close(), len(ranks))


def check(state: Any, step: int, rank: int) -> None:
    expected = state_of(step, rank)

    def compare(found: Any, wanted: Any) -> None:
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert found.stride() == wanted.stride()
            assert torch.equal(found, wanted)
        elif isinstance(wanted, dict):
            assert list(found) == list(wanted)
            for key, value in wanted.items():
                compare(found[key], value)
        else:
            assert found == wanted

    compare(state, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_back_what_it_saved(tmp_path: Path, size: int) -> None:
    """Shared tensors are those of all ranks, and each rank's own components are its own."""
    first = open_ranks(tmp_path / "run", size)
    for step in (1, 2):
        save_all(first, step)
    close_all(first)
    again = open_ranks(tmp_path / "run", size)
    for rank, state in enumerate(on_all(lambda rank: again[rank].load(), size)):
        check(state, 2, rank)
    assert [info.step for info in again[0].snapshots()] == [1, 2]
    assert not list((tmp_path / "run" / "parts").iterdir())
    close_all(again)


@pytest.mark.parametrize("codec", ["byteplane-zstd", "delta"])
def test_the_nearest_tier_encodes_every_share(tmp_path: Path, codec: str) -> None:
    """Each rank refers to what it has stored before, and all get back what they saved, one process alone too."""
    tiers = [{"url": str(tmp_path / "run"), "codec": codec}]
    ranks = open_ranks(None, 2, tiers=tiers, keep={"last": 1})
    for step, of in ((1, 1), (2, 2), (3, 2)):
        handles = on_all(lambda rank, step=step, of=of: ranks[rank].save(state_of(of, rank), step=step), 2)
        for handle in handles:
            handle.wait(60)
    close_all(ranks)
    repository = Repository(LocalStorage(str(tmp_path / "run")))
    manifest = repository.read(repository.ids()[-1].id)
    stored = {(piece.codec, manifest.files[piece.file].name) for _, piece in stored_pieces(manifest)}
    assert {names.data_rank(name) for kind, name in stored if kind != "raw"} == {0, 1}
    owners = {(names.data_rank(name), owner.seq) for _, name in stored if (owner := names.data_owner(name))}
    assert owners >= {(0, 2), (1, 2)}
    assert all(seq >= 2 for _, seq in owners)
    for size in (2, 1):
        again = open_ranks(tmp_path / "run", size)
        for rank, state in enumerate(on_all(lambda rank, again=again: again[rank].load(), size)):
            check(state, 2, rank)
        close_all(again)


def test_a_share_is_its_part_of_the_bytes_and_a_safetensors_file(tmp_path: Path) -> None:
    """Each rank's file has the same bytes within five percent, and any reader of safetensors opens it alone."""
    ranks = open_ranks(tmp_path / "run", 4)
    state = {"model": {f"layer{i}": torch.randn(64, 100) for i in range(20)}, "own": {}}
    for handle in on_all(lambda rank: ranks[rank].save(state, step=1), 4):
        handle.wait(60)
    close_all(ranks)
    sizes = []
    for file in sorted((tmp_path / "run" / "data").iterdir()):
        with safe_open(file, "pt") as data:
            sizes.append(sum(data.get_tensor(name).nbytes for name in data.keys()))  # noqa: SIM118
    share = sum(t.nbytes for t in state["model"].values()) / 4
    assert len(sizes) == 4
    assert all(abs(nbytes - share) <= 0.05 * share for nbytes in sizes)


def test_one_process_reads_what_several_have_written(tmp_path: Path) -> None:
    """A checkpointer alone loads the state of rank 0, and `loaded.own` has what was each other rank's own."""
    ranks = open_ranks(tmp_path / "run", 2)
    save_all(ranks, 3)
    close_all(ranks)
    with Checkpointer(tmp_path / "run") as alone:
        check(alone.load(), 3, 0)
        assert alone.loaded is not None
        assert {rank: own["own"]["rank"] for rank, own in alone.loaded.own.items()} == {0: 0, 1: 1}
        alone.save(state_of(4, 0), step=4).wait(60)
    four = open_ranks(tmp_path / "run", 4)
    for state in on_all(lambda rank: four[rank].load(), 4):
        check(state, 4, 0)
    close_all(four)


def test_tensors_are_read_into_live_ones(tmp_path: Path) -> None:
    """`load(into=...)` fills each rank's own tensors in place."""
    ranks = open_ranks(tmp_path / "run", 2)
    save_all(ranks, 5)
    live = [state_of(0, rank) for rank in range(2)]
    for rank, state in enumerate(on_all(lambda rank: ranks[rank].load(into=live[rank]), 2)):
        check(state, 5, rank)
        assert state["model"]["weight"] is live[rank]["model"]["weight"]
    close_all(ranks)


def test_a_rank_that_does_not_come_makes_the_snapshot_absent_and_all_waits_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks' snapshot fails after the patience of the coordinator; the next one of all ranks is fine."""
    patience = Patience(monkeypatch)
    ranks = open_ranks(tmp_path / "run", 2)
    save_all(ranks, 1)
    patience.over = True
    late = ranks[0].save(state_of(2, 0), step=2)
    with pytest.raises(SnapshotFailedError, match=r"no part of .* came from rank 1 in time"):
        late.wait(60)
    patience.over = False
    ranks[1].save(state_of(2, 1), step=2).wait(60)
    save_all(ranks, 3)
    close_all(ranks)
    assert [info.step for info in open_ranks(tmp_path / "run", 1)[0].snapshots()] == [1, 3]
    assert_only_needed(tmp_path / "run", restarts=True)


def test_the_coordinator_ends_with_an_error_where_the_last_part_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lost is durable nowhere, although its own share was written."""
    patience = Patience(monkeypatch)
    ranks = open_ranks(tmp_path / "run", 2)
    save_all(ranks, 1)
    patience.over = True
    ranks[0].save(state_of(2, 0), step=2)
    with pytest.raises(SnapshotFailedError, match=r"step 2 is lost, .* step 1 is the newest: no part of .* in time"):
        close_all(ranks)


def test_a_rank_that_skips_says_so(tmp_path: Path) -> None:
    """With its arena full a rank takes no snapshot: that of all ranks fails at once, with the reason."""
    ranks = open_ranks(tmp_path / "run", 2, wait_seconds=50.0)
    save_all(ranks, 1)
    pipeline = ranks[1].engine._pipeline
    take, pipeline.slots.take = pipeline.slots.take, lambda plan: None  # type: ignore[method-assign]
    handles = on_all(lambda rank: ranks[rank].save(state_of(2, rank), step=2), 2)
    assert handles[1].skipped is not None
    with pytest.raises(SnapshotFailedError, match="rank 1 has no part in it: busy"):
        handles[0].wait(60)
    pipeline.slots.take = take  # type: ignore[method-assign]
    save_all(ranks, 3)
    close_all(ranks)
    assert_only_needed(tmp_path / "run", restarts=True)


def test_states_that_differ_in_structure_are_no_snapshot(tmp_path: Path) -> None:
    """A shared tensor of another shape on another rank is noticed by the coordinator, which names its component."""
    ranks = open_ranks(tmp_path / "run", 2)
    states = [{"v": torch.zeros(2), "w": torch.zeros(8, 3)}, {"v": torch.zeros(2), "w": torch.zeros(8, 4)}]
    handle = on_all(lambda rank: ranks[rank].save(states[rank], step=1), 2)[0]
    with pytest.raises(SnapshotFailedError, match=r"ranks 0 and 1 differ in structure \(w\),"):
        handle.wait(60)
    close_all(ranks)


def test_components_in_another_order_are_no_snapshot(tmp_path: Path) -> None:
    """By their order each rank knows what it writes: one with another order writes what others do, or too little."""
    ranks = open_ranks(tmp_path / "run", 2)
    state = {name: torch.full((size,), 1.0) for name, size in (("a", 1000), ("b", 3000), ("c", 7000))}
    states = [state, dict(reversed(state.items()))]
    handle = on_all(lambda rank: ranks[rank].save(states[rank], step=1), 2)[0]
    with pytest.raises(SnapshotFailedError, match="ranks 0 and 1 differ in structure, and are not one snapshot"):
        handle.wait(60)
    close_all(ranks)


def test_a_component_may_not_have_the_name_of_what_is_ours(tmp_path: Path) -> None:
    """`ranks` is where a manifest has what each rank has of its own."""
    ranks = open_ranks(tmp_path / "run", 2)

    def save(rank: int) -> None:
        with pytest.raises(ConfigError, match="ranks"):
            ranks[rank].save({"ranks": 1}, step=1)

    on_all(save, 2)
    close_all(ranks)


def test_no_rank_starts_where_the_coordinator_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process has the lease, all ranks raise the error that names it."""
    with Checkpointer(tmp_path / "run", writer="thread") as other:
        other.engine.start()
        ranks = open_ranks(tmp_path / "run", 2)

        def start(rank: int) -> None:
            with pytest.raises(LeaseHeldError, match="is being written by"):
                ranks[rank].engine.start()

        monkeypatch.setattr(writer_link, "LEASE_WAIT_SECONDS", 0.1)
        on_all(start, 2)


def test_what_another_rank_is_writing_is_not_collected(tmp_path: Path) -> None:
    """Retention of the coordinator leaves alone the data of snapshots to come, and removes that of dead sessions."""
    root = tmp_path / "run"
    ranks = open_ranks(root, 2, keep={"last": 1})
    save_all(ranks, 1)
    session = ranks[0].engine._session
    assert session is not None
    coming = root / names.data_name(names.session_id(session.name, 9, 9), 1)
    dead = root / names.data_name(names.session_id("dead", 9, 9), 1)
    for path in (coming, dead):
        path.write_bytes(b"x")
    save_all(ranks, 2)
    ranks[0].close()  # waits for retention
    assert coming.exists()
    assert not dead.exists()
    ranks[1].close()
    ranks = open_ranks(root, 2, keep={"last": 1})
    save_all(ranks, 3)
    close_all(ranks)
    assert_only_needed(root)


@pytest.mark.parametrize("further", [False, True])
def test_what_others_wrote_while_the_coordinators_writer_was_lost_is_committed(tmp_path: Path, further: bool) -> None:
    """The next writer of rank 0 leaves alone the snapshot that rank 0 is about to save, and the one after it.

    The other rank has written its shares of both before that writer starts. A further tier may have higher numbers by
    then, of a job that has gone on from it.
    """
    root, far = tmp_path / "run", tmp_path / "far"
    store = SharedStore()
    ranks = [
        Checkpointer(
            {"tiers": [str(root), *([str(far)] if further else [])]},
            ranks=ThreadRanks(rank, 2, store, wait_seconds=10.0),
            writer=("process", "thread")[rank],
        )
        for rank in range(2)
    ]
    save_all(ranks, 1)
    writer = writer_of(ranks[0])
    writer.kill()
    writer.wait(60)
    if further:
        LocalStorage(str(far)).put(names.manifest_name(names.snapshot_id(100, 1)), [memoryview(b"{}")])
    for step in (2, 3):
        ranks[1].save(state_of(step, 1), step=step).wait(60)
    handles = [ranks[0].save(state_of(step, 0), step=step) for step in (2, 3)]
    for handle in handles:
        handle.wait(60)
    close_all(ranks)
    again = open_ranks(root, 2)
    for rank, state in enumerate(on_all(lambda rank: again[rank].load(step=2), 2)):
        check(state, 2, rank)
    for rank, state in enumerate(on_all(lambda rank: again[rank].load(), 2)):
        check(state, 3, rank)
    close_all(again)


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("resumed", [1, 2, 4])
def test_any_number_of_ranks_loads_what_any_number_has_saved(tmp_path: Path, saved: int, resumed: int) -> None:
    """Shared tensors are bit for bit the same, whichever rank wrote which part of them."""
    first = open_ranks(tmp_path / "run", saved)
    save_all(first, 6)
    close_all(first)
    again = open_ranks(tmp_path / "run", resumed)
    for rank, state in enumerate(on_all(lambda rank: again[rank].load(), resumed)):
        check(state, 6, rank % saved)
    loaded = again[0].loaded
    assert loaded is not None
    assert set(loaded.own) == (set(range(saved)) if saved not in (1, resumed) else set())
    close_all(again)


def leave_parts(root: Path, ranks: list[int], size: int, step: int) -> str:
    """Take a snapshot of two ranks, and undo its commit: what a coordinator leaves that dies before it."""
    made = open_ranks(root, size)
    save_all(made, step)
    close_all(made)
    repository = Repository(open_storage(root))
    snapshot = repository.ids()[-1].id
    manifest = repository.read(snapshot)
    for rank in range(size):
        if rank not in ranks:
            continue
        share = parts_of(manifest, rank, size)
        part_records.put(repository.storage, share)
    repository.forget([snapshot])
    return snapshot


def parts_of(manifest: Any, rank: int, size: int) -> part_records.PartRecord:
    """The part record of a rank, from the manifest that was made of it."""
    entries, slices = {}, {}
    for name, entry in manifest.entries.items():
        at, start, mine = 0, None, []
        for piece in entry.pieces:
            if piece.file == rank:
                start = at if start is None else start
                mine.append(replace(piece, file=0))
            at += piece.raw_nbytes
        if mine or (rank == 0 and not entry.pieces):
            shape = list(entry.shape)
            cut = next((i for i, n in enumerate(shape) if n != 1), 0)
            if at:
                shape[cut : cut + 1] = [n * sum(p.raw_nbytes for p in mine) // at for n in shape[cut : cut + 1]]
            entries[name] = replace(entry, shape=tuple(shape), pieces=tuple(mine))
            slices[name] = part_records.Slices(entry.shape, ((start or 0, len(mine)),))
    tree = {k: v for k, v in manifest.tree.items() if k != RANKS} if rank == 0 else {}
    tree[RANKS] = {str(rank): manifest.tree[RANKS][str(rank)]}
    own = replace(manifest, files=(manifest.files[rank],), entries=entries, tree=tree)
    config = RankConfig(rank, size, "dead", 1, 1.0)
    return part_records.PartRecord((config.rank,), config.size, "same", slices, own)


def test_what_a_dead_coordinator_left_complete_is_committed_at_the_next_start(tmp_path: Path) -> None:
    """All parts are there and only the manifest is not: the restarted ranks resume from it."""
    root = tmp_path / "run"
    snapshot = leave_parts(root, [0, 1], 2, 7)
    ranks = open_ranks(root, 2)
    on_all(lambda rank: ranks[rank].engine.start(), 2)
    for rank, state in enumerate(on_all(lambda rank: ranks[rank].load(), 2)):
        check(state, 7, rank)
    assert ranks[0].snapshots()[-1].id == snapshot
    close_all(ranks)
    assert_only_needed(root)


@pytest.mark.parametrize("left", [[0], [1]])
def test_what_is_not_complete_is_let_go(tmp_path: Path, left: list[int]) -> None:
    """A part is missing: neither the snapshot nor its data stays, and earlier snapshots are as they were."""
    root = tmp_path / "run"
    ranks = open_ranks(root, 2)
    save_all(ranks, 1)
    close_all(ranks)
    leave_parts(root, left, 2, 7)
    ranks = open_ranks(root, 2)
    save_all(ranks, 8)
    close_all(ranks)
    assert [info.step for info in ranks[0].snapshots()] == [1, 8]
    assert_only_needed(root)


def test_a_part_whose_data_is_gone_completes_nothing(tmp_path: Path) -> None:
    """Part records without their data files make no snapshot."""
    root = tmp_path / "run"
    snapshot = leave_parts(root, [0, 1], 2, 7)
    os.remove(root / names.data_name(snapshot, 1))  # noqa: PTH107
    ranks = open_ranks(root, 2)
    on_all(lambda rank: ranks[rank].engine.start(), 2)
    assert ranks[0].snapshots() == []
    close_all(ranks)


def assert_only_needed(root: Path, *, restarts: bool = False) -> None:
    """No data file and no part record is left that no snapshot needs, at the latest after one more start."""
    if restarts:
        ranks = open_ranks(root, 2)
        on_all(lambda rank: ranks[rank].engine.start(), 2)
        close_all(ranks)
    repository = Repository(open_storage(root))
    needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
    assert {f"data/{file.name}" for file in (root / "data").iterdir()} == needed
    assert not list((root / "parts").glob("*"))


def test_arrays_that_are_not_alike_are_those_of_rank_0(tmp_path: Path) -> None:
    """Statistics of batch norm differ between ranks in the middle of a step: no rank's rows get into another's."""
    store = SharedStore()

    def alike(path: tuple[Any, ...]) -> bool:
        return path[-1] != "mean"

    def made(rank: int) -> Checkpointer:
        return Checkpointer(tmp_path / "run", ranks=ThreadRanks(rank, 2, store, alike=alike), writer="thread")

    ranks = [made(0), made(1)]
    states = [{"model": {"w": torch.zeros(4000), "mean": torch.full((1000,), float(rank))}} for rank in range(2)]
    for handle in on_all(lambda rank: ranks[rank].save(states[rank], step=1), 2):
        handle.wait(60)
    for state in on_all(lambda rank: ranks[rank].load(), 2):
        assert torch.equal(state["model"]["mean"], torch.zeros(1000))
    close_all(ranks)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "run" / "data").iterdir())]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]


def test_an_exact_resume_needs_as_many_ranks(tmp_path: Path) -> None:
    """The trainers' adapters refuse another number, in either direction, and name both; `load` does not."""
    ranks = open_ranks(tmp_path, 2)
    save_all(ranks, 1)
    close_all(ranks)
    repository = Repository(open_storage(str(tmp_path)))
    (snapshot,) = repository.ids()
    manifest = repository.read(snapshot.id)
    require_size(manifest, 2)
    for size in (1, 4):
        with pytest.raises(ResumeError, match=f"2 ranks took snapshot {snapshot.id}, and this run has {size}"):
            require_size(manifest, size)
    with Checkpointer(tmp_path, writer="thread") as alone:
        check(alone.load(), 1, 0)


def test_a_rank_that_cannot_take_its_share_tells_the_others(tmp_path: Path) -> None:
    """A snapshot that one rank misses is absent at once, and the ranks go on counting alike."""
    ranks = open_ranks(tmp_path, 2)
    save_all(ranks, 1)

    def work(rank: int) -> None:
        if rank:
            ranks[rank].engine.miss(2, "loss spike")
            return
        with pytest.raises(SnapshotFailedError):
            ranks[rank].save(state_of(2, rank), step=2).wait(30)

    on_all(work, 2)
    save_all(ranks, 3)
    close_all(ranks)
    assert [one.step for one in Repository(open_storage(str(tmp_path))).ids()] == [1, 3]


def test_a_snapshot_that_all_ranks_put_off_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As at the end of an epoch: the next one removes what was said of it, and so does the next start, silently."""
    ranks = open_ranks(tmp_path, 2)
    save_all(ranks, 1)
    on_all(lambda rank: ranks[rank].engine.miss(2, "start of an epoch"), 2)
    save_all(ranks, 3)
    assert not any((tmp_path / "parts").iterdir())
    on_all(lambda rank: ranks[rank].engine.miss(4, "start of an epoch"), 2)
    close_all(ranks)
    assert [path.name[:20] for path in (tmp_path / "parts").iterdir()] == ["00000004-s0000000004"]
    ranks = open_ranks(tmp_path, 2)
    on_all(lambda rank: ranks[rank].engine.start(), 2)
    close_all(ranks)
    assert not any((tmp_path / "parts").iterdir())
    assert "is dropped" not in caplog.text


def test_a_rank_whose_data_cannot_be_written_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator does not wait for a part that never comes; the next snapshot is fine."""
    put, full = LocalStorage.put, [True]

    def refuse(self: LocalStorage, name: str, blocks: Any, *, exclusive: bool = True) -> None:
        if full[0] and name.endswith("-r00001.safetensors"):
            raise StorageFullError("no space left")
        put(self, name, blocks, exclusive=exclusive)

    monkeypatch.setattr(LocalStorage, "put", refuse)
    ranks = open_ranks(tmp_path, 2, wait_seconds=3600.0)
    handles = on_all(lambda rank: ranks[rank].save(state_of(1, rank), step=1), 2)
    with pytest.raises(SnapshotFailedError, match=r"rank 1.*it failed there"):
        handles[0].wait(60)
    full[0] = False
    save_all(ranks, 2)
    close_all(ranks)
    assert [info.step for info in ranks[0].snapshots()] == [2]
