"""Object stores keep the storage contract: S3 over a socket, and any file system of fsspec."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import importlib
import json
import random
import sys
import threading
import types
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from s3fs import S3FileSystem

from benchmarks.measure import PeakMemory
from benchmarks.null_sink import NullSink
from ckpt_engine.errors import StorageError, StorageExistsError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import client_randomness, objects_fsspec, open_storage
from ckpt_engine.store.storage.base import metered
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.objects_fsspec import FsspecStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.testing import StorageContract, aligned, listed, put
from tests.servers.fixtures import bucket, moto  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.support import interpreters

PART_BYTES = 5 << 20


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
        for name, value in moto.environment().items():
            monkeypatch.setenv(name, value)
        return S3Storage(f"s3://{bucket}/runs/one", moto.options(part_bytes=PART_BYTES))


class TestMemory(StorageContract):
    """Where files are renamed to their names."""

    @pytest.fixture
    def storage(self) -> FsspecStorage:
        return FsspecStorage(f"memory://{uuid.uuid4().hex}/run", {})


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    """A file of a store that shows an object when its upload is complete, as those of gcsfs and adlfs."""

    def _initiate_upload(self) -> None:
        self.sent = list[bytes]()

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent.append(self.buffer.getvalue())
        if final:
            with self.fs.lock:
                if self.mode == "xb" and self.path in self.fs.objects:
                    raise FileExistsError(self.path)
                self.fs.objects[self.path] = b"".join(self.sent)
        return True

    def discard(self) -> None:
        self.sent = []


class _Store(AbstractFileSystem):  # type: ignore[misc]
    """Such a store. `failures` come before anything works."""

    protocol = "az"
    cachable = False

    def __init__(self, objects: dict[str, bytes], failures: list[Exception], **_: Any) -> None:
        super().__init__()
        self.objects = objects
        self.failures = failures
        self.lock = threading.Lock()

    def _open(self, path: str, mode: str = "rb", block_size: int = 1 << 20, **_: Any) -> _Upload:
        return _Upload(self, path, mode, block_size)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop()
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool = False, **_: Any) -> dict[str, Any]:
        return {name: self.info(name) for name in sorted(self.objects) if name.startswith(path + "/")}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        inner = [name[len(path) + 1 :].partition("/")[0] for name in self.objects if name.startswith(f"{path}/")]
        return [self.info(f"{path}/{name}") for name in dict.fromkeys(inner)]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.objects[path][start:end]

    def rm_file(self, path: str) -> None:
        self.objects.pop(path, None)


class _Answered(Exception):
    """As the errors of HTTP libraries are."""

    def __init__(self, status: int) -> None:
        super().__init__("https://store/x?sig=SECRET")
        self.status = status


@pytest.fixture
def az(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options with which `az://` is the store above."""
    registered = importlib.import_module("fsspec.registry")._registry
    before = registered.get("az")
    fsspec.register_implementation("az", _Store, clobber=True)
    yield {"objects": {}, "failures": []}
    registered.pop("az")
    if before is not None:
        fsspec.register_implementation("az", before)


class TestStoreThatShowsWholeUploads(StorageContract):
    """Where closing a file publishes it."""

    @pytest.fixture
    def storage(self, az: dict[str, Any]) -> FsspecStorage:
        return FsspecStorage("az://container/run", az)

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its options beside the URL")


class _Torn:
    """Memory that fails in the middle."""

    nbytes = 30 << 20

    def cast(self, _: str) -> _Torn:
        return self

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> bytes:
        if part.start:
            raise OSError(5, "Input/output error")
        return b"x" * (8 << 20)


@pytest.mark.parametrize("kind", ["az", "memory"])
def test_a_write_that_fails_shows_nothing(az: dict[str, Any], kind: str) -> None:
    """Closing the file would publish half of it, and leaving it open leaves nothing either."""
    url, options = ("az://container/run", az) if kind == "az" else (f"memory://{uuid.uuid4().hex}", {})
    storage = FsspecStorage(url, options)
    with pytest.raises(StorageError, match="data/torn"):
        storage.put("data/torn", [_Torn()])  # type: ignore[list-item]
    assert listed(storage) == []
    assert storage._fs.find(storage._root) in ([], {})


def test_other_libraries_are_tried_again_and_then_explained(az: dict[str, Any]) -> None:
    """Their messages may carry signed URLs: only the kind of error is shown."""
    storage = FsspecStorage("az://container/run", {**az, "retry_seconds": 60})
    put(storage, "a", b"x")
    az["failures"] += [_Answered(503), _Answered(429), ConnectionResetError()]
    assert storage.get("a") == b"x"
    az["failures"] += [_Answered(403)]
    with pytest.raises(StorageError, match="403") as caught:
        storage.get("a")
    assert "SECRET" not in str(caught.value)
    assert "credentials" in str(caught.value)


def test_an_interrupted_rename_is_swept_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary file is not an object; a young one may be alive."""
    url = f"memory://{uuid.uuid4().hex}"
    temp = f"/{url.removeprefix('memory://')}/data/.tmp-0123456789abcdef-x"
    storage = FsspecStorage(url, {})
    storage._fs.pipe_file(temp, b"half")
    assert listed(storage) == []
    assert storage.sweep() == 0
    assert FsspecStorage(url, {"stale_upload_seconds": 0}).sweep() == 4
    assert storage._fs.find(storage._root) == []


def test_some_urls_have_no_storage() -> None:
    """Said without a traceback of fsspec."""
    for url in ("nonsense://x/y", "s3://", "s3://b/../x", "s3://b/x?versions"):
        with pytest.raises(StorageError, match="→"):
            open_storage(url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules, "ckpt_engine.store.storage.objects_s3")
    monkeypatch.delitem(sys.modules, "ckpt_engine.store.storage.s3_requests")
    with pytest.raises(StorageError, match=r"s3fs.*pip install 'ckpt-engine\[s3\]'"):
        open_storage("s3://bucket/run")


def test_a_root_is_a_prefix_of_its_own(moto: S3Server, bucket: str) -> None:
    """Neighbours whose names begin alike are not seen; a whole bucket can be a root."""
    one, other = (S3Storage(f"s3://{bucket}/{name}/", moto.options()) for name in ("run", "run2"))
    put(one, "a", b"1")
    put(other, "b", b"2")
    assert [item.name for item in listed(one)] == ["a"]
    whole = S3Storage(f"s3://{bucket}", moto.options())
    assert [item.name for item in listed(whole)] == ["run/a", "run2/b"]


def test_listings_take_requests_by_pages(moto: S3Server, bucket: str) -> None:
    """A listing takes one request for each page and not for each object; odd names come back."""
    client = moto.client()
    for number in range(25):
        client.put_object(Bucket=bucket, Key=f"run/n{number:04d} +&<ü>.json", Body=b"")
    storage = S3Storage(f"s3://{bucket}/run", moto.options())
    calls: list[str] = []
    call = storage._calls.call

    async def counted(method: str, **arguments: Any) -> Any:
        calls.append(method)
        return await call(method, MaxKeys=20, **arguments)

    storage._calls.call = counted  # type: ignore[method-assign]
    assert [item.name for item in listed(storage)] == [f"n{number:04d} +&<ü>.json" for number in range(25)]
    assert len(calls) == 2 * 2  # two pages, each asked for twice where the channel does not protect it


def test_conditional_replacement(moto: S3Server, bucket: str) -> None:
    """What a lease on a store is made of."""
    storage = S3Storage(f"s3://{bucket}/run", moto.options())
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
    storage = S3Storage(f"s3://{bucket}/run", moto.options(part_bytes=PART_BYTES))
    asked: list[int] = []

    class Counting(Meter):
        def wait(self, nbytes: int) -> float:
            asked.append(nbytes)
            return 0.0

    metered(storage, lambda _: Counting()).put("data/x", [aligned(bytes(12 << 20))])
    assert sum(asked) == 12 << 20

    class Stop(Exception):
        pass

    class Stopping(Meter):
        def wait(self, nbytes: int) -> float:
            raise Stop

    with pytest.raises(Stop):
        metered(storage, lambda _: Stopping()).put("data/y", [aligned(bytes(12 << 20))])
    assert [item.name for item in listed(storage)] == ["data/x"]


@pytest.mark.long
def test_an_upload_does_not_copy_the_whole() -> None:
    """Streaming: what is alive beside the arena is small, whatever the size of the object."""
    with NullSink() as sink:
        options = {"key": "k", "secret": "s", "endpoint_url": sink.url, "verify": "never"}
        storage = S3Storage("s3://bucket/run", {**options, "config_kwargs": {"s3": {"addressing_style": "path"}}})
        put(storage, "warm", b"x" * 100)
        block = aligned(bytes(192 << 20))
        peak = PeakMemory()
        storage.put("big", [block])
        assert peak.extra_bytes() < 48 << 20
        assert sink.taken_bytes() >= 192 << 20


def test_signing_payloads_still_works(moto: S3Server, bucket: str) -> None:
    """For who asks for it: the body can be read before it is sent."""
    options = moto.options(part_bytes=PART_BYTES)
    options["config_kwargs"] = {
        "s3": {"addressing_style": "path", "payload_signing_enabled": True},
        "request_checksum_calculation": "when_supported",
    }
    storage = S3Storage(f"s3://{bucket}/run", options)
    data = bytes(range(256)) * (6 << 12)
    put(storage, "data/x", data)
    put(storage, "small", b"x")
    assert storage.get("data/x") == data


def test_client_libraries_get_a_random_source_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs and others draw retry jitter from `random`; ours and the user's modules keep it."""
    for name in ("gcsfs.retry", "mine.retry"):
        module = types.ModuleType(name)
        module.random = random  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    client_randomness.shield()
    assert sys.modules["gcsfs.retry"].random is not random  # type: ignore[attr-defined]
    assert sys.modules["mine.retry"].random is random  # type: ignore[attr-defined]
    state = random.getstate()
    assert 0 <= sys.modules["gcsfs.retry"].random.random() < 1  # type: ignore[attr-defined]
    assert random.getstate() == state


def test_clients_are_shared_by_storages_of_the_same_options(moto: S3Server, bucket: str) -> None:
    """Opening a run several times does not open several pools of connections."""
    one, two = (S3Storage(f"s3://{bucket}/{name}", moto.options()) for name in ("a", "b"))
    assert one._calls.fs is two._calls.fs
    assert isinstance(one._calls.fs, S3FileSystem)
    assert "az" in objects_fsspec.WHOLE_AT_CLOSE


ENDS = """
import json, sys, torch
from ckpt_engine import Checkpointer

tiers = [{"url": sys.argv[1], "storage_options": json.loads(sys.argv[2])}]
Checkpointer({"tiers": tiers, "writer": "thread"}).save({"w": torch.zeros(9)}, step=1)
"""


@pytest.mark.long
def test_a_writer_thread_writes_to_s3_while_the_interpreter_ends(moto: S3Server, bucket: str) -> None:
    """A script that ends without `close()` has its last snapshot; the client needs an executor for that."""
    command = [sys.executable, "-c", ENDS, f"s3://{bucket}/run", json.dumps(moto.options())]
    interpreters.run(command, check=True, without_ours=True, timeout=120)
    assert [info.step for info in Repository(S3Storage(f"s3://{bucket}/run", moto.options())).list()] == [1]
