"""Object stores keep the storage contract: S3 over a socket, and any file system of fsspec."""

from __future__ import annotations

import uuid

import pytest

from ckpt_engine.store.storage.objects_fsspec import FsspecStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from tests.servers.fixtures import bucket, moto  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.store.storage_contract import StorageContract

PART_BYTES = 5 << 20


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> S3Storage:  # noqa: F811
        for name, value in moto.environment().items():
            monkeypatch.setenv(name, value)
        return S3Storage(f"s3://{bucket}/runs/one", moto.options(part_bytes=PART_BYTES))


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> FsspecStorage:
        return FsspecStorage(f"memory://{uuid.uuid4().hex}/run", {})
