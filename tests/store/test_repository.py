"""A repository lists what is there, says what is damaged, and never takes other people's folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ckpt_engine.errors import (
    CorruptError,
    ForeignError,
    FormatError,
    NewerFormatError,
    StorageExistsError,
    StorageMissingError,
)
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.testing import put
from tests.store.samples import files, info, manifest, save


class _CountingStorage(LocalStorage):
    """Counts the bytes and calls of reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int | None]] = []

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.reads.append((name, nbytes))
        return super().get(name, start, nbytes)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(LocalStorage(tmp_path / "run"))


def test_nothing_is_written_by_looking(repository: Repository, tmp_path: Path) -> None:
    """A run that does not exist has no record, no snapshots, and still does not exist afterwards."""
    assert repository.record() is None
    assert repository.list() == []
    assert repository.next_seq() == 1
    assert repository.unreferenced().unreferenced == ()
    with pytest.raises(StorageMissingError, match="no run at"):
        _ = repository.run_id
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_made_once(repository: Repository, tmp_path: Path) -> None:
    """Every later program finds the same run id, as plain JSON."""
    record = repository.create_if_absent()
    assert repository.create_if_absent() == record
    assert Repository(repository.storage).record() == record
    assert Repository(repository.storage).run_id == record.run
    text = json.loads((tmp_path / "run" / "ckpt.json").read_text())
    assert text.pop("digest").startswith("xxh3-128:")
    assert text == {"format": "ckpt-engine", "version": 1, "run": record.run, "created": record.created}


def test_snapshots_are_listed_by_age_and_not_by_step(repository: Repository) -> None:
    """A resumed run repeats steps: newest is what was committed last."""
    ids = [save(repository, step) for step in (100, 200, 150, 90)]
    assert [one.id for one in repository.list()] == ids
    assert [one.id for one in Repository(repository.storage).list()] == ids
    assert [one.seq for one in repository.list()] == [1, 2, 3, 4]
    assert [one.step for one in repository.ids()] == [100, 200, 150, 90]


def test_a_sequence_number_longer_than_its_field_still_sorts(repository: Repository) -> None:
    """After 99,999,999 snapshots names get longer; order does not change."""
    run = repository.create_if_absent().run
    for seq in (99_999_999, 100_000_000, 5):
        repository.commit(manifest(info(seq, 1), run))
    assert [one.seq for one in Repository(repository.storage).list()] == [5, 99_999_999, 100_000_000]
    assert repository.next_seq() == 100_000_001


def test_a_listing_reads_only_heads_and_each_once(repository: Repository, tmp_path: Path) -> None:
    """However big the manifests are, a listing costs one small read per snapshot it has not seen yet."""
    run = repository.create_if_absent().run
    big = dataclasses.replace(manifest(info(1), run), notes={"long": "x" * 100_000})
    repository.commit(big)
    save(repository)
    storage = _CountingStorage(tmp_path / "run")
    fresh = Repository(storage)
    assert len(fresh.list()) == 2
    assert [nbytes for _, nbytes in storage.reads] == [manifest_codec.HEAD_BYTES] * 2
    save(repository)
    assert len(fresh.list()) == 3
    assert len(storage.reads) == 3


def test_many_metrics_are_listed_all_the_same(repository: Repository) -> None:
    """An info longer than the head is read whole."""
    run = repository.create_if_absent().run
    metrics = {f"metric number {i}": float(i) for i in range(1000)}
    repository.commit(manifest(info(1, metrics=metrics), run))
    assert Repository(repository.storage).list()[0].metrics == metrics


def test_a_committed_manifest_is_read_back(repository: Repository) -> None:
    """Exactly the values that were committed."""
    made = manifest(info(1), repository.create_if_absent().run)
    repository.commit(made)
    assert Repository(repository.storage).read(made.info.id) == made


def test_a_snapshot_is_committed_once(repository: Repository) -> None:
    """A second commit fails, and the first one stays."""
    made = manifest(info(1), repository.create_if_absent().run)
    repository.commit(made)
    with pytest.raises(StorageExistsError):
        repository.commit(dataclasses.replace(made, notes={}))
    assert repository.read(made.info.id) == made


def test_a_snapshot_without_a_proper_id_is_not_committed(repository: Repository, tmp_path: Path) -> None:
    """A manifest that no listing would find is refused."""
    with pytest.raises(ValueError, match="snapshot id"):
        repository.commit(manifest(info(snapshot="latest")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("snapshot", ["00000001-s0000000001-deadbeef", "../ckpt", "latest"])
def test_a_snapshot_that_does_not_exist_is_missing(repository: Repository, snapshot: str) -> None:
    """The message names what was asked for, and says how to list what there is."""
    repository.create_if_absent()
    with pytest.raises(StorageMissingError, match=rf"{snapshot}.*→ ckpt ls"):
        repository.read(snapshot)


def _spoil(repository: Repository, snapshot: str, data: bytes) -> None:
    assert isinstance(repository.storage, LocalStorage)
    Path(repository.storage.path(names.manifest_name(snapshot))).write_bytes(data)


def test_damaged_manifests_are_listed_apart_with_their_reason(repository: Repository) -> None:
    """Truncated, foreign, newer and exchanged ones do not hide the healthy ones."""
    good, short, json_, newer, other = (save(repository, step) for step in range(5))
    text = repository.storage.get(names.manifest_name(newer))
    _spoil(repository, short, repository.storage.get(names.manifest_name(short))[:40])
    _spoil(repository, json_, b'{"epoch": 3}')
    _spoil(repository, newer, text.replace(b'"version":1', b'"version":7'))
    _spoil(repository, other, repository.storage.get(names.manifest_name(good)))
    listing = Repository(repository.storage).scan()
    assert [one.id for one in listing.snapshots] == [good]
    assert {bad.id: type(bad.error) for bad in listing.damaged} == {
        short: CorruptError,
        json_: ForeignError,
        newer: NewerFormatError,
        other: CorruptError,
    }
    assert all(f"snapshots/{bad.id}.json" in str(bad.error) for bad in listing.damaged)
    for bad in listing.damaged:
        with pytest.raises(FormatError, match=f"snapshots/{bad.id}.json"):
            Repository(repository.storage).read(bad.id)
    assert repository.next_seq() == 6


def test_other_files_among_the_manifests_are_ignored(repository: Repository) -> None:
    """Files whose names are no snapshot's are neither listed nor reported as damage."""
    snapshot = save(repository)
    for name in (
        "snapshots/notes.json",
        "snapshots/latest",
        f"snapshots/{snapshot}.json.bak",
        f"snapshots/x/{snapshot}.json",
    ):
        put(repository.storage, name, b"{}")
    listing = Repository(repository.storage).scan()
    assert [one.id for one in listing.snapshots] == [snapshot]
    assert listing.damaged == ()


def test_a_snapshot_forgotten_while_listing_is_no_error(repository: Repository, tmp_path: Path) -> None:
    """Readers run beside a writer that forgets."""
    first, second = save(repository, 1), save(repository, 2)

    class Racing(LocalStorage):
        def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
            if first in name:
                self.delete(name)
            return super().get(name, start, nbytes)

    assert [one.id for one in Repository(Racing(tmp_path / "run")).list()] == [second]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", CorruptError),
        (b'{"format":"ckpt-eng', CorruptError),
        (b"[1]", ForeignError),
        (b'{"name":"my config"}', ForeignError),
        (b'{"format":"ckpt-engine","version":2,"run":"x","created":1}', NewerFormatError),
        (b'{"format":"ckpt-engine","version":1}', CorruptError),
        (b'{"format":"ckpt-engine","version":"one","run":"x","created":1}', CorruptError),
    ],
)
def test_an_unusable_record_is_a_clear_error_and_is_not_replaced(
    repository: Repository, tmp_path: Path, content: bytes, error: type[FormatError]
) -> None:
    """Foreign, newer and damaged records raise different errors; the file stays."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt.json").write_bytes(content)
    for use in (repository.record, repository.create_if_absent):
        with pytest.raises(error, match=r"ckpt\.json"):
            use()
    assert (tmp_path / "run" / "ckpt.json").read_bytes() == content
    assert files(tmp_path / "run") == {"ckpt.json"}


def test_snapshots_can_be_read_with_a_damaged_record(repository: Repository, tmp_path: Path) -> None:
    """The record serves writers; what was saved stays readable without it."""
    snapshot = save(repository)
    (tmp_path / "run" / "ckpt.json").write_bytes(b"")
    fresh = Repository(repository.storage)
    assert [one.id for one in fresh.list()] == [snapshot]
    assert fresh.read(snapshot).info.id == snapshot


def test_a_lost_record_is_rebuilt_from_the_snapshots(repository: Repository, tmp_path: Path) -> None:
    """With the same run id, also past a damaged newest manifest."""
    run = repository.create_if_absent().run
    save(repository)
    _spoil(repository, save(repository), b"")
    (tmp_path / "run" / "ckpt.json").unlink()
    assert Repository(repository.storage).create_if_absent().run == run


@pytest.mark.parametrize(
    "name", ["notes.txt", "sub/model.ckpt", "snapshots/mine.json", "data/x.safetensors", ".hidden"]
)
def test_a_folder_with_other_files_is_never_written_to(repository: Repository, tmp_path: Path, name: str) -> None:
    """The error names a file that is there; nothing is added."""
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for use in (repository.record, repository.create_if_absent):
        with pytest.raises(ForeignError, match=name):
            use()
    assert files(tmp_path / "run") == {name}


@pytest.mark.parametrize("name", ["lease.json", ".tmp-0123456789abcdef-ckpt.json"])
def test_what_a_crash_leaves_before_the_first_record_is_not_foreign(
    repository: Repository, tmp_path: Path, name: str
) -> None:
    """Dying right at the start does not lock the user out."""
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / name).write_text("")
    assert repository.record() is None
    repository.create_if_absent()


def test_ids_are_unique_and_say_seq_and_step() -> None:
    """Two writers never choose the same name; the program's random streams are not touched."""
    import random

    random.seed(1)
    before = random.getstate()
    made = {names.snapshot_id(3, 1234) for _ in range(1000)}
    assert random.getstate() == before
    assert len(made) == 1000
    parsed = names.parse_id(made.pop())
    assert parsed is not None
    assert (parsed.seq, parsed.step) == (3, 1234)
    with pytest.raises(ValueError, match="negative"):
        names.snapshot_id(1, -1)


def test_names_that_only_look_like_ours_are_foreign() -> None:
    """Names with another case, whitespace or extra parts are foreign."""
    good = names.snapshot_id(1, 1)
    assert names.is_ours(names.manifest_name(good))
    assert names.is_ours(names.data_name(good, 12, 3))
    owner = names.data_owner(names.data_name(good, 12, 3))
    assert owner is not None
    assert owner.id == good
    for name in (
        f"snapshots/{good}.JSON",
        f"snapshots/{good}.json\n",
        f"data/{good}.safetensors",
        f"data/{good}-r1.safetensors",
        f"data/{good}-r00000.safetensors.bak",
        f"data/x{good}-r00000.safetensors",
        f"data/{good}-r0000٣.safetensors",
        "ckpt.json.old",
    ):
        assert not names.is_ours(name), name
