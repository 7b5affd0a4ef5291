"""What answers in the place of a store with status 200: nothing follows from what it leaves out, in no storage."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.objects_obstore import ObstoreStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.testing import listed, put
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

NAME = "snapshots/00000001-s0000000001-01234567.json"
DATA = "data/00000001-s0000000001-01234567-r00000.safetensors"
BIG = bytes(6 << 20)
XML = b"<?xml version='1.0' encoding='UTF-8'?>\n"
BODIES = {
    "page": b"<html><body>please log in</body></html>",
    "nothing": b"",
    "text": b"OK\n",
    "json": b'{"status":"ok"}',
    "other-root": XML
    + b"<ListAllMyBucketsResult><Name>b</Name><IsTruncated>false</IsTruncated></ListAllMyBucketsResult>",
    "no-name": XML + b"<ListBucketResult><Prefix/><IsTruncated>false</IsTruncated></ListBucketResult>",
    "no-end": XML + b"<ListBucketResult><Name>b</Name><Prefix>run/</Prefix></ListBucketResult>",
    "cut": XML
    + b"<ListBucketResult><Name>b</Name><Prefix>run/</Prefix><IsTruncated>true</IsTruncated></ListBucketResult>",
    "other-list": XML
    + b"<ListBucketResult><Name>b</Name><Prefix>logs/</Prefix><IsTruncated>false</IsTruncated></ListBucketResult>",
    "other-rows": XML
    + b"<ListBucketResult><Name>b</Name><Prefix>run/</Prefix><IsTruncated>false</IsTruncated>"
    + b"<Contents><Key>logs/1</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    + b"</Contents></ListBucketResult>",
}
Open = Callable[[], Storage]


@pytest.fixture(params=["s3fs", "obstore"])
def opened(request: pytest.FixtureRequest, moto: S3Server, bucket: str, wire: Wire) -> Open:
    """Opens a run with a snapshot through the wire."""
    url = f"s3://{bucket}/run"
    put(S3Storage(url, moto.options()), NAME, b"manifest")
    put(S3Storage(url, moto.options()), "ckpt.json", b"record")
    options = moto.options(wire.url, retry_seconds=0.3, part_bytes=5 << 20)
    if request.param == "s3fs":
        return lambda: S3Storage(url, options)
    options.pop("config_kwargs")
    return lambda: ObstoreStorage(url, {**options, "verify": "never"})


@pytest.mark.cells(5)
@pytest.mark.parametrize("what", BODIES)
def test_an_answer_that_is_no_listing_is_no_empty_folder(opened: Open, wire: Wire, what: str) -> None:
    """Each listing fails, whichever folder is asked for, and whatever else the store still answers."""
    storage, wire.lie = opened(), BODIES[what]
    for where in ("list-type=2.*snapshots", "list-type=2", ""):
        wire.clear()
        wire.rule("lie", path=where)
        for prefix in ("snapshots/", "data/", "")[: 3 if where != "list-type=2.*snapshots" else 1]:
            with pytest.raises(StorageError):
                listed(storage, prefix)
    wire.clear()
    assert [item.name for item in listed(storage, "snapshots/")] == [NAME]
    assert listed(storage, "data/") == []


@pytest.mark.cells(2)
@pytest.mark.parametrize("what", ["page", "nothing", "json", "other-root"])
def test_nothing_is_stored_read_or_removed_where_something_else_answers(opened: Open, wire: Wire, what: str) -> None:
    """No request is taken for done that way: small and big objects, versions, ranges, whole objects, removals."""
    storage, wire.lie = opened(), BODIES[what]
    wire.rule("lie")
    uses: list[Callable[[], Any]] = [
        lambda: put(storage, "pins/1.json", b"x"),
        lambda: put(storage, DATA, BIG),
        lambda: storage.put("status.json", [memoryview(b"x")], exclusive=False),
        lambda: storage.get(NAME),
        lambda: storage.get(NAME, 2, 3),
        lambda: storage.get_into(NAME, 2, memoryview(bytearray(3))),
        lambda: storage.delete(NAME),
    ]
    for use in uses:
        with pytest.raises(StorageError):
            use()
    versions = storage.capabilities.versions
    assert versions is not None
    with pytest.raises(StorageError):
        versions.read_versioned("ckpt.json")
    with pytest.raises(StorageError):
        versions.replace("ckpt.json", b"x", None)


@pytest.mark.parametrize("root", ["InitiateMultipartUploadResult", "InitiateMultipartUpload"])
def test_an_upload_in_parts_begins_whatever_the_answer_is_called(
    opened: Open, moto: S3Server, bucket: str, wire: Wire, root: str
) -> None:
    """The second name is that of rclone: what an upload needs is its id."""
    storage = opened()
    begun = moto.client().create_multipart_upload(Bucket=bucket, Key=f"run/{DATA}")
    wire.lie = XML + f"<{root}><UploadId>{begun['UploadId']}</UploadId></{root}>".encode()
    wire.rule("lie", path=r"\?uploads\b")
    put(storage, DATA, BIG)
    assert wire.struck
    assert storage.get(DATA) == BIG


@pytest.mark.cells(2)
@pytest.mark.parametrize(("name", "nbytes"), [(NAME.replace("1", "2"), 9), (DATA, 9), (DATA, len(BIG))])
def test_what_a_store_acknowledges_and_loses_is_not_stored(opened: Open, wire: Wire, name: str, nbytes: int) -> None:
    """Each object that is made once is looked at; one that is lost is sent again, and not for ever."""
    storage = opened()
    if isinstance(storage, S3Storage) and nbytes < len(BIG):
        wire.rule("lose", "PUT", name, times=2)
        put(storage, name, BIG[:nbytes])
        assert storage.get(name) == BIG[:nbytes]
        storage.delete(name)
    wire.rule("lose", "PUT|POST", name)
    with pytest.raises(StorageError):
        put(storage, name, BIG[:nbytes])
    wire.clear()
    assert name not in [item.name for item in listed(storage, "")]
