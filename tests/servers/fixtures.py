"""Fixtures for tests that need a server: imported by the test modules that use them."""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.servers.s3 import S3Server, serving
from tests.servers.wire import Wire

_running = ExitStack()


@cache
def _moto_of_this_process(folder: Path) -> S3Server:
    server = _running.enter_context(serving("moto", folder))
    atexit.register(_running.close)  # before the server of interpreters ends, which has begun by now
    return server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """A moto server, the same for all tests of this process: each has a bucket of its own."""
    folder = tmp_path_factory.getbasetemp() / "moto"
    folder.mkdir(exist_ok=True)
    return _moto_of_this_process(folder)


@pytest.fixture
def bucket(moto: S3Server) -> str:
    """A new bucket of it."""
    return moto.make_bucket(f"b{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def proxy(moto: S3Server) -> Iterator[Wire]:
    """A proxy before it, kept so that clients are."""
    host, _, port = moto.url.removeprefix("http://").partition(":")
    with Wire(host, int(port)) as made:
        yield made


@pytest.fixture
def wire(proxy: Wire) -> Iterator[Wire]:
    """A network before it that is good until a rule is given."""
    proxy.log.clear()
    proxy.answers.clear()
    yield proxy
    proxy.clear()
    proxy.mend()
