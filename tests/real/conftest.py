"""Servers for the tests of this folder, each started once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.servers.s3 import S3Server, serving


@pytest.fixture(scope="session", params=["rclone", "swift"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server, if it is installed."""
    try:
        with serving(request.param, tmp_path_factory.mktemp(request.param)) as started:
            yield started
    except LookupError as err:
        pytest.skip(f"{err}: see tests/real/README.md")


@pytest.fixture
def bucket(server: S3Server) -> str:
    """A new bucket of it."""
    return server.make_bucket(f"b{uuid.uuid4().hex[:12]}")
