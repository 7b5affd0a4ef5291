"""obstore as a transport keeps the storage contract, over a good and over a bad network."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("obstore")

from ckpt_engine.errors import StorageError, StorageExistsError, StorageMissingError
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import metered
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.objects_obstore import ObstoreStorage
from ckpt_engine.testing import StorageContract, aligned, listed, put
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

MIB = 1 << 20
PART_BYTES = 5 * MIB
BIG = os.urandom(11 * MIB + 77)
DATA = "data/00000001-s0000000001-01234567-r00000.safetensors"

Open = Callable[..., ObstoreStorage]


def options(server: S3Server, url: str | None = None, **more: Any) -> dict[str, Any]:
    """As for s3fs, but for what obstore has no name for."""
    given = server.options(url, **{"part_bytes": PART_BYTES, "verify": "never", **more})
    given.pop("config_kwargs", None)
    return given


class TestObstore(StorageContract):
    @pytest.fixture
    def storage(self, moto: S3Server, bucket: str) -> ObstoreStorage:
        return ObstoreStorage(f"s3://{bucket}/runs/one", options(moto))

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its options beside the URL")


@pytest.fixture
def through(moto: S3Server, bucket: str, wire: Wire) -> Open:
    """Opens the bucket through the bad network."""

    def opened(**more: Any) -> ObstoreStorage:
        return ObstoreStorage(f"s3://{bucket}/run", options(moto, wire.url, **{"retry_seconds": 60.0, **more}))

    return opened


@pytest.fixture
def direct(moto: S3Server, bucket: str) -> ObstoreStorage:
    """The same bucket without it."""
    return ObstoreStorage(f"s3://{bucket}/run", options(moto))


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        *(("PUT", "partNumber", fault) for fault in ("503", "500", "lost", "refuse", "midbody")),
        *(("POST", "uploadId", fault) for fault in ("503", "500", "lost", "refuse")),
        *(("POST", "uploads", fault) for fault in ("500", "lost", "refuse")),
        *(("HEAD", "", fault) for fault in ("503", "lost")),
    ],
)
def test_a_big_upload_survives_a_fault(
    through: Open, direct: ObstoreStorage, wire: Wire, method: str, path: str, fault: str
) -> None:
    """Whatever happens to whichever of its requests, twice: the object is there, and whole."""
    storage = through()
    wire.rule(fault, method, path, times=2)
    put(storage, DATA, BIG)
    assert [action for _, _, action in wire.log].count(fault) == 2
    assert direct.get(DATA) == BIG
    assert [item.name for item in listed(direct)] == [DATA]


@pytest.mark.cells(2)
@pytest.mark.parametrize("fault", ["503", "500", "lost", "refuse", "midbody"])
def test_a_small_object_survives_a_fault(through: Open, direct: ObstoreStorage, wire: Wire, fault: str) -> None:
    """A manifest whose answer got lost is ours, not a conflict."""
    storage = through()
    wire.rule(fault, "PUT", times=2)
    put(storage, "ckpt.json", b"mine")
    assert direct.get("ckpt.json") == b"mine"
    with pytest.raises(StorageExistsError):
        put(storage, "ckpt.json", b"mine")


@pytest.mark.cells(1)
@pytest.mark.parametrize("fault", ["503", "truncate", "refuse", "stall"])
def test_reads_survive_faults(through: Open, direct: ObstoreStorage, wire: Wire, fault: str) -> None:
    """Ranges, whole objects and listings."""
    put(direct, DATA, BIG)
    storage = through(timeout_seconds=2.0 if fault == "stall" else 60.0)
    wire.rule(fault, "GET", times=2)
    out = bytearray(len(BIG) - 5)
    storage.get_into(DATA, 5, memoryview(out))
    assert bytes(out) == BIG[5:]
    wire.rule(fault, "GET", times=2)
    assert storage.get(DATA) == BIG
    wire.rule(fault, "GET", times=2)
    assert [item.name for item in listed(storage)] == [DATA]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", "refuse"])
def test_a_store_that_stays_away_is_given_up_in_time(through: Open, wire: Wire, fault: str) -> None:
    """Bounded, with an error that says where."""
    storage = through(timeout_seconds=0.2, retry_seconds=0.4)
    wire.rule(fault)
    for use in (
        lambda: put(storage, DATA, BIG),
        lambda: put(storage, "ckpt.json", b"x"),
        lambda: storage.get(DATA),
        lambda: listed(storage),
        lambda: storage.delete(DATA),
    ):
        with pytest.raises(StorageError, match=storage.url) as caught:
            use()
        assert type(caught.value) is StorageError


def test_a_put_that_fails_shows_nothing(through: Open, direct: ObstoreStorage, wire: Wire) -> None:
    """No object, also where its completion was answered too late."""
    storage = through(retry_seconds=0.4)
    wire.rule("refuse", "PUT", "partNumber=3")
    with pytest.raises(StorageError):
        put(storage, DATA, BIG)
    assert listed(direct) == []


def test_the_caller_gets_its_memory_back(through: Open, wire: Wire) -> None:
    """After a put has failed nothing reads the arena any more, whatever is still buffered somewhere."""
    memory = bytearray(48 * MIB)  # more than sockets buffer: the server really does not take it
    storage = through(retry_seconds=0.5, part_bytes=16 * MIB)
    wire.rule("midbody", "PUT")
    with pytest.raises(StorageError) as caught, memoryview(memory) as view:
        storage.put(DATA, [view])
    assert caught.value.__traceback__ is not None
    memory.extend(b"x")  # BufferError if somebody holds a view


def test_conditional_replacement(moto: S3Server, bucket: str) -> None:
    """What a lease on a store is made of."""
    storage = ObstoreStorage(f"s3://{bucket}/run", options(moto))
    assert storage.read_versioned("lease.json") is None
    storage.replace("lease.json", b"1", None)
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"2", None)
    there = storage.read_versioned("lease.json")
    assert there is not None
    storage.replace("lease.json", b"3", there[1])
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"4", there[1])
    assert storage.get("lease.json") == b"3"


def test_uploads_keep_their_pace_and_can_be_stopped(moto: S3Server, bucket: str) -> None:
    """Every byte is asked for; what the limit raises ends the upload at once, as it is."""
    storage = ObstoreStorage(f"s3://{bucket}/run", options(moto))
    asked: list[int] = []

    class Counting(Meter):
        def wait(self, nbytes: int) -> float:
            asked.append(nbytes)
            return 0.0

    metered(storage, lambda _: Counting()).put("data/x", [aligned(bytes(12 << 20))])
    assert sum(asked) == 12 << 20
    assert max(asked) <= 4 * MIB

    class Stop(Exception):
        pass

    class Stopping(Meter):
        def wait(self, nbytes: int) -> float:
            raise Stop

    for nbytes in (12 << 20, 100):
        with pytest.raises(Stop):
            metered(storage, lambda _: Stopping()).put("data/y", [aligned(bytes(nbytes))])
    assert [item.name for item in listed(storage)] == ["data/x"]


def test_secrets_are_never_shown(moto: S3Server, bucket: str, wire: Wire) -> None:
    """No message and no traceback shows one, though the library's errors quote whole answers."""
    given = options(moto, wire.url, timeout_seconds=0.3, retry_seconds=0.0)
    storage = ObstoreStorage(f"s3://{bucket}/run", given | {"key": "AKIAVERYSECRET", "secret": "hunter2hunter2"})
    wire.cut()
    with pytest.raises(StorageError) as caught:
        put(storage, "a", b"x")
    shown = "".join(traceback.format_exception(caught.value)) + f"{storage!r}"
    assert "hunter2" not in shown
    assert "AKIA" not in shown


def test_what_is_wrong_is_said(moto: S3Server, bucket: str) -> None:
    """A missing bucket, an option that only s3fs has, and a channel on which nothing could be checked."""
    storage = ObstoreStorage("s3://no-such-bucket/run", options(moto))
    for use in (lambda: put(storage, "a", b"x"), lambda: storage.get("a")):
        with pytest.raises(StorageMissingError, match="create the bucket"):
            use()
    with pytest.raises(StorageError, match="obstore's stores"):
        open_storage(f"s3://{bucket}/run", {"transport": "obstore", "profile": "x"})
    with pytest.raises(StorageError, match="verify: never"):
        ObstoreStorage(f"s3://{bucket}/run", options(moto) | {"verify": "auto"})
    with pytest.raises(StorageError, match="no transport 'rust'"):
        open_storage(f"s3://{bucket}/run", {"transport": "rust"})
    assert isinstance(open_storage(f"s3://{bucket}/run", {"transport": "obstore"}), ObstoreStorage)


@pytest.mark.slow
def test_a_dying_server_does_not_touch_the_random_streams_of_training(through: Open, wire: Wire) -> None:
    """The writer may be a thread of the trainer: what training draws next must not depend on the network."""
    storage, impatient = through(), through(timeout_seconds=0.2, retry_seconds=0.5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    for fault in ("503", "refuse", "midbody"):
        wire.rule(fault, times=3)
    put(storage, DATA, BIG)
    wire.cut()
    with pytest.raises(StorageError):
        put(impatient, "data/x", BIG)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == states
