"""Sends requests to an S3 store, each bounded in time.

They are tried again while that helps. The client is the one of s3fs, so that credentials, endpoints and
`storage_options` mean what they mean there. Its own retries are off: they would wait without a bound and draw jitter
from the global random stream.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from s3fs import S3FileSystem  # type: ignore[import-untyped]

from ckpt_engine.errors import CkptError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.storage import client_randomness, redaction
from ckpt_engine.store.storage.disk import Meter, require_size
from ckpt_engine.store.storage.object_options import ObjectOptions
from ckpt_engine.store.storage.retries import SLOWEST_BYTES_PER_SECOND, Backoff, is_hopeless
from ckpt_engine.store.storage.s3_answers import (
    OTHER_ANSWERS,
    DamagedInTransitError,
    NotS3Error,
    S3Answer,
    is_transient,
    require_s3,
    retry_after_seconds,
    translated,
)
from ckpt_engine.store.storage.s3_body import MeterStoppedError, UploadBody, wait_of
from ckpt_engine.store.storage.upload_parts import MemoryBlocks

READ_BYTES = 256 << 10
_CLIENTS = 8
_CONNECTIONS = 64
_REQUESTS = 48
"""Fewer than connections: aiohttp shuffles those that wait for a connection with the global random stream."""
_LOOK_SECONDS = 5.0

_T = TypeVar("_T")
_clients: OrderedDict[tuple[object, ...], Any] = OrderedDict()
_clients_lock = threading.Lock()


class S3Calls:
    """One client and its event loop. `run` may be called from any thread, everything else on the loop.

    Args:
        url: of the storage, for messages.
        library_options: for `s3fs.S3FileSystem`.

    Attributes:
        fs: the library's; the same for all that speak to a server as the same user.
    """

    def __init__(self, url: str, options: ObjectOptions, library_options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self.meter = Meter()
        self.fs = _shared(_complete(library_options, options))
        client_randomness.shield()
        self._secrets = redaction.secrets_of(library_options)
        self._requests = asyncio.Semaphore(_REQUESTS)
        self._prepared: object = None

    def run(self, work: Coroutine[Any, Any, _T], what: str, name: str) -> _T:
        """The result of `work`. When this returns or raises, nothing of it continues in the background.

        Raises:
            StorageError: saying what could not be done to which object.
        """
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self.fs.loop)
        try:
            while not concurrent.futures.wait([future], _LOOK_SECONDS).done:
                if not self.fs.loop.is_running():
                    raise StorageError(f"cannot {what} {self.url}: the program is ending")
            return future.result()
        except (CkptError, KeyboardInterrupt, SystemExit):
            raise
        except MeterStoppedError as err:
            raise err.cause from None
        except Exception as err:  # noqa: BLE001 - raised again, translated
            shown = translated(err, what, f"{self.url}/{name}", self._secrets)
            raise shown from (None if redaction.shows(err, self._secrets) else err)
        finally:
            if not future.done():
                future.cancel()
                ended.wait(self.options.timeout_seconds)

    @property
    def encrypted(self) -> bool:
        """Whether the channel protects the bytes."""
        endpoint = self.fs.endpoint_url or self.fs.client_kwargs.get("endpoint_url")
        if endpoint is None and self.fs._s3 is not None:
            endpoint = self.fs._s3.meta.endpoint_url
        return not str(endpoint or "https:").startswith("http:")

    @property
    def verifying(self) -> bool:
        """Whether bytes have to be checked beyond what the protocol does."""
        return self.options.verifying(encrypted=self.encrypted)

    @property
    def summing(self) -> bool:
        """Whether uploads name their digest. Stores with Object Lock take none without it."""
        return self.verifying or bool(self.options.protect_days)

    async def call(self, method: str, *, backoff: Backoff | None = None, **arguments: Any) -> S3Answer:
        """The answer to a request without much of a body."""

        async def once(client: Any, _moved: Callable[[], None]) -> S3Answer:
            try:
                answer: S3Answer = await getattr(client, method)(**arguments)
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
        check: Callable[[S3Answer], Awaitable[None]] | None = None,
        backoff: Backoff | None = None,
        **arguments: Any,
    ) -> S3Answer:
        """The answer to a request that uploads a range of `blocks`.

        Args:
            check: raises `DamagedInTransitError` if the answer says that other bytes arrived.
        """

        async def once(client: Any, moved: Callable[[], None]) -> S3Answer:
            body = UploadBody(blocks, start, nbytes, moved=moved, meter=self.meter) if nbytes else b""
            try:
                answer: S3Answer = await getattr(client, method)(Body=body, **arguments)
            except Exception:
                if isinstance(body, UploadBody) and body.stopped is not None:
                    raise body.stopped from None
                raise
            if check is not None:
                await check(answer)
            return answer

        return await self.trying(once, nbytes=nbytes, backoff=backoff)

    async def receive(self, out: memoryview, start: int, **arguments: Any) -> int:
        """Fill `out` with an object's bytes from `start` on; returns how many there were.

        Interrupted, it continues where it was.
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

    async def receive_all(self, name: str, **arguments: Any) -> tuple[bytes, S3Answer]:
        """A whole object of moderate size, and what the store says of it.

        Raises:
            CorruptError: it has more bytes than an object of this name can have.
        """

        async def once(client: Any, moved: Callable[[], None]) -> tuple[bytes, S3Answer]:
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
                is_other = isinstance(err, NotS3Error) and backoff.failures >= OTHER_ANSWERS
                wait = None if is_other else backoff.next_wait(retry_after_seconds(err))
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
        client = await self.fs.set_session()
        if client is not self._prepared:
            # Not every server answers "Expect: 100-continue", and aiohttp would wait for that.
            client.meta.events.register_last("before-sign.s3", _drop_expect)
            client.meta.events.register_last("after-call.s3", require_s3)
            client_randomness.shield()
            self._prepared = client
        return client


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
