"""Requests to an S3 store: each bounded in time, tried again while that helps, its errors translated.

The client is the one of s3fs, so that credentials, endpoints and `storage_options` mean what they mean there. Its own
retries are off: they would wait without a bound and draw jitter from the global random stream.

The body of an upload request: sent straight from the caller's memory, slice by slice.

To botocore it is a file, to aiohttp a payload. The kernel takes the bytes from the caller's memory itself; what it does
not take at once asyncio may keep a view of. So the next slice waits until it keeps nothing, and a connection that is
given up loses what it keeps at once: the caller's memory is somebody else's then. Before it is encrypted a slice is
copied, because that layer keeps views for longer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import ClientError as HttpError
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from ckpt_engine.errors import CkptError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.storage import object_requests
from ckpt_engine.store.storage.disk import Meter, require_size
from ckpt_engine.store.storage.object_requests import (
    CREDENTIALS_HINT,
    SLOWEST_BYTES_PER_SECOND,
    Backoff,
    MemoryBlocks,
    ObjectOptions,
    explained,
    is_hopeless,
    redacted,
)

READ_BYTES = 256 << 10
_CLIENTS = 8
_CONNECTIONS = 64
_REQUESTS = 48
"""Fewer than connections: aiohttp shuffles those that wait for a connection with the global random stream."""
_LOOK_SECONDS = 5.0

_T = TypeVar("_T")
Answer = dict[str, Any]


class S3Calls:
    """One client and its event loop. `run` may be called from any thread, everything else on the loop.

    Args:
        url: of the storage, for messages.
        library_options: for `s3fs.S3FileSystem`.
    """

    def __init__(self, url: str, options: ObjectOptions, library_options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self.meter = Meter()
        self._fs = _shared(_complete(library_options, options))
        object_requests.shield()
        self._secrets = object_requests.secrets_of(library_options)
        self._requests = asyncio.Semaphore(_REQUESTS)
        self._prepared: object = None

    def run(self, work: Coroutine[Any, Any, _T], what: str, name: str) -> _T:
        """The result of `work`. When this returns or raises, nothing of it goes on in the background.

        Raises:
            StorageError: saying what could not be done to which object.
        """
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._fs.loop)
        try:
            while True:
                try:
                    return future.result(_LOOK_SECONDS)
                except concurrent.futures.TimeoutError:
                    if not future.done() and not self._fs.loop.is_running():
                        raise StorageError(f"cannot {what} {self.url}: the program is ending") from None
                    if future.done():
                        return future.result()
        except (CkptError, KeyboardInterrupt, SystemExit):
            raise
        except MeterStoppedError as err:
            raise err.cause from None
        except Exception as err:  # noqa: BLE001 - raised again, translated
            shown = translated(err, what, f"{self.url}/{name}", self._secrets)
            raise shown from (None if object_requests.shows(err, self._secrets) else err)
        finally:
            if not future.done():
                future.cancel()
                ended.wait(self.options.timeout_seconds)

    @property
    def encrypted(self) -> bool:
        """Whether the channel protects the bytes."""
        endpoint = self._fs.endpoint_url or self._fs.client_kwargs.get("endpoint_url")
        if endpoint is None and self._fs._s3 is not None:
            endpoint = self._fs._s3.meta.endpoint_url
        return not str(endpoint or "https:").startswith("http:")

    @property
    def verifying(self) -> bool:
        """Whether bytes have to be checked beyond what the protocol does."""
        return self.options.verifying(encrypted=self.encrypted)

    async def call(self, method: str, *, backoff: Backoff | None = None, **arguments: Any) -> Answer:
        """The answer to a request without much of a body."""

        async def once(client: Any, _moved: Callable[[], None]) -> Answer:
            try:
                answer: Answer = await getattr(client, method)(**arguments)
            except ValueError as err:  # a flipped bit in a date or number of the answer; arguments fail otherwise
                raise DamagedInTransitError(f"the answer to {method} cannot be read: {err}") from err
            return answer

        return await self.trying(once, backoff=backoff)

    async def send(
        self,
        method: str,
        blocks: MemoryBlocks,
        start: int,
        nbytes: int,
        *,
        check: Callable[[Answer], Awaitable[None]] | None = None,
        backoff: Backoff | None = None,
        **arguments: Any,
    ) -> Answer:
        """The answer to a request that uploads a range of `blocks`.

        Args:
            check: raises `DamagedInTransitError` if the answer says that other bytes arrived.
        """

        async def once(client: Any, moved: Callable[[], None]) -> Answer:
            body = Body(blocks, start, nbytes, moved=moved, meter=self.meter) if nbytes else b""
            try:
                answer: Answer = await getattr(client, method)(Body=body, **arguments)
            except Exception:
                if isinstance(body, Body) and body.stopped is not None:
                    raise body.stopped from None
                raise
            if check is not None:
                await check(answer)
            return answer

        return await self.trying(once, nbytes=nbytes, backoff=backoff)

    async def receive(self, out: memoryview, start: int, **arguments: Any) -> int:
        """Fill `out` with an object's bytes from `start` on; returns how many there were.

        Interrupted, it goes on where it was.
        """
        done = 0
        backoff = self.backoff()

        async def once(client: Any, moved: Callable[[], None]) -> None:
            nonlocal done
            span = f"bytes={start + done}-{start + len(out) - 1}"
            answer = await client.get_object(Range=span, **arguments)
            if start + done and not str(answer.get("ContentRange", "")).startswith(f"bytes {start + done}-"):
                raise NotS3Error(f"another range was sent than {span}")
            expected = done + int(answer["ContentLength"])
            async with (body := answer["Body"]):  # what old aiobotocore gives to `as` cannot read so many bytes
                while done < len(out) and (data := await body.read(min(READ_BYTES, len(out) - done))):
                    out[done : done + len(data)] = data
                    done += len(data)
                    moved()
                    backoff.progressed()
            if done < min(expected, len(out)):
                raise DamagedInTransitError(f"the answer ended {expected - done} bytes early")

        if len(out):
            await self.trying(once, nbytes=len(out), backoff=backoff)
        return done

    async def receive_all(self, name: str, **arguments: Any) -> tuple[bytes, Answer]:
        """A whole object of moderate size, and what the store says of it.

        Raises:
            CorruptError: it has more bytes than an object of this name can have.
        """

        async def once(client: Any, moved: Callable[[], None]) -> tuple[bytes, Answer]:
            answer = await client.get_object(**arguments)
            expected = int(answer["ContentLength"])
            found = bytearray()
            async with (body := answer["Body"]):
                require_size(f"{self.url}/{name}", expected, names.most_bytes(name))
                while len(found) <= expected and (data := await body.read(READ_BYTES)):
                    found += data
                    moved()
            if len(found) != expected:
                raise DamagedInTransitError(f"{len(found)} bytes came instead of {expected}")
            return bytes(found), answer

        return await self.trying(once, nbytes=1 << 30)

    def backoff(self) -> Backoff:
        """The patience of one operation."""
        return Backoff(self.options.retry_seconds)

    async def trying(
        self,
        once: Callable[[Any, Callable[[], None]], Awaitable[_T]],
        *,
        nbytes: int = 0,
        backoff: Backoff | None = None,
    ) -> _T:
        """Do `once` until it succeeds, fails for good, or has failed for too long.

        Args:
            once: gets the client and what to call whenever bytes have moved.
            nbytes: about how many bytes it moves.
        """
        backoff = backoff or self.backoff()
        while True:
            try:
                return await self._bounded(once, nbytes)
            except Exception as err:
                if not is_transient(err) or is_hopeless(err):
                    raise
                # A login page that does not pass within seconds stays: the endpoint is a wrong one, or a tier is down.
                is_other = isinstance(err, NotS3Error) and backoff.failures >= _OTHER_ANSWERS
                wait = None if is_other else backoff.next_wait(told_wait_seconds(err))
                if wait is None:
                    err.add_note(f"gave up after {backoff.failures} attempts")
                    raise
                wait_of(self.meter, 0)
                await asyncio.sleep(wait)

    async def _bounded(self, once: Callable[[Any, Callable[[], None]], Awaitable[_T]], nbytes: int) -> _T:
        """One attempt. It may take long as long as it moves, but not for ever."""
        loop = asyncio.get_running_loop()
        patience = self.options.timeout_seconds
        async with self._requests:
            latest = loop.time() + patience + nbytes / SLOWEST_BYTES_PER_SECOND
            async with asyncio.timeout(patience) as limit:
                return await once(await self.client(), lambda: limit.reschedule(min(loop.time() + patience, latest)))

    async def client(self) -> Any:
        """Of the library, made when it is first needed."""
        client = await self._fs.set_session()
        if client is not self._prepared:
            # Not every server answers "Expect: 100-continue", and aiohttp would wait for that.
            client.meta.events.register_last("before-sign.s3", _drop_expect)
            client.meta.events.register_last("after-call.s3", _require_s3)
            object_requests.shield()
            self._prepared = client
        return client


_clients: OrderedDict[tuple[object, ...], Any] = OrderedDict()
_clients_lock = threading.Lock()


def _shared(complete: Mapping[str, Any]) -> Any:
    """One client for all storages of the same options in the same environment, so that connections are shared."""
    environment = tuple(sorted((name, text) for name, text in os.environ.items() if name.startswith("AWS_")))
    key = (os.getpid(), repr(sorted(complete.items())), environment)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = S3FileSystem(**complete, skip_instance_cache=True)
            if len(_clients) > _CLIENTS:
                _clients.popitem(last=False)
        _clients.move_to_end(key)
        return _clients[key]


def _drop_expect(request: Any, **_: Any) -> None:
    if "Expect" in request.headers:
        del request.headers["Expect"]


def _complete(given: Mapping[str, Any], options: ObjectOptions) -> dict[str, Any]:
    """What the user gave, over what we need."""
    config = dict(given.get("config_kwargs") or {})
    s3 = {"payload_signing_enabled": False, **(config.pop("s3", None) or {})}
    defaults = {
        "connect_timeout": options.timeout_seconds,
        "read_timeout": options.timeout_seconds,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    forced = {"retries": {"total_max_attempts": 1, "mode": "standard"}, "max_pool_connections": _CONNECTIONS}
    return {**given, "config_kwargs": {**defaults, **config, **forced, "s3": s3}, "use_listings_cache": False}


SLICE_BYTES = 512 << 10
_NAP_SECONDS = 0.1


class MeterStoppedError(Exception):
    """A meter has raised `cause`: no other attempt is to be made."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


def wait_of(meter: Meter, nbytes: int) -> float:
    """What `meter` says.

    Raises:
        MeterStoppedError: it has raised.
    """
    try:
        return meter.wait(nbytes)
    except Exception as err:
        raise MeterStoppedError(err) from err


class Body(Payload):
    """Bytes `start` to `start + nbytes` of `blocks`; may be sent several times.

    Args:
        moved: called after each slice was taken by the socket.
    """

    _autoclose = True

    def __init__(
        self, blocks: MemoryBlocks, start: int, nbytes: int, *, moved: Callable[[], None], meter: Meter
    ) -> None:
        super().__init__(None, content_type="application/octet-stream")
        self._blocks = blocks
        self._start = start
        self._size = nbytes
        self._moved = moved
        self._meter = meter
        self._at = 0
        self.stopped: MeterStoppedError | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        assert self._size is not None
        transport: Any = getattr(writer, "transport", None)
        plain = transport is not None and transport.get_extra_info("sslcontext") is None
        if plain:
            transport.set_write_buffer_limits(high=0)  # `drain` returns when nothing is kept
        try:
            for view in self._blocks.views(self._start, self._size, SLICE_BYTES):
                with view:
                    await self._wait_for_turn(len(view))
                    await writer.write(view if plain else bytes(view))
                    await writer.drain()
                self._moved()
        except BaseException:
            if plain:
                transport.abort()
            raise

    async def _wait_for_turn(self, nbytes: int) -> None:
        try:
            wait = wait_of(self._meter, nbytes)
        except MeterStoppedError as err:
            self.stopped = err  # aiohttp makes a connection error of what is raised here
            raise
        while wait > 0:
            self._moved()
            await asyncio.sleep(min(wait, _NAP_SECONDS))
            wait -= _NAP_SECONDS
        self._moved()

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length in (None, self._size), (content_length, self._size)
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read().decode(encoding, errors)

    # What botocore reads where it has to sign or to check payloads.

    def __len__(self) -> int:
        return self._size or 0

    def read(self, nbytes: int = -1) -> bytes:
        left = len(self) - self._at
        nbytes = left if nbytes < 0 else min(nbytes, left)
        data = b"".join(self._blocks.views(self._start + self._at, nbytes, SLICE_BYTES)) if nbytes else b""
        self._at += nbytes
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",
    }
)


class DamagedInTransitError(Exception):
    """What arrived is not what was sent."""

    hint = "check the network; if ETags of this store are no MD5: storage_options verify: never"


class NotS3Error(DamagedInTransitError):
    """What answers is no S3 store: a proxy, a login page, an empty body. Nothing follows from what it leaves out."""

    hint = "check the endpoint, and what stands before it: a proxy or a login page may answer in its place"


class LostError(DamagedInTransitError):
    """The store has acknowledged an object and does not have it."""

    hint = "look at the store: it loses what it acknowledges"


_ANSWERS: Mapping[str, tuple[str, ...]] = {
    "ListObjectsV2": ("ListBucketResult", "Name", "IsTruncated"),
    "CreateMultipartUpload": ("", "UploadId"),  # the root has another name in rclone
    "CompleteMultipartUpload": ("CompleteMultipartUploadResult",),
    "PutObject": ("", "ETag"),
    "UploadPart": ("", "ETag"),
    "HeadObject": ("", "ETag", "ContentLength"),
    "GetObject": ("", "ETag", "ContentLength"),
}
"""The root element of an answer, "" where it has none, and what every S3 store puts into it."""
_OTHER_ANSWERS = 6
"""So many answers of something else are waited for to pass."""
_NO_CONTENT = frozenset({"DeleteObject", "AbortMultipartUpload"})


async def _require_s3(http_response: Any, parsed: Answer, model: Any, **_: Any) -> None:
    """An answer with a good status has to be that of an S3 store; else nothing was listed, stored or removed.

    Raises:
        NotS3Error
    """
    if http_response.status_code >= 300:
        return
    if model.name in _NO_CONTENT and http_response.status_code != 204:
        raise NotS3Error(f"the answer to {model.name} is {http_response.status_code}, not 204")
    root, *fields = _ANSWERS.get(model.name, ("",))
    # The root is the first element behind the declaration; the parser takes any.
    if root and not re.match(rb"\s*(<\?[^>]*>\s*)?<(\w+:)?%b[\s>/]" % root.encode(), await http_response.content):
        raise NotS3Error(f"the answer to {model.name} is no {root}")
    if missing := [name for name in fields if name not in parsed]:
        raise NotS3Error(f"the answer to {model.name} has no {missing[0]}")


class OthersError(Exception):
    """The object is there, and by somebody else."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error answer, 0 if there was no answer."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: BaseException) -> str:
    """The S3 error code of an error answer, "" if there was none."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, ClientError):
        return status_of(error) in _TRANSIENT_STATUS or code_of(error) in _TRANSIENT_CODES
    return isinstance(
        error,
        TimeoutError
        | asyncio.TimeoutError
        | ConnectionError
        | BotoConnectionError
        | HTTPClientError
        | HttpError
        | ResponseParserError
        | DamagedInTransitError,
    )


def told_wait_seconds(error: BaseException) -> float:
    """The `Retry-After` of an answer in seconds, at most a minute; 0 if there is none."""
    response: Any = getattr(error, "response", None) or {}
    text = str(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
    return min(float(text), 60.0) if text.isdigit() else 0.0


def translated(error: BaseException, what: str, where: str, secrets: Collection[str] = ()) -> StorageError:
    """Our error for `error`, which happened when doing `what` at `where`; raise it `from` the original.

    Args:
        secrets: texts that must not be shown.
    """
    if isinstance(error, StorageError):
        return error
    status, code, reason, hint = 0, "", f"{type(error).__name__}: {error}".removesuffix(": "), None
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        reason, hint = str(error), CREDENTIALS_HINT
    elif isinstance(error, ClientError):
        status, code = status_of(error), code_of(error)
        reason = f"{status} {code}: {error.response.get('Error', {}).get('Message', '')}".removesuffix(": ")
        if status in (301, 307, 400) and code in ("PermanentRedirect", "IllegalLocationConstraintException"):
            hint = "set region_name in storage_options: client_kwargs"
    elif isinstance(error, DamagedInTransitError):
        reason, hint = str(error), error.hint
    elif isinstance(error, TimeoutError):
        reason, hint = "the server does not answer", "check the endpoint and the network"
    elif isinstance(error, BotoConnectionError | ConnectionError | HttpError | HTTPClientError):
        hint = "check the endpoint and the network"
    elif isinstance(error, BotoCoreError | ValueError):
        hint = "check the URL and storage_options"
    return explained(what, where, redacted(reason, secrets), status, code, hint)
