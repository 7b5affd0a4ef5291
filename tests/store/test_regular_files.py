"""What is read from a store is a regular file of at most the size that the format allows, and no link is followed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.transfer import mapped
from ckpt_engine.errors import CkptError, ConfigError, CorruptError, SnapshotFailedError
from ckpt_engine.store import manifest_codec, names, pins
from ckpt_engine.store.lease import acquire, read_holder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import info, manifest, save

SNAPSHOT = "00000001-s0000000010-0123abcd"
KINDS = {
    "record": names.RECORD,
    "lease": names.LEASE,
    "status": names.STATUS,
    "catalog": names.CATALOG,
    "rollback": names.ROLLBACK,
    "attempts": names.ATTEMPTS,
    "manifest": names.manifest_name(SNAPSHOT),
    "data": names.data_name(SNAPSHOT),
    "part": names.part_name(SNAPSHOT, 0),
    "wanted": names.wanted_name(SNAPSHOT),
    "pin": names.pin_name(SNAPSHOT),
}
WAIT_SECONDS = 20.0


def _link(path: Path) -> None:
    outside = path.with_name("elsewhere")
    outside.write_bytes(b"of somebody else")
    path.symlink_to(outside)


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:  # the names of sockets are short
            server.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


STRANGE: dict[str, Callable[[Path], None]] = {
    "a link": _link,
    "a named pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a socket": _socket,
}


def _within_time(work: Callable[[], object]) -> BaseException | None:
    """What `work` raises; a failure if it hangs."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as err:  # noqa: BLE001 - given to the test
            raised.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_by_every_way_to_read_it(kind: str, what: str, tmp_path: Path) -> None:
    """A pipe would hang its reader for ever, and a link shows what is not of the run."""
    storage, path = LocalStorage(tmp_path), tmp_path / KINDS[kind]
    path.parent.mkdir(exist_ok=True)
    STRANGE[what](path)
    for read in (
        lambda: storage.get(KINDS[kind]),
        lambda: storage.get(KINDS[kind], 0, 4),
        lambda: storage.get_into(KINDS[kind], 0, memoryview(bytearray(4))),
        lambda: storage.get_into(KINDS[kind], 0, memoryview(bytearray(4 << 20))),
    ):
        error = _within_time(read)
        assert isinstance(error, CorruptError), error
        assert str(path) in error.message
        assert what in error.message


def test_a_mapped_data_file_is_no_link(tmp_path: Path) -> None:
    """The fast way to copy files obeys as well; the file was exchanged after its digests were checked."""
    repository = Repository(LocalStorage(tmp_path))
    snapshot = save(repository)
    found = repository.read(snapshot)
    path = tmp_path / found.files[0].name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(CorruptError, match="a link"), mapped(repository.storage, found.files[0], ()):
        pass


def test_a_root_behind_links_is_read_and_written(tmp_path: Path) -> None:
    """Where a run lies is the user's business: links on the way to its root are followed."""
    real, link = tmp_path / "disk" / "run", tmp_path / "home"
    real.mkdir(parents=True)
    link.symlink_to(tmp_path / "disk")
    repository = Repository(LocalStorage(link / "run"))
    with acquire(repository.storage):
        snapshot = save(repository)
    assert [one.id for one in Repository(LocalStorage(real)).list()] == [snapshot]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_reads_are_capped_by_the_kind_of_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 8 GB takes no memory and no time; one byte more than the format allows is too much."""
    name = KINDS[kind]
    storage, path = LocalStorage(tmp_path), tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 8 << 30)
    with pytest.raises(CorruptError, match=r"8,589,934,592 bytes; the format allows"):
        storage.get(name)
    monkeypatch.setattr(names, "MANIFEST_BYTES", 4000)
    monkeypatch.setattr(names, "SMALL_BYTES", 3000)
    most = names.most_bytes(name)
    os.truncate(path, most)
    assert len(storage.get(name)) == most
    os.truncate(path, most + 1)
    with pytest.raises(CorruptError, match="the format allows"):
        storage.get(name)
    assert storage.get(name, most, 5) == b"\0"


def test_no_writer_makes_what_no_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is too large fails its save and says what to do; a note that is too long is refused."""
    repository = Repository(LocalStorage(tmp_path))
    snapshot = save(repository)
    with pytest.raises(ConfigError, match="note"):
        pins.pin(repository, snapshot, "long " * 30_000)
    assert pins.pins(repository.storage) == []
    whole = manifest(info(2), repository.run_id)
    text = manifest_codec.encode(whole)
    monkeypatch.setattr(names, "MANIFEST_BYTES", len(text))
    assert manifest_codec.encode(whole) == text
    monkeypatch.setattr(names, "MANIFEST_BYTES", len(text) - 1)
    with pytest.raises(SnapshotFailedError, match="the format allows") as caught:
        repository.commit(whole)
    assert caught.value.hint is not None and "tensors" in caught.value.hint
    assert [one.id for one in repository.ids()] == [snapshot]


def test_a_command_line_of_megabytes_leaves_a_lease_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is refused still learns who writes."""
    monkeypatch.setattr("sys.argv", ["train.py", "x" * (3 << 20)])
    with acquire(LocalStorage(tmp_path)):
        holder = read_holder(LocalStorage(tmp_path))
        assert holder is not None and holder.pid == os.getpid() and "train.py xx" in holder.command


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside the run that nothing may change."""
    path = tmp_path / "precious"
    path.write_text("of somebody else")
    yield path
    assert path.read_text() == "of somebody else"


def test_a_lease_that_is_a_link_is_refused_and_its_target_is_left_alone(tmp_path: Path, victim: Path) -> None:
    """Who can write into the folder must not be able to have us overwrite files elsewhere."""
    root = tmp_path / "run"
    save(Repository(LocalStorage(root)))
    lease = root / names.LEASE
    lease.symlink_to(victim)
    with pytest.raises(CorruptError, match="a link") as caught:
        acquire(LocalStorage(root))
    assert str(lease) in caught.value.message
    lease.unlink()
    lease.symlink_to(tmp_path / "not-there")
    with pytest.raises(CorruptError, match="a link"):
        acquire(LocalStorage(root))
    assert not (tmp_path / "not-there").exists()
    lease.unlink()
    os.mkfifo(lease)
    assert isinstance(_within_time(lambda: acquire(LocalStorage(root))), CorruptError)
    assert read_holder(LocalStorage(root)) is None


def test_a_lease_that_becomes_a_link_is_lost(tmp_path: Path) -> None:
    """Even one to the very file: what has this name is no lease of ours any more."""
    with acquire(LocalStorage(tmp_path)) as lease:
        (tmp_path / names.LEASE).rename(tmp_path / "moved")
        (tmp_path / names.LEASE).symlink_to(tmp_path / "moved")
        with pytest.raises(CkptError, match="removed or replaced"):
            lease.check()


def test_no_put_writes_through_a_link(tmp_path: Path, victim: Path) -> None:
    """Objects replace a link of their name; unfinished ones are never written into one."""
    root = tmp_path / "run"
    storage = LocalStorage(root)
    root.mkdir()
    (root / names.CATALOG).symlink_to(victim)
    storage.put(names.CATALOG, [memoryview(b"catalog")], exclusive=False)
    assert storage.get(names.CATALOG) == b"catalog"
    name = names.data_name(SNAPSHOT)
    temp = root / "data" / f".tmp-{'ab' * 8}-{Path(name).name}"
    temp.parent.mkdir()
    temp.symlink_to(victim)
    with pytest.raises(CorruptError, match="a link"):
        storage.receive(name, 3, "ab" * 8, lambda partial: partial.write(0, memoryview(b"abc")))
    storage.sweep()
    assert temp.is_symlink()


def test_a_pin_that_is_no_file_still_pins(tmp_path: Path) -> None:
    """As every damaged pin does: retention goes on."""
    repository = Repository(LocalStorage(tmp_path))
    snapshot = save(repository)
    (tmp_path / "pins").mkdir()
    os.mkfifo(tmp_path / names.pin_name(snapshot))
    assert [pin.id for pin in pins.pins(repository.storage)] == [snapshot]
    assert pins.orphans(repository) == []
