"""Copies between places of a run: whole, verified, resumable, and never of another run."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ckpt_engine.copy import transfer
from ckpt_engine.copy.transfer import CopySourceError, RunText, adopt_run, copy_data, copy_snapshot, scratch_of
from ckpt_engine.errors import CorruptError, ForeignError, StorageError, StorageFullError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import DataFile, Entry, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, WrapperStorage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import data_file, info, manifest, save


class Remote(WrapperStorage):
    """A storage that is not a local disk as far as anybody can tell; `before` is called before each operation."""

    capabilities = Capabilities()  # type: ignore[assignment]

    def __init__(self, root: Path, before: Callable[[str, str], None] = lambda what, name: None) -> None:
        super().__init__(LocalStorage(root))
        self.url = f"remote://{root.name}"
        self.before = before

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self.before("put", name)
        self.inner.put(name, blocks, exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.before("get", name)
        return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.before("get", name)
        self.inner.get_into(name, start, out)

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        self.before("list", prefix)
        return self.inner.list(prefix)

    def delete(self, *names: str) -> None:
        for name in names:
            self.before("delete", name)
        self.inner.delete(*names)


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(params=["local to local", "local to remote", "remote to local", "remote to remote"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Repository, Repository]:
    """A source with two snapshots that share data, and an empty target that is of the same run."""
    kinds = [LocalStorage if kind == "local" else Remote for kind in request.param.split(" to ")]
    local = Repository(LocalStorage(tmp_path / "source"))
    first = save(local, 10)
    save(local, 20, shared=[names.data_name(first)])
    source = Repository(kinds[0](tmp_path / "source"))
    return source, adopt_run(RunText.of(source), kinds[1](tmp_path / "target"))


def test_a_copy_is_the_same_byte_for_byte(pair: tuple[Repository, Repository], tmp_path: Path) -> None:
    """Between all kinds of storage; data that is there already is not sent again."""
    source, target = pair
    first, second = [parsed.id for parsed in source.ids()]
    one = copy_snapshot(source, target, second, partial(copy_data, source, target, scratch=str(tmp_path)))
    assert one.present_bytes == 0
    two = copy_snapshot(source, target, first, partial(copy_data, source, target, scratch=str(tmp_path)))
    assert two.sent_bytes == 0
    assert one.sent_bytes == 2 * two.present_bytes == sum(file.nbytes for file in source.read(second).files)
    assert files(tmp_path / "source") == files(tmp_path / "target")
    assert copy_snapshot(source, target, first).sent_bytes == 0
    assert target.read(second).info == source.read(second).info


def test_the_manifest_goes_last(tmp_path: Path) -> None:
    """Whichever write fails, no snapshot is there that is not whole, and the next copy sends only what is missing."""
    local = Repository(LocalStorage(tmp_path / "source"))
    first = save(local, 10)
    second = save(local, 20, shared=[names.data_name(first)])
    for failing in range(3):
        seen: list[str] = []

        def before(what: str, name: str, seen: list[str] = seen, failing: int = failing) -> None:
            if what == "put":
                if len(seen) == failing:
                    raise StorageError("broken")
                seen.append(name)

        root = tmp_path / f"target{failing}"
        adopt_run(RunText.of(local), LocalStorage(root))
        target = Repository(Remote(root, before))
        with pytest.raises(StorageError, match="broken"):
            copy_snapshot(local, target, second)
        assert target.ids() == ()
        assert len(seen) == failing
        again = Repository(LocalStorage(root))
        done = copy_snapshot(local, again, second)
        assert (done.present_bytes > 0) == (failing > 0)
        assert [parsed.id for parsed in again.ids()] == [second]


@pytest.mark.parametrize("kind", [LocalStorage, Remote])
def test_damage_does_not_spread(kind: type, tmp_path: Path) -> None:
    """A flipped bit, a short file and a broken manifest stop the copy, and it is the source that is blamed."""
    for damage in ("flip", "short", "manifest", "missing"):
        root = tmp_path / damage
        source = Repository(LocalStorage(root))
        snapshot = save(source)
        path = root / (names.manifest_name(snapshot) if damage == "manifest" else names.data_name(snapshot))
        text = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        else:
            text[-3] ^= 1
            path.write_bytes(text[:-1] if damage == "short" else text)
        target = adopt_run(RunText.of(source), LocalStorage(tmp_path / f"{damage}-target"))
        with pytest.raises(CopySourceError) as caught:
            copy_snapshot(Repository(kind(root)), target, snapshot)
        assert isinstance(caught.value.error, StorageMissingError if damage == "missing" else CorruptError)
        assert target.ids() == ()
        assert list(target.storage.list(names.DATA)) == []


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    """A place with snapshots of another run, or with foreign files, is refused untouched."""
    source, other = Repository(LocalStorage(tmp_path / "a")), Repository(LocalStorage(tmp_path / "b"))
    save(source)
    save(other)
    before = files(tmp_path / "b")
    with pytest.raises(ForeignError, match="holds another run"):
        adopt_run(RunText.of(source), other.storage)
    assert files(tmp_path / "b") == before
    (tmp_path / "c").mkdir()
    (tmp_path / "c/thesis.tex").write_text("mine")
    with pytest.raises(ForeignError, match="not of ckpt-engine"):
        adopt_run(RunText.of(source), LocalStorage(tmp_path / "c"))
    assert files(tmp_path / "c") == {"thesis.tex": b"mine"}


def test_a_place_that_was_begun_and_never_used_joins_the_run(tmp_path: Path) -> None:
    """A record without snapshots is what a first start without the other places leaves."""
    source, target = Repository(LocalStorage(tmp_path / "a")), Repository(LocalStorage(tmp_path / "b"))
    save(source)
    target.create_if_absent()
    assert adopt_run(RunText.of(source), target.storage).run_id == source.run_id
    assert files(tmp_path / "b")["ckpt.json"] == files(tmp_path / "a")["ckpt.json"]


def test_data_of_another_size_is_replaced(tmp_path: Path) -> None:
    """A storage that is not atomic may show half a file: it is not taken for the data."""
    source = Repository(LocalStorage(tmp_path / "a"))
    snapshot = save(source)
    target = adopt_run(RunText.of(source), LocalStorage(tmp_path / "b"))
    target.storage.put(names.data_name(snapshot), [memoryview(b"half")])
    copy_snapshot(source, target, snapshot)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_full_scratch_disk_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched is reserved on the scratch disk before: a full one raises instead of killing the process."""
    source = Repository(Remote(tmp_path / "a"))
    snapshot = save(Repository(LocalStorage(tmp_path / "a")))

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.posix_fallocate", full)
    target = adopt_run(RunText.of(source), Remote(tmp_path / "b"))
    with pytest.raises(CopySourceError, match="CKPT301"):
        copy_snapshot(source, target, snapshot)
    assert target.ids() == ()


def test_a_full_target_disk_is_the_targets_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is reserved where the file belongs; nothing is left behind there."""
    source = Repository(Remote(tmp_path / "a"))
    snapshot = save(Repository(LocalStorage(tmp_path / "a")))

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    target = adopt_run(RunText.of(source), LocalStorage(tmp_path / "b"))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageFullError):
        copy_snapshot(source, target, snapshot)
    assert set(files(tmp_path / "b")) == {names.RECORD}


class Streamed:
    """A remote snapshot of one entry of many pieces, and what was asked of its data file."""

    def __init__(self, root: Path, pieces: int = 40) -> None:
        self.asked: list[tuple[int, int]] = []
        self.break_after: int | None = None
        storage = Remote(root, self._before)
        inner = storage.get_into

        def get_into(name: str, start: int, out: memoryview) -> None:
            if self.break_after is not None and len(self.asked) >= self.break_after:
                raise StorageError("the cable is out")
            self.asked.append((start, out.nbytes))
            inner(name, start, out)

        storage.get_into = get_into  # type: ignore[method-assign]
        self.repository = Repository(storage)
        local = Repository(LocalStorage(root))
        local.create_if_absent()
        about = info(1)
        text = os.urandom(pieces * 1000)
        whole = data_file(text)
        start = len(whole) - len(text)
        parts = tuple(
            Piece(0, start + at, 1000, digest(text[at : at + 1000]), 1000) for at in range(0, len(text), 1000)
        )
        entry = Entry("uint8", (len(text),), parts, "U8")
        made = replace(
            manifest(about, local.run_id),
            files=(DataFile(names.data_name(about.id), len(whole)),),
            entries={"w": entry},
        )
        local.storage.put(names.data_name(about.id), [memoryview(whole)])
        local.commit(made)
        self.snapshot, self.nbytes = about.id, len(whole)

    def _before(self, what: str, name: str) -> None:
        pass


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Streamed:
    monkeypatch.setattr(transfer, "RANGE_BYTES", 4000)
    monkeypatch.setattr(transfer, "RANGES_AT_ONCE", 1)
    return Streamed(tmp_path / "source")


class Watched(Disk):
    """Counts the bytes that are written."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        done = super().write(fd, data, offset)
        self.written += done
        return done


def test_what_is_remote_is_written_once(streamed: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight to the disk where it belongs: no scratch file, each byte fetched and written once."""
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    disk = Watched()
    target = adopt_run(RunText.of(streamed.repository), LocalStorage(tmp_path / "target", disk=disk))
    before = disk.written
    done = copy_snapshot(streamed.repository, target, streamed.snapshot)
    assert done.sent_bytes == streamed.nbytes == sum(nbytes for _, nbytes in streamed.asked)
    manifest_bytes = (tmp_path / "target" / names.manifest_name(streamed.snapshot)).stat().st_size
    assert disk.written - before == streamed.nbytes + manifest_bytes
    assert files(tmp_path / "source") == files(tmp_path / "target")


def test_an_interrupted_file_goes_on_where_it_was(streamed: Streamed, tmp_path: Path) -> None:
    """By another process too: what has arrived is compared with its digests and not fetched again."""
    target = adopt_run(RunText.of(streamed.repository), LocalStorage(tmp_path / "target"))
    streamed.break_after = 6
    with pytest.raises(CopySourceError, match="the cable is out"):
        copy_snapshot(streamed.repository, target, streamed.snapshot)
    assert list(target.storage.list("data/")) == []
    streamed.break_after = None
    streamed.asked.clear()
    again = Repository(LocalStorage(tmp_path / "target"))
    done = copy_snapshot(streamed.repository, again, streamed.snapshot)
    # The first range has the header, which no digest covers: it is fetched again.
    assert done.present_bytes == 5 * 4000
    assert done.sent_bytes == streamed.nbytes - done.present_bytes == sum(nbytes for _, nbytes in streamed.asked)
    assert files(tmp_path / "source") == files(tmp_path / "target")


def test_garbage_of_an_earlier_attempt_is_not_believed(streamed: Streamed, tmp_path: Path) -> None:
    """After a power loss the half file may contain anything, and have any size."""
    target = adopt_run(RunText.of(streamed.repository), LocalStorage(tmp_path / "target"))
    streamed.break_after = 6
    with pytest.raises(CopySourceError):
        copy_snapshot(streamed.repository, target, streamed.snapshot)
    (partial,) = (tmp_path / "target/data").iterdir()
    for text in (b"\xff" * (streamed.nbytes + 5000), b"", b"\0" * 3):
        partial.write_bytes(text)
        streamed.break_after = len(streamed.asked) + 6
        with pytest.raises(CopySourceError):
            copy_snapshot(streamed.repository, target, streamed.snapshot)
    streamed.break_after = None
    copy_snapshot(streamed.repository, target, streamed.snapshot)
    assert files(tmp_path / "source") == files(tmp_path / "target")


def test_a_half_file_is_swept_when_no_copy_continues_it(streamed: Streamed, tmp_path: Path) -> None:
    """It is a temporary file as any: the next collection removes it."""
    target = adopt_run(RunText.of(streamed.repository), LocalStorage(tmp_path / "target"))
    streamed.break_after = 6
    with pytest.raises(CopySourceError):
        copy_snapshot(streamed.repository, target, streamed.snapshot)
    assert target.storage.sweep() == streamed.nbytes
    assert set(files(tmp_path / "target")) == {names.RECORD}


def test_scratch_is_next_to_local_data(tmp_path: Path) -> None:
    """What is fetched waits on the disk of the nearest place, if that is one."""
    assert scratch_of(LocalStorage(tmp_path)) == str(tmp_path)
    assert scratch_of(LocalStorage(tmp_path / "none")) is None
    assert scratch_of(Remote(tmp_path)) is None
