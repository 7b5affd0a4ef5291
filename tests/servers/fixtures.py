"""Fixtures for tests that need a server: imported by the test modules that use them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.servers.s3 import S3Server, serving
from tests.servers.wire import Wire


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A moto server."""
    with serving("moto", tmp_path_factory.mktemp("moto")) as server:
        yield server


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
