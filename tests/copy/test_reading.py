"""Entries in several files, in any order, encoded and against bases come back bit for bit, or damage is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt_engine import Checkpointer
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_snapshot
from ckpt_engine.errors import CorruptError, NewerFormatError, StorageError
from ckpt_engine.restore import read
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.load import load
from ckpt_engine.restore.read import read_entries
from ckpt_engine.store import codecs, decode, manifest_codec, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import MAX_CHAIN, ReadLimiter, joined
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from tests.cli.conftest import Outcome
from tests.copy.scattered import Scatter, with_flip
from tests.snapshot.passage import same


@pytest.fixture(autouse=True)
def flip() -> Iterator[None]:
    with_flip()
    yield
    codecs.codec._known.pop("flip")


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, Any] = {f"t{n}": torch.randn(n, generator=generator) for n in (1, 7, 300, 5000)}
    tensors["half"] = torch.randn(40, 30, generator=generator).bfloat16()
    tensors["zeros"] = torch.zeros(3000, dtype=torch.int64)
    tensors["none"] = torch.empty(0, 4)
    return {"model": tensors, "step": step}


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class Folder:
    """A run of two snapshots, of which the newer is stored awkwardly."""

    def __init__(self, root: Path, seed: int = 1, depth: int = 2, most_pieces: int = 5) -> None:
        with Checkpointer(root, keep={"last": 9}) as ckpt:
            for step in (1, 2):
                ckpt.save(state(step), step=step).wait(30)
        self.root = root
        self.repository = Repository(LocalStorage(root))
        self.older, self.newest = (parsed.id for parsed in self.repository.ids())
        self.made = Scatter(self.repository, seed, depth, most_pieces).rewrite(self.newest)

    def load(self, into: Any = None) -> Any:
        found = load([Repository(LocalStorage(self.root))], into=into)
        assert found is not None
        return found

    def replace(self, made: Manifest) -> None:
        """Another manifest for the newest snapshot, also one that `commit` refuses: as from elsewhere."""
        self.repository.forget([self.newest])
        self.repository.commit_copy(made, manifest_codec.encode(made))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_snapshot_is_made_of_it_comes_back_as_it_was(
    tmp_path: Path, seed: int, ckpt: Callable[..., Outcome]
) -> None:
    """Fresh and into live tensors; verify and diff read it, too, and it is marked as nothing for older readers."""
    folder = Folder(tmp_path / "run", seed)
    assert manifest_codec.version_of(folder.made) == 2
    assert folder.made.bases
    found = folder.load()
    assert (found.info.id, found.rejected) == (folder.newest, ())
    assert same(found.state, state(2))
    live = {"model": {name: torch.zeros_like(t) for name, t in state(1)["model"].items()}, "step": 0}
    pointers = [t.data_ptr() for t in live["model"].values()]
    into = folder.load(live)
    assert same(into.state, state(2))
    assert [t.data_ptr() for t in into.state["model"].values()] == pointers
    assert Checker(folder.repository, lambda _: None).check(folder.newest).ok
    assert ckpt("verify", folder.root).code == 0
    assert "t5000" in ckpt("diff", f"{folder.root}#{folder.older}", folder.root).out


@given(seed=st.integers(0, 10**6), depth=st.integers(0, 4), most_pieces=st.integers(1, 9))
@settings(max_examples=4, deadline=None)
def test_every_way_of_storing_gives_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, seed: int, depth: int, most_pieces: int
) -> None:
    """A law: pieces, files, codecs and bases are no part of the content."""
    folder = Folder(tmp_path_factory.mktemp("scattered") / "run", seed, depth, most_pieces)
    assert same(folder.load().state, state(2))


def test_a_copy_has_everything_the_snapshot_needs(tmp_path: Path, ckpt: Callable[..., Outcome]) -> None:
    """Files of bases are copied with it and verified on the way; an export reads it."""
    folder = Folder(tmp_path / "run")
    far = LocalStorage(tmp_path / "far")
    record = folder.repository.storage.get("ckpt.json")
    target = adopt_run(RunText(folder.repository.run_id, record), far)
    copy_snapshot(folder.repository, target, folder.newest)
    found = load([Repository(far)])
    assert found is not None and same(found.state, state(2))
    out = tmp_path / "weights.safetensors"
    done = ckpt("export", tmp_path / "far", out, "--to", "safetensors", "--only", "model")
    assert done.code == 0, done.err
    exported = load_file(out)
    for name, tensor in state(2)["model"].items():
        assert torch.equal(exported[name], tensor)


@pytest.mark.parametrize("of_base", [False, True], ids=["piece", "base"])
def test_a_damaged_piece_or_base_leads_to_the_snapshot_before(tmp_path: Path, of_base: bool) -> None:
    """Nothing wrong is ever loaded; the reason names the tensor."""
    folder = Folder(tmp_path / "run", seed=3)
    entries = folder.made.entries
    name, piece = next((name, entry.pieces[0]) for name, entry in entries.items() if entry.pieces)
    if of_base:
        name, pieces = next(
            (name, list(pieces.values())) for one in folder.made.bases.values() for name, pieces in one.items()
        )
        piece = pieces[0]
    flip_bit(tmp_path / "run" / folder.made.files[piece.file].name, piece.offset)
    found = folder.load()
    assert same(found.state, state(1))
    (rejected,) = found.rejected
    assert rejected.id == folder.newest and name in rejected.reason
    assert not Checker(folder.repository, lambda _: None).check(folder.newest).ok


def test_a_lost_file_of_a_base_leads_to_the_snapshot_before(tmp_path: Path) -> None:
    """It is seen before data is read."""
    folder = Folder(tmp_path / "run")
    (tmp_path / "run" / folder.made.files[0].name).unlink()
    found = folder.load()
    assert same(found.state, state(1))
    assert "missing" in found.rejected[0].reason


def test_a_base_that_is_not_described_or_never_ends_is_damage(tmp_path: Path) -> None:
    """The manifest has to say where every base is, and chains are bounded."""
    folder = Folder(tmp_path / "run")
    folder.replace(replace(folder.made, bases={}))
    assert folder.load().info.id == folder.older
    name, entry = next(
        (name, entry) for name, entry in folder.made.entries.items() if any(piece.base for piece in entry.pieces)
    )
    starts = accumulate((piece.raw_nbytes for piece in entry.pieces), initial=0)
    pieces = {start: piece for start, piece in zip(starts, entry.pieces, strict=False) if piece.base}
    itself = {one: {**entries, name: pieces} for one, entries in folder.made.bases.items()}
    circle = replace(folder.made, bases=itself)
    with pytest.raises(CorruptError, match="do not end"):
        read_entries(Sources([folder.repository.storage]), circle, [name])
    ids = [f"{n:08d}-s{n:010d}-00000000" for n in range(MAX_CHAIN + 2)]
    long = {
        one: {name: {start: replace(piece, base=after) for start, piece in pieces.items()}}
        for one, after in pairwise(ids)
    }
    first = replace(entry, pieces=tuple(replace(p, base=ids[0]) if p.base else p for p in entry.pieces))
    chain = replace(folder.made, entries={name: first}, bases=long)
    with pytest.raises(CorruptError, match="do not end"):
        read_entries(Sources([folder.repository.storage]), chain, [name])


def test_an_unknown_codec_is_of_a_newer_version(tmp_path: Path) -> None:
    """It is refused by name, and the older snapshot is used."""
    folder = Folder(tmp_path / "run")
    name, entry = next((name, entry) for name, entry in folder.made.entries.items() if entry.pieces)
    pieces = tuple(replace(piece, codec="wavelet", base=None) for piece in entry.pieces)
    changed = replace(folder.made, entries={**folder.made.entries, name: replace(entry, pieces=pieces)})
    with pytest.raises(NewerFormatError, match="wavelet"):
        read_entries(Sources([folder.repository.storage]), changed, [name])
    folder.replace(changed)
    assert folder.load().info.id == folder.older


def test_places_that_store_a_snapshot_differently_are_not_mixed(tmp_path: Path) -> None:
    """The nearest serves; if it is damaged, the other copy of the same snapshot does, and not an older one."""
    folder = Folder(tmp_path / "near")
    with Checkpointer(tmp_path / "plain") as ckpt:
        ckpt.save(state(2), step=2).wait(30)
    plain = Repository(LocalStorage(tmp_path / "plain"))
    other = plain.read(plain.ids()[-1].id)
    far = LocalStorage(tmp_path / "far")
    far.put("ckpt.json", [memoryview(folder.repository.storage.get("ckpt.json"))])
    for file in other.files:
        far.put(file.name, [memoryview(plain.storage.get(file.name))])
    Repository(far).commit(replace(other, info=folder.made.info, run=folder.made.run))
    where = [Repository(LocalStorage(tmp_path / "near")), Repository(far)]
    found = load(where)
    assert found is not None and found.place.endswith("near") and same(found.state, state(2))
    piece = next(entry.pieces[0] for entry in folder.made.entries.values() if entry.pieces)
    flip_bit(tmp_path / "near" / folder.made.files[piece.file].name, piece.offset)
    found = load(where)
    assert found is not None and found.place.endswith("far") and same(found.state, state(2))
    assert found.info.id == folder.newest and found.rejected == ()
    assert any("another copy" in note for note in found.notes)


def test_deltas_of_many_pieces_are_decoded_by_many_threads() -> None:
    """They fit into one request, and would be one thread's work; raw neighbours are still read together."""
    raw = read.READ_BYTES

    def spans(stored_nbytes: int, raw_nbytes: int, codec: str) -> list[int]:
        pieces = [Piece(0, n * stored_nbytes, stored_nbytes, "", raw_nbytes, codec) for n in range(6)]
        moves = [read.Move("t", piece, n * raw_nbytes, n * raw_nbytes) for n, piece in enumerate(pieces)]
        return [len(span) for span in joined(moves, raw, raw)]

    assert spans(1000, raw, "rows") == [1] * 6
    assert spans(1000, raw // 2, "rows") == [2, 2, 2]
    assert spans(raw // 3, raw // 3, "raw") == [3, 3]


class Asked(Sources):
    """One thread reads, and what it asks for is counted."""

    threads = 1
    requests = 0

    def read(self, name: str, start: int, out: memoryview) -> None:
        self.requests += 1
        super().read(name, start, out)

    def view(self, name: str, start: int, nbytes: int) -> memoryview | None:
        self.requests += 1
        return super().view(name, start, nbytes)


def in_two_files(root: Path, count: int, between: bytes, pieces_each: int = 4, size: int = 64) -> Manifest:
    """Entries of pieces by turns in one file and the other, and what lies between them there."""
    storage, chunks = LocalStorage(root), [bytes([number]) * size for number in range(pieces_each)]
    entries, blobs, files = dict[str, Entry](), [bytearray(), bytearray()], list[DataFile]()
    for number in range(count):
        pieces = list[Piece]()
        for at, chunk in enumerate(chunks):
            blob = blobs[at % 2]
            pieces.append(Piece(at % 2, len(blob), len(chunk), digest(chunk), len(chunk)))
            blob += chunk + between
        entries[f"t{number}"] = Entry("uint8", (size * pieces_each,), tuple(pieces), "U8")
    for part, blob in enumerate(blobs):
        files.append(DataFile(names.data_name("00000001-s0000000001-00000000", part=part + 1), len(blob)))
        storage.put(files[-1].name, [memoryview(blob)])
    info = SnapshotInfo("00000001-s0000000001-00000000", 1, 1, None, "manual", 0.0, size * pieces_each * count)
    return Manifest(info, "run", {"size": 1}, {}, tuple(files), entries, {})


@pytest.mark.parametrize(("pieces", "size"), [(4, 64), (26, 100 << 10)])
def test_what_lies_between_pieces_in_a_file_goes_nowhere(tmp_path: Path, pieces: int, size: int) -> None:
    """In an entry's memory there is another piece in its place; also where they would make a large request."""
    manifest = in_two_files(tmp_path, 1, b"?" * size, pieces, size)
    expected = b"".join(bytes([number]) * size for number in range(pieces))
    for sources in (Sources([LocalStorage(tmp_path)]), Asked([LocalStorage(tmp_path)])):
        assert read_entries(sources, manifest)["t0"].numpy().tobytes() == expected


@pytest.mark.parametrize(("shape", "kept"), [((0,), 4), ((7,), 4), ((9,), 0)])
def test_a_shape_that_its_pieces_do_not_have_is_damage(tmp_path: Path, shape: tuple[int, ...], kept: int) -> None:
    """With a name of a dtype that only torch knows, the manifest's own checks cannot tell."""
    manifest = in_two_files(tmp_path, 1, b"")
    entry = manifest.entries["t0"]
    wrong = replace(entry, dtype="double", shape=shape, pieces=entry.pieces[:kept])
    with pytest.raises(CorruptError, match="t0"):
        read_entries(Sources([LocalStorage(tmp_path)]), replace(manifest, entries={"t0": wrong}))


def test_small_pieces_of_many_entries_are_read_in_few_requests(tmp_path: Path) -> None:
    """Those of entries that lie in several files, too."""
    manifest = in_two_files(tmp_path, 50, b"")
    asked = Asked([LocalStorage(tmp_path)])
    assert len({one.sum().item() for one in read_entries(asked, manifest).values()}) == 1
    assert asked.requests <= 4


def test_a_turn_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what was waited for; a turn that ended is there for the next one."""
    monkeypatch.setattr(decode, "TURN_SECONDS", 0.01)
    turns = ReadLimiter(1, "reading from there")
    with turns.one(), pytest.raises(StorageError, match="reading from there"), turns.one():
        pass
    with turns.one():
        pass
