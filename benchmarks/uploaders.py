"""The ways to upload one image to an S3 endpoint under TLS, each in its process: none inherits another's memory."""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from benchmarks.measure import CpuMeter, PeakMemory

WAIT_SECONDS = 120.0
BUCKET = "bucket"
_FILL_BYTES = 1 << 20
_KEYS = {"key": "benchmark", "secret": "benchmark-secret"}
_TRUSTED = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"addressing_style": "path", "payload_signing_enabled": False},
}


@dataclass(frozen=True, slots=True)
class Upload:
    """What one upload took.

    Args:
        extra_bytes: the most memory that the process used during it, beyond what it used before the first one.
    """

    seconds: float
    cpu_seconds: float
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """What every way uploads, and to where.

    Args:
        image: path of the shared memory.
        concurrency: parts under way at once.
        certificate: by which an https server is known.
    """

    url: str
    image: str
    nbytes: int
    part_bytes: int
    concurrency: int
    certificate: str = ""

    @property
    def trust(self) -> dict[str, str]:
        """What a client of botocore needs for that."""
        return {"verify": self.certificate} if self.certificate else {}


class Image:
    """Shared memory of the same kind as the engine's arena (a memfd), filled with what does not compress.

    Args:
        nbytes: of it.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("image", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        block = os.urandom(_FILL_BYTES)
        for start in range(0, nbytes, len(block)):
            os.pwrite(self._fd, block[: nbytes - start], start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


Put = Callable[[str], object]
"""Uploads the image under this name."""
Way = Callable[[Job, memoryview], AbstractContextManager[Put]]


class Uploader:
    """A process that uploads on an order.

    Args:
        way: one of `WAYS`.
    """

    def __init__(self, way: str, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(way, job, theirs), name=f"uploader {way}", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(WAIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def upload(self) -> Upload:
        """Upload once more.

        Raises:
            RuntimeError: it failed.
            TimeoutError
        """
        with suppress(BrokenPipeError):  # it has failed before, and said why
            self._pipe.send(f"data/{uuid.uuid4().hex}")
        if not self._pipe.poll(WAIT_SECONDS):
            raise TimeoutError(f"{self._process.name} did not end in {WAIT_SECONDS:.0f} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._process.name} is gone") from None
        if not isinstance(answer, Upload):
            raise RuntimeError(f"{self._process.name}: {answer}")
        return answer


def _work(way: str, job: Job, pipe: Connection) -> None:
    with open(job.image, "r+b") as file:  # noqa: PTH123 - no file system path
        image = memoryview(mmap.mmap(file.fileno(), job.nbytes))
    sum(image[:: mmap.PAGESIZE])  # every page is mapped now, so that none of them counts as growth
    try:
        with WAYS[way](job, image) as put:
            meter, memory, own = CpuMeter(), PeakMemory(), psutil.Process()
            at_first = own.memory_info().rss
            while True:
                name = pipe.recv()
                memory.restart()
                kept = own.memory_info().rss - at_first  # what an allocator keeps for reuse is no less used
                used, began = meter.read(), time.perf_counter()
                put(name)
                seconds = time.perf_counter() - began
                pipe.send(Upload(seconds, meter.read() - used, kept + memory.extra_bytes()))
    except EOFError:
        return
    except Exception as err:  # noqa: BLE001 - raised again in the process that asked
        pipe.send(f"{type(err).__name__}: {err}")


def _engine(transport: str) -> Way:
    @contextmanager
    def way(job: Job, image: memoryview) -> Iterator[Put]:
        from ckpt_engine.store.storage import open_storage

        given = {
            **_KEYS,
            "endpoint_url": job.url,
            "part_bytes": job.part_bytes,
            "concurrency": job.concurrency,
            "client_kwargs": {**job.trust, "region_name": "us-east-1"},
        }
        given |= {"transport": transport} if transport else {"config_kwargs": {"s3": {"addressing_style": "path"}}}
        storage = open_storage(f"s3://{BUCKET}/run", given)
        yield lambda name: storage.put(name, [image])

    return way


@contextmanager
def _raw(job: Job, image: memoryview) -> Iterator[Put]:
    """Nothing but the requests of a multipart upload; the bytes of each part lie ready."""
    from aiobotocore.session import get_session
    from botocore.config import Config

    parts = [bytes(image[start : start + job.part_bytes]) for start in range(0, job.nbytes, job.part_bytes)]
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(
        get_session()
        .create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=job.url,
            aws_access_key_id=_KEYS["key"],
            aws_secret_access_key=_KEYS["secret"],
            config=Config(**_TRUSTED, max_pool_connections=64, retries={"total_max_attempts": 1}),
            **job.trust,
        )
        .__aenter__()
    )

    async def put(name: str) -> None:
        at = {"Bucket": BUCKET, "Key": f"raw/{name}"}
        upload = (await client.create_multipart_upload(**at))["UploadId"]
        lanes = asyncio.Semaphore(job.concurrency)

        async def send(number: int, part: bytes) -> dict[str, Any]:
            async with lanes:
                answer = await client.upload_part(**at, UploadId=upload, PartNumber=number, Body=part)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        sent = await asyncio.gather(*(send(number, part) for number, part in enumerate(parts, 1)))
        await client.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": sent})

    try:
        yield lambda name: loop.run_until_complete(put(name))
    finally:
        loop.run_until_complete(client.close())
        loop.close()


@contextmanager
def _s3fs(job: Job, image: memoryview) -> Iterator[Put]:
    from s3fs import S3FileSystem

    system = S3FileSystem(**_KEYS, endpoint_url=job.url, config_kwargs=dict(_TRUSTED), client_kwargs=job.trust)
    data = bytes(image)
    yield lambda name: system.pipe_file(
        f"{BUCKET}/s3fs/{name}", data, chunksize=job.part_bytes, max_concurrency=job.concurrency
    )


@contextmanager
def _obstore(job: Job, image: memoryview) -> Iterator[Put]:
    from obstore.store import S3Store

    store = S3Store(BUCKET, **_obstore_options(job))
    yield lambda name: store.put(
        f"obstore/{name}", image, use_multipart=True, chunk_size=job.part_bytes, max_concurrency=job.concurrency
    )


def _obstore_options(job: Job) -> dict[str, Any]:
    return {
        "config": {
            "access_key_id": _KEYS["key"],
            "secret_access_key": _KEYS["secret"],
            "endpoint": job.url,
            "region": "us-east-1",
            "unsigned_payload": True,
        },
        "client_options": {"root_certificate": Path(job.certificate).read_bytes()},
    }


@contextmanager
def _awscrt(job: Job, image: memoryview) -> Iterator[Put]:
    """It reads the image as a file: memory it would take only through a stream of Python."""
    from awscrt import auth, http, io, s3

    group = io.EventLoopGroup(os.cpu_count())
    options = io.TlsContextOptions()
    options.verify_peer = False  # it knows no certificate that signs itself
    client = s3.S3Client(
        bootstrap=io.ClientBootstrap(group, io.DefaultHostResolver(group)),
        region="us-east-1",
        tls_mode=s3.S3RequestTlsMode.ENABLED,
        tls_connection_options=io.ClientTlsContext(options).new_connection_options(),
        credential_provider=auth.AwsCredentialsProvider.new_static(_KEYS["key"], _KEYS["secret"]),
        part_size=job.part_bytes,
        enable_s3express=False,
    )
    headers = http.HttpHeaders([("host", urlsplit(job.url).netloc), ("content-length", str(len(image)))])

    def put(name: str) -> None:
        request = client.make_request(
            type=s3.S3RequestType.PUT_OBJECT,
            request=http.HttpRequest("PUT", f"/{BUCKET}/awscrt/{name}", headers),
            send_filepath=job.image,
            max_active_connections_override=job.concurrency,
        )
        request.finished_future.result(WAIT_SECONDS)

    yield put


WAYS: Mapping[str, Way] = {
    "engine": _engine(""),
    "engine, obstore": _engine("obstore"),
    "raw": _raw,
    "s3fs": _s3fs,
    "obstore": _obstore,
    "awscrt": _awscrt,
}
_NEEDS = {"engine, obstore": "obstore", "obstore": "obstore", "awscrt": "awscrt"}


def ways() -> list[str]:
    """Those whose library is installed."""
    return [way for way in WAYS if importlib.util.find_spec(_NEEDS.get(way, "s3fs")) is not None]
