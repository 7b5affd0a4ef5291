"""An S3 bucket with Object Lock refuses to delete what the option `protect` keeps."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ckpt_engine import Checkpointer
from ckpt_engine.errors import StorageReadOnlyError
from ckpt_engine.store import names
from ckpt_engine.store.protection import begin
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.testing import put
from tests.parity.places import PARTS, WAIT_SECONDS, ParityPlace, state, train
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

DAYS = 14
PART_BYTES = 5 << 20
MANIFEST = names.manifest_name(names.snapshot_id(1, 10))
DATA = names.data_name(names.snapshot_id(1, 10))


@pytest.fixture
def locked(moto: S3Server) -> str:
    """A new bucket with Object Lock and no retention of its own."""
    return moto.make_bucket(f"b{uuid.uuid4().hex[:12]}", ObjectLockEnabledForBucket=True)


def _storage(moto: S3Server, bucket: str, url: str | None = None, **more: Any) -> S3Storage:
    return S3Storage(
        f"s3://{bucket}/run", moto.options(url, **{"protect_days": DAYS, "part_bytes": PART_BYTES, **more})
    )


def _retention(moto: S3Server, bucket: str, name: str) -> tuple[str, float] | None:
    """The mode in which an object is locked, and for how many days from now; None: it is not."""
    found = moto.client().head_object(Bucket=bucket, Key=f"run/{name}")
    if "ObjectLockMode" not in found:
        return None
    return found["ObjectLockMode"], (found["ObjectLockRetainUntilDate"] - datetime.now(UTC)) / timedelta(days=1)


@pytest.mark.parametrize("verify", ["auto", "never"])
def test_manifests_and_the_data_that_they_name_are_locked(moto: S3Server, locked: str, verify: str) -> None:
    """A manifest as it is put, data when that is named; what is rewritten in place is not locked."""
    storage = _storage(moto, locked, verify=verify)
    put(storage, MANIFEST, b"m")
    put(storage, DATA, os.urandom(2 * PART_BYTES))
    put(storage, names.LEASE, b"l")
    retain = storage.capabilities.retain
    assert retain is not None and retain([DATA]) is None
    for name in (MANIFEST, DATA):
        mode, days = _retention(moto, locked, name) or ("", 0.0)
        assert (mode, round(days)) == ("GOVERNANCE", DAYS)
    assert _retention(moto, locked, names.LEASE) is None
    version = moto.client().head_object(Bucket=locked, Key=f"run/{DATA}")["VersionId"]
    with pytest.raises(ClientError, match="AccessDenied"):
        moto.client().delete_object(Bucket=locked, Key=f"run/{DATA}", VersionId=version)


def test_a_lock_that_may_not_be_made_shorter_stays(moto: S3Server, locked: str, wire: Wire) -> None:
    """AWS refuses that once `days` was lowered; where no lock may be set at all the manifest is refused."""
    storage = _storage(moto, locked, wire.url)
    put(storage, DATA, b"d")
    wire.rule("403", "PUT", "retention")
    retain = storage.capabilities.retain
    assert retain is not None and retain([DATA]) is None
    wire.rule("403", "PUT", "snapshots")
    with pytest.raises(StorageReadOnlyError, match="403 AccessDenied"):
        put(storage, MANIFEST, b"m")


def test_what_the_bucket_promises_itself_is_not_made_weaker(moto: S3Server, locked: str) -> None:
    """Its own retention is longer, and its mode one that no user can lift."""
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Years": 1}}
    moto.client().put_object_lock_configuration(
        Bucket=locked, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    put(_storage(moto, locked), MANIFEST, b"m")
    mode, days = _retention(moto, locked, MANIFEST) or ("", 0.0)
    assert (mode, round(days)) == ("COMPLIANCE", 365)


def test_a_bucket_without_object_lock_is_named_and_is_written(moto: S3Server, bucket: str) -> None:
    """The start says that others can delete there, and what to do about it."""
    storage = _storage(moto, bucket)
    said: list[str] = []
    begin(Repository(storage), DAYS, said.append)
    assert len(said) == 1 and f"s3://{bucket}/run" in said[0] and "has no Object Lock" in said[0]
    put(storage, MANIFEST, b"m")
    assert _retention(moto, bucket, MANIFEST) is None
    record = Repository(storage).record()
    assert record is not None and record.protect_days == DAYS


def test_a_bucket_with_object_lock_needs_no_warning(moto: S3Server, locked: str) -> None:
    """Nothing is said where the store itself refuses."""
    begin(Repository(_storage(moto, locked)), DAYS, pytest.fail)


def test_without_the_option_nothing_is_asked(moto: S3Server, locked: str, wire: Wire) -> None:
    """No request more, and no lock."""
    storage = _storage(moto, locked, wire.url, protect_days=0)
    put(storage, MANIFEST, b"m")
    assert storage.capabilities.retain is None
    assert not any("object-lock" in path or "retention" in path for _, path, _ in wire.log)
    assert _retention(moto, locked, MANIFEST) is None


def test_where_nothing_may_be_deleted_one_request_finds_out(moto: S3Server, bucket: str, wire: Wire) -> None:
    """However many objects are to go."""
    storage = _storage(moto, bucket, wire.url, protect_days=0)
    for number in range(9):
        put(storage, f"data/{number}", b"x")
    wire.rule("403", "DELETE")
    with pytest.raises(Exception, match="403 AccessDenied"):
        storage.delete(*(f"data/{number}" for number in range(9)))
    assert wire.count("DELETE") == 1


@pytest.mark.long
def test_parity_and_second_copies_of_manifests_are_locked(moto: S3Server, locked: str) -> None:
    """As they are put; parity that an older snapshot has is locked again by each manifest that needs its data."""
    tier = {"url": f"s3://{locked}/run", "storage_options": moto.options(), "parity": PARTS, "protect": {"days": DAYS}}
    train([tier], 1)
    there = ParityPlace(tier["url"], tier["storage_options"])
    kinds = (names.manifest_id, names.copy_id, names.data_owner, names.parity_of)
    assert [sum(kind(name) is not None for name in there.was) for kind in kinds] == [1, 1, 1, 1]
    for name in there.was:
        mode, days = _retention(moto, locked, name) or ("", 0.0)
        assert (mode, round(days)) == ("GOVERNANCE", DAYS), name
    until = {"Mode": "GOVERNANCE", "RetainUntilDate": datetime.now(UTC) + timedelta(days=1)}
    own = [name for name in there.was if name.startswith(names.DATA)]
    for name in own:
        moto.client().put_object_retention(Bucket=locked, Key=f"run/{name}", Retention=until)
    with Checkpointer({"tiers": [tier], "writer": "thread", "wait_at_end": WAIT_SECONDS}) as run:
        run.load()
        assert run.save(state(2), step=2).wait(WAIT_SECONDS)
    for name in own:
        assert round((_retention(moto, locked, name) or ("", 0.0))[1]) == DAYS, name
