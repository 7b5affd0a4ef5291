"""A leader lends its root's data files to those who know the secret, and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import CorruptError, StorageError, StorageMissingError
from ckpt_engine.restore import folder_service
from ckpt_engine.restore.folder_service import FolderClient, FolderServer
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import peer_service

NAME = "data/00000001-s0000000001-0123abcd-r00000.safetensors"
BYTES = os.urandom(300_000)


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    found = LocalStorage(tmp_path / "run")
    found.put(NAME, [memoryview(BYTES)])
    return found


@pytest.fixture
def lender(root: LocalStorage) -> Iterator[FolderServer]:
    made = FolderServer(root, "127.0.0.1", "secret", 2)
    yield made
    made.close()


@pytest.fixture
def borrower(lender: FolderServer) -> Iterator[FolderClient]:
    made = FolderClient("127.0.0.1", lender.port, "secret", 2, 2)
    yield made
    made.close()


def read(borrower: FolderClient, start: int, nbytes: int, name: str = NAME) -> bytes:
    out = bytearray(nbytes)
    borrower.get_into(name, start, memoryview(out))
    return bytes(out)


def test_any_bytes_of_a_data_file(borrower: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle, none at all, by several threads at once, and more than one request carries."""
    monkeypatch.setattr(folder_service, "MOST_BYTES", 1000)
    assert read(borrower, 5, 2_999) == BYTES[5:3004]
    assert read(borrower, 0, 0) == b""
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(read(borrower, 0, len(BYTES)))) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [BYTES] * 9
    assert len(borrower._idle) <= folder_service.LINES


def test_what_is_not_there_is_said_as_by_a_storage(borrower: FolderClient) -> None:
    """Missing files and ends of files have their own errors; the connection goes on."""
    with pytest.raises(StorageMissingError):
        read(borrower, 0, 10, NAME.replace("r00000", "r00001"))
    with pytest.raises(CorruptError, match="needed up to"):
        read(borrower, len(BYTES) - 5, 10)
    assert read(borrower, 0, 10) == BYTES[:10]


def test_only_data_files_are_lent(borrower: FolderClient, tmp_path: Path) -> None:
    """No other file of the machine, however it is called."""
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", "data/../../secret", "lease.json", "/etc/passwd"):
        with pytest.raises(StorageError, match="not lent"):
            read(borrower, 0, 1, name)


def test_without_the_secret_there_is_nothing(lender: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender closes the connection of a client that has another secret."""
    monkeypatch.setattr(folder_service, "PATIENCE_SECONDS", 0.0)
    stranger = FolderClient("127.0.0.1", lender.port, "guess", 0, 2)
    with pytest.raises(StorageError, match=r"the folder of rank 0 at 127\.0\.0\.1 does not answer"):
        read(stranger, 0, 1)


def test_a_connection_that_broke_is_made_again(borrower: FolderClient) -> None:
    """Once; what is asked of a leader that is gone fails."""
    assert read(borrower, 0, 10) == BYTES[:10]
    for line in borrower._idle:
        line._sock.shutdown(2)
    assert read(borrower, 0, 10) == BYTES[:10]


def test_a_leader_that_is_gone_fails_the_read(lender: FolderServer, borrower: FolderClient) -> None:
    """The read fails at once and not after a timeout."""
    assert read(borrower, 0, 10) == BYTES[:10]
    lender.close()
    with pytest.raises(StorageError, match=r"the folder of rank 2 at 127\.0\.0\.1 does not answer"):
        read(borrower, 0, 10)


@given(ranks=st.integers(1, 5000))
def test_all_ranks_together_have_no_more_connections_than_a_leader_takes(ranks: int) -> None:
    """Each rank may have one connection at least; else all together stay below the limit of a leader."""
    each = folder_service.lines(ranks)
    assert 1 <= each <= folder_service.LINES
    assert each * ranks <= folder_service.ALL_LINES or each == 1
    assert folder_service.ALL_LINES < peer_service._MOST_CONNECTIONS


def read_all(borrowers: list[FolderClient]) -> list[object]:
    found: list[object] = []

    def one(borrower: FolderClient) -> None:
        try:
            found.append(read(borrower, 0, len(BYTES)) == BYTES)
        except StorageError as err:
            found.append(err)

    threads = [threading.Thread(target=one, args=(borrower,)) for borrower in borrowers for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("ranks", [2, 1000])
def test_more_ranks_than_a_leader_takes_come_one_after_the_other(lender: FolderServer, ranks: int) -> None:
    """It hangs up on those who are too many: they come again, and get what others have let go of."""
    lender._room = 12 if ranks == 2 else 2
    borrowers = [FolderClient("127.0.0.1", lender.port, "secret", 0, ranks) for _ in range(4)]
    assert read_all(borrowers) == [True] * 12
    assert all(not borrower._idle for borrower in borrowers) == (ranks > folder_service.ALL_LINES)
    for borrower in borrowers:
        borrower.close()


def test_a_leader_reads_for_so_many_at_once(root: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait without memory of their own."""
    monkeypatch.setattr(folder_service, "AT_ONCE", 2)
    lock, busy, most = threading.Lock(), 0, 0
    found, both, together = FolderServer._found, threading.Event(), threading.Event()

    def count(self: FolderServer, request: dict[str, Any]) -> Any:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
            if busy == 2:
                both.set()
            if busy > 2:
                together.set()
        assert both.wait(60)
        together.wait(0.05)
        try:
            return found(self, request)
        finally:
            with lock:
                busy -= 1

    monkeypatch.setattr(FolderServer, "_found", count)
    lender = FolderServer(root, "127.0.0.1", "secret", 4)
    borrowers = [FolderClient("127.0.0.1", lender.port, "secret", 0, 4) for _ in range(4)]
    assert read_all(borrowers) == [True] * 12
    assert most == 2
    for borrower in borrowers:
        borrower.close()
    lender.close()


def test_what_is_read_at_once_is_small(borrower: FolderClient) -> None:
    """A large request is several, and one that is too large is refused."""
    assert folder_service.MOST_BYTES * folder_service.AT_ONCE <= 64 << 20
    with pytest.raises(StorageError, match="not lent"):
        borrower._ask({"what": "read", "name": NAME, "start": 0, "nbytes": folder_service.MOST_BYTES + 1})
