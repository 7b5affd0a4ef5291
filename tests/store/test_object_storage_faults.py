"""A bad network before an object store: nothing acknowledged is lost, nothing half is seen, and every wait ends."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine.errors import StorageError, StorageExistsError, StorageMissingError
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.store.storage.retries import CAP_SECONDS, Backoff
from ckpt_engine.testing import listed, put
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

MIB = 1 << 20
PATIENCE_SECONDS = 60.0
BIG = os.urandom(11 * MIB + 77)
DATA = "data/00000001-s0000000001-01234567-r00000.safetensors"

Open = Callable[..., S3Storage]


@pytest.fixture
def through(moto: S3Server, bucket: str, wire: Wire) -> Open:
    """Opens the bucket through the bad network."""

    def opened(**options: Any) -> S3Storage:
        given = {"part_bytes": 5 * MIB, "timeout_seconds": PATIENCE_SECONDS, "retry_seconds": 90.0, **options}
        return S3Storage(f"s3://{bucket}/run", moto.options(wire.url, **given))

    return opened


@pytest.fixture
def direct(moto: S3Server, bucket: str) -> S3Storage:
    """The same bucket without it."""
    return S3Storage(f"s3://{bucket}/run", moto.options())


def patience(fault: str) -> float:
    """Short where nothing else ends a request; else so long that a busy machine is no fault."""
    return 2.0 if fault in ("stall", "block") else PATIENCE_SECONDS


def SLOW(*values: Any) -> Any:
    """A case for the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        *(("PUT", "", fault) for fault in ("midbody", "stall")),
        ("POST", "uploadId", "lost"),
        *(SLOW("PUT", "", fault) for fault in ("503", "500", "lost", "refuse")),
        *(SLOW("POST", "uploadId", fault) for fault in ("503", "500", "refuse", "midbody", "stall")),
        *(SLOW("POST", "uploads", fault) for fault in ("500", "lost", "refuse", "stall")),
        *(SLOW(method, "", fault) for method in ("HEAD", "GET") for fault in ("503", "lost", "stall")),
    ],
)
def test_a_big_upload_survives_a_fault(
    through: Open, direct: S3Storage, wire: Wire, method: str, path: str, fault: str
) -> None:
    """Whatever happens to whichever of its requests, twice: the object is there, whole, and nothing is left over."""
    storage = through(timeout_seconds=patience(fault))
    wire.rule(fault, method, path, times=2)
    put(storage, DATA, BIG)
    assert [action for _, _, action in wire.log].count(fault) == 2
    assert direct.get(DATA) == BIG
    assert [item.name for item in listed(direct)] == [DATA]


@pytest.mark.cells(1)
@pytest.mark.parametrize("fault", ["503", "500", "lost", "refuse", SLOW("midbody"), SLOW("stall")])
def test_a_small_object_survives_a_fault(through: Open, direct: S3Storage, wire: Wire, fault: str) -> None:
    """A manifest whose answer got lost is ours, not a conflict."""
    storage = through(timeout_seconds=patience(fault))
    wire.rule(fault, "PUT", times=3)
    put(storage, "ckpt.json", b"mine")
    assert direct.get("ckpt.json") == b"mine"
    with pytest.raises(StorageExistsError):
        put(storage, "ckpt.json", b"mine")


@pytest.mark.parametrize("nbytes", [4, 11 * MIB])
def test_somebody_elses_object_is_not_taken_for_ours(through: Open, direct: S3Storage, wire: Wire, nbytes: int) -> None:
    """That is so where it appears between our look and our write, and our answers get lost."""
    storage = through()
    head = storage._multipart.head
    looked = []

    async def late(key: str) -> Any:
        found = await head(key)
        if not looked:
            looked.append(key)
            await asyncio.to_thread(put, direct, DATA, b"theirs")
        return found

    storage._multipart.head = late  # type: ignore[method-assign]
    wire.rule("lost", "PUT", r"run/data/[^?]*$", times=1)
    with pytest.raises(StorageExistsError):
        put(storage, DATA, BIG[:nbytes])
    assert direct.get(DATA) == b"theirs"
    assert direct.sweep() == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", SLOW("truncate"), SLOW("refuse"), SLOW("stall")])
def test_reads_survive_faults(through: Open, direct: S3Storage, wire: Wire, fault: str) -> None:
    """Ranges, whole objects and listings."""
    put(direct, DATA, BIG)
    storage = through(timeout_seconds=patience(fault))
    wire.rule(fault, "GET", times=2)
    out = bytearray(len(BIG) - 5)
    storage.get_into(DATA, 5, memoryview(out))
    assert bytes(out) == BIG[5:]
    wire.rule(fault, "GET", times=2)
    assert storage.get(DATA) == BIG
    wire.rule(fault, "GET", times=2)
    assert [item.name for item in listed(storage)] == [DATA]


def test_an_interrupted_read_goes_on_where_it_was(through: Open, direct: S3Storage, wire: Wire) -> None:
    """What has arrived is not sent again."""
    put(direct, DATA, BIG)
    storage = through()
    wire.rule("truncate", "GET", times=1)
    out = bytearray(len(BIG))
    storage.get_into(DATA, 0, memoryview(out))
    assert bytes(out) == BIG
    assert wire.count("GET") == 2
    assert storage.options.verify == "auto"


def test_a_byte_flipped_on_the_way_up_is_noticed(through: Open, direct: S3Storage, wire: Wire) -> None:
    """The store's own digest of what it got is compared, where the channel does not protect the bytes."""
    storage = through()
    wire.rule("spoil", "PUT", times=2)
    put(storage, DATA, BIG)
    wire.rule("spoil", "PUT", times=2)
    put(storage, "ckpt.json", b"record")
    assert direct.get(DATA) == BIG
    assert direct.get("ckpt.json") == b"record"
    assert [action for _, _, action in wire.log].count("spoil") == 4


@pytest.mark.parametrize("count", [1, SLOW(8)])
def test_a_list_of_parts_that_arrives_as_another_one_is_noticed(
    through: Open, direct: S3Storage, wire: Wire, count: int
) -> None:
    """Wherever the byte is: the object is made of all its parts."""
    storage = through()
    for number in range(count):
        wire.rule("spoil", "POST", "uploadId", times=2)
        put(storage, f"{DATA}{number}", BIG)
        assert direct.get(f"{DATA}{number}") == BIG


def test_a_channel_that_always_damages_stores_nothing(through: Open, direct: S3Storage, wire: Wire) -> None:
    """An error, and no object, rather than a wrong one."""
    storage = through(retry_seconds=0.5)
    wire.rule("spoil", "PUT")
    for name, data in (("ckpt.json", b"record"), (DATA, BIG)):
        with pytest.raises(StorageError, match="other bytes"):
            put(storage, name, data)
    assert listed(direct) == []


@pytest.mark.parametrize("looks", [4, SLOW(40)])
def test_flipped_bytes_in_answers_mislead_no_reader(
    moto: S3Server,
    through: Open,
    direct: S3Storage,
    wire: Wire,
    looks: int,
) -> None:
    """A wrong name in a listing could make good data look like garbage."""
    names = [f"snapshots/0000000{n}-s000000000{n}-0123456{n}.json" for n in range(8)]
    for name in names:
        put(direct, name, name.encode())
    storage = through()
    wire.rule("corrupt", "GET", times=1)  # at least this one
    wire.rule("corrupt", "GET", chance=0.2)
    for _ in range(looks):
        assert [item.name for item in listed(storage)] == names
    assert [storage.get(name, 0, 4096) for name in names] == [name.encode() for name in names]
    assert "corrupt" in {action for _, _, action in wire.log}


@pytest.mark.long
@pytest.mark.parametrize("every", [58, SLOW(1)])
def test_any_flipped_byte_of_a_listing_is_asked_for_again(
    through: Open, direct: S3Storage, wire: Wire, every: int
) -> None:
    """Wherever the byte is: in a name, a tag, a number or a date that the client cannot read then."""
    put(direct, "snapshots/00000001-s0000000001-01234567.json", b"one")
    storage = through()
    for at in range(0, 1000, every):
        wire.corrupted_byte = at
        wire.rule("corrupt", "GET", times=1)
        assert len(listed(storage)) == 1, at


@pytest.mark.long
@pytest.mark.parametrize("fault", ["block", SLOW("503"), SLOW("refuse"), SLOW("stall")])
def test_a_store_that_stays_away_is_given_up_in_time(through: Open, wire: Wire, fault: str) -> None:
    """Bounded, with an error that says where; never with somebody waiting for ever."""
    storage = through(timeout_seconds=0.2, retry_seconds=0.4)
    wire.rule(fault)
    for use in (
        lambda: put(storage, DATA, BIG),
        lambda: storage.get(DATA),
        lambda: listed(storage),
        lambda: storage.delete(DATA),
    ):
        began = time.monotonic()
        with pytest.raises(StorageError, match=storage.url) as caught:
            use()
        assert time.monotonic() - began < 60  # the bound is about 2 s: this one only says that there is one
        assert type(caught.value) is StorageError


def test_an_upload_that_was_given_up_is_continued(
    moto: S3Server,
    through: Open,
    direct: S3Storage,
    wire: Wire,
) -> None:
    """By another process, with the same bytes: parts that have arrived are not sent again."""
    dying = through(retry_seconds=0.5, concurrency=1)
    wire.rule("pass", "PUT", "partNumber=[12]")
    wire.rule("refuse", "PUT|HEAD|DELETE", "partNumber=3|data/[^?]*$")
    wire._rules.insert(0, wire._rules.pop(0))
    head = dying._multipart.head

    async def absent(key: str) -> Any:
        return None

    dying._multipart.head = absent  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        put(dying, DATA, BIG)
    dying._multipart.head = head  # type: ignore[method-assign]
    assert listed(direct) == []
    wire.clear()
    wire.log.clear()
    put(through(), DATA, BIG)
    assert direct.get(DATA) == BIG
    assert wire.count("PUT", "partNumber") == 1
    assert wire.count("POST", "uploads") == 0


def test_parts_of_other_bytes_are_not_reused(through: Open, direct: S3Storage, moto: S3Server, bucket: str) -> None:
    """An unfinished upload of the same name may contain anything."""
    client, key = moto.client(), f"run/{DATA}"
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 * MIB))
    put(through(), DATA, BIG)
    assert direct.get(DATA) == BIG


def test_old_unfinished_uploads_of_ours_are_swept(moto: S3Server, bucket: str) -> None:
    """With their bytes counted; young ones, foreign names and other runs are not touched."""
    client = moto.client()
    names = [f"run/{DATA}", "run/thesis.tex", f"run2/{DATA}"]
    for name in names:
        upload = client.create_multipart_upload(Bucket=bucket, Key=name)["UploadId"]
        client.upload_part(Bucket=bucket, Key=name, UploadId=upload, PartNumber=1, Body=b"x" * 100)

    def left() -> list[str]:
        return sorted(item["Key"] for item in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))

    # moto says that every upload began in 2010
    assert S3Storage(f"s3://{bucket}/run", moto.options(stale_upload_seconds=1e12)).sweep() == 0
    assert left() == sorted(names)
    assert S3Storage(f"s3://{bucket}/run", moto.options()).sweep() == 100
    assert left() == sorted(names[1:])


def test_deleting_an_object_gives_up_its_failed_upload(
    through: Open,
    wire: Wire,
    moto: S3Server,
    bucket: str,
) -> None:
    """What the writer undoes leaves no parts that cost money."""
    storage = through(retry_seconds=0.5)
    wire.rule("refuse", "PUT", "partNumber=3")
    with pytest.raises(StorageError):
        put(storage, DATA, BIG)
    wire.clear()
    storage.delete(DATA)
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=bucket)


def test_deletes_survive_faults(through: Open, direct: S3Storage, wire: Wire) -> None:
    """A delete whose answer was lost has happened."""
    for name in ("a", "b", "c"):
        put(direct, name, b"x")
    wire.rule("lost", "DELETE", times=2)
    wire.rule("503", "DELETE", times=2)
    through().delete("a", "b", "c", "never")
    assert listed(direct) == []


@pytest.mark.slow
def test_a_dying_server_does_not_touch_the_random_streams_of_training(through: Open, wire: Wire) -> None:
    """The writer may be a thread of the trainer: what training draws next must not depend on the network."""
    storage, impatient = through(concurrency=4, timeout_seconds=0.5), through(timeout_seconds=0.2, retry_seconds=0.5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    put(storage, "warm", b"x")
    for fault in ("503", "refuse", "midbody", "stall"):
        wire.rule(fault, times=3)
    put(storage, DATA, BIG)
    wire.cut()
    with pytest.raises(StorageError):
        put(impatient, "data/x", BIG)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == states


@pytest.mark.long
def test_the_caller_gets_its_memory_back(through: Open, wire: Wire) -> None:
    """After a put has failed nothing reads the arena any more, whatever is still buffered somewhere."""
    memory = bytearray(48 * MIB)  # more than sockets buffer: the server really does not take it
    storage = through(timeout_seconds=0.3, retry_seconds=0.5, part_bytes=64 * MIB)
    wire.rule("block", "PUT")
    with pytest.raises(StorageError) as caught, memoryview(memory) as view:
        storage.put(DATA, [view])
    assert caught.value.__traceback__ is not None
    memory.extend(b"x")  # BufferError if somebody holds a view


def test_backoff_grows_is_jittered_and_ends() -> None:
    """Full jitter below an exponential cap; no attempt begins later than the patience."""
    now = 0.0
    tops: list[float] = []

    def uniform(low: float, high: float) -> float:
        tops.append(high)
        return high

    backoff = Backoff(60.0, clock=lambda: now, uniform=uniform)
    while (wait := backoff.next_wait()) is not None:
        now += wait
    assert now <= 60.0
    assert tops[:4] == [0.2, 0.4, 0.8, 1.6]
    assert max(tops) == CAP_SECONDS
    backoff.progressed()
    assert backoff.next_wait(told_seconds=3.0) == 3.0


def test_secrets_are_never_shown(moto: S3Server, bucket: str, wire: Wire) -> None:
    """No message and no representation shows a secret."""
    options = moto.options(wire.url, timeout_seconds=0.3, retry_seconds=0.0)
    options |= {"key": "AKIAVERYSECRET", "secret": "hunter2hunter2"}
    storage = S3Storage(f"s3://{bucket}/run", options)
    wire.cut()
    with pytest.raises(StorageError) as caught:
        put(storage, "a", b"x")
    shown = f"{caught.value} {storage!r} {storage.url}"
    assert "hunter2" not in shown
    assert "AKIA" not in shown
    with pytest.raises(StorageError, match="storage_options") as caught:
        S3Storage("s3://user:hunter2@bucket/run", {})
    assert "hunter2" not in str(caught.value)


def test_what_is_wrong_is_said(moto: S3Server) -> None:
    """A missing bucket is not made; its error says what to do."""
    storage = S3Storage("s3://no-such-bucket/run", moto.options())
    with pytest.raises(StorageMissingError):
        storage.get("a")
    for use in (lambda: put(storage, "a", b"x"), lambda: listed(storage)):
        with pytest.raises(StorageMissingError, match="create the bucket"):
            use()
    assert "no-such-bucket" not in [item["Name"] for item in moto.client().list_buckets()["Buckets"]]
