"""A request that several places get, or that is repeated later, fails at once where no server listens."""

from __future__ import annotations

import errno
import socket

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage import open_storage, retries
from ckpt_engine.store.storage.retries import asking
from tests.servers.s3 import free_port

FOR_EVER = {"retry_seconds": 1e9, "timeout_seconds": 1e6}


def test_a_closed_port_is_an_answer() -> None:
    """The store would be tried again for ever otherwise, and the test would not end."""
    endpoint = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "region_name": "us-east-1"}
    storage = open_storage("s3://bucket/run", {"key": "k", "secret": "s", "client_kwargs": endpoint, **FOR_EVER})
    with asking(), pytest.raises(StorageError, match="Could not connect"):
        list(storage.list(""))
    with asking(), pytest.raises(StorageError, match="Could not connect"):
        storage.put("a", [memoryview(b"a")])


def test_a_library_that_finds_no_server_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stores that fsspec reaches fail at once as well."""
    storage = open_storage("memory://refusing/run", FOR_EVER)

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(storage._fs, "info", refuse)  # type: ignore[attr-defined]
    with asking(), pytest.raises(StorageError, match="refused"):
        list(storage.list(""))


@pytest.mark.parametrize("base", ["TransportError", "ClientConnectionError", "ServiceRequestError", "ConnectionError"])
def test_a_library_that_loses_its_connection_is_asked_again(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of httpx, aiohttp, Azure and requests raise errors that are no ConnectionError of Python's."""
    storage = open_storage(f"memory://lost-{base}/run", FOR_EVER)
    kind = type("Lost", (type(base, (Exception,), {}),), {})
    real, errors = storage._fs.open, [kind("a moment ago")]  # type: ignore[attr-defined]

    def lose(*arguments: object, **more: object) -> object:
        if errors:
            raise errors.pop()
        return real(*arguments, **more)

    monkeypatch.setattr(storage._fs, "open", lose)  # type: ignore[attr-defined]
    storage.put("a", [memoryview(b"a")])
    assert (storage.get("a"), errors) == (b"a", [])


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), True),
        (OSError(errno.EHOSTUNREACH, ""), True),
        (socket.gaierror(socket.EAI_NONAME, ""), True),
        (socket.gaierror(socket.EAI_AGAIN, ""), False),
        (ConnectionResetError(errno.ECONNRESET, ""), False),
        (TimeoutError(), False),
    ],
)
def test_only_a_missing_server_is_hopeless_and_only_while_asking(error: OSError, hopeless: bool) -> None:
    """A server that is busy, or whose network is, is tried again by all; however libraries wrap the error."""
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    with asking():
        assert retries.is_hopeless(error) is retries.is_hopeless(wrapped) is hopeless
    assert not retries.is_hopeless(error)
