"""What requests to all object stores share: names, options, retries, parts, and messages without secrets.

The options of an object store that are ours; all others belong to the library that talks to it.

When to try again: exponential backoff with full jitter, bounded in time.

"Full jitter" is what spreads many clients best (Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog 2015).

Keeps out of messages what opens a store.

Cutting an upload into parts without copying: pure arithmetic over memory that stays where it is.

The limits are those of S3, which its relatives share: at most 10,000 parts, each of 5 MiB (but the last) to 5 GiB.

Keeps client libraries away from Python's global random stream.

botocore, aiohttp and gcsfs draw retry jitter and shuffles from it, so that a dying server seen from inside the trainer
would change what training draws next. The writer is usually another process, but not always.
"""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar
from urllib.parse import quote

from ckpt_engine.errors import (
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.observe.units import LOGIN
from ckpt_engine.store import names

T = TypeVar("T")


def checked(name: str) -> str:
    """`name`, if it is an object name.

    Raises:
        StorageError: a name that could leave the root or meet a temporary object.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".tmp-") or "\0" in part for part in parts):
        raise StorageError(f"not an object name: {name!r}")
    return name


def split_url(url: str) -> tuple[str, str]:
    """The scheme and the path of a root, without slashes around it.

    Raises:
        StorageError: not the URL of a root. The message never shows a URL that carries credentials.
    """
    scheme, _, path = url.partition("://")
    scheme = scheme.lower()
    if LOGIN.match(path):
        raise StorageError(
            f"the {scheme}:// URL carries credentials", hint="give them in storage_options or the environment"
        )
    path = path.strip("/")
    if query := re.search(r"[?#]", path):  # it may be a signature
        raise StorageError(f"no '?' or '#' may follow {scheme}://{path[: query.start()]}", hint="remove it")
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise StorageError(f"not a storage root: {scheme}://{path}", hint="leave out '//', '.' and '..'")
    return scheme, path


MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
_ROUND_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Bytes `start` to `start + nbytes` of an object; `number` counts from 1."""

    number: int
    start: int
    nbytes: int


def plan_parts(nbytes: int, part_bytes: int) -> tuple[UploadPart, ...]:
    """The parts of an object, all of one size but the last (some stores insist on that).

    The same object always gets the same parts, so that an interrupted upload can be continued.

    Args:
        part_bytes: the wanted size; taken bigger, in whole MiB, where 10,000 parts would not do.

    Raises:
        StorageError: no object can be that big.
    """
    size = max(part_bytes, MIN_PART_BYTES)
    if nbytes > size * MAX_PARTS:
        size = -(-nbytes // MAX_PARTS)
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
    if size > MAX_PART_BYTES:
        raise StorageError(f"an object of {nbytes} bytes is more than an object store takes ({MAX_PARTS} x 5 GiB)")
    return tuple(
        UploadPart(number, start, min(size, nbytes - start))
        for number, start in enumerate(range(0, max(nbytes, 1), size), 1)
    )


class MemoryBlocks:
    """Blocks of memory read as if they were one; nothing is copied."""

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._blocks = [memoryview(block).cast("B") for block in blocks if block.nbytes]
        self.nbytes = sum(len(block) for block in self._blocks)

    def release(self) -> None:
        """Let go of the memory, also if there are references to this."""
        for block in self._blocks:
            block.release()
        self._blocks = []

    def views(self, start: int, nbytes: int, most: int) -> Iterator[memoryview]:
        """The bytes from `start` on as views of at most `most` bytes each; release each after use."""
        at = 0
        end = start + nbytes
        for block in self._blocks:
            here, stop = max(start, at) - at, min(end, at + len(block)) - at
            while here < stop:
                upto = min(here + most, stop)
                yield block[here:upto]
                here = upto
            at += len(block)
            if at >= end:
                return


VERIFY = ("auto", "always", "never")
_LEAST = {"part_bytes": MIN_PART_BYTES, "concurrency": 1, "timeout_seconds": 0, "retry_seconds": 0}


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """How objects are moved.

    Args:
        part_bytes: size of the parts of a big upload; bigger where the object needs it. From 5 MiB to 5 GiB.
        concurrency: parts under way at once.
        timeout_seconds: a request that moves no byte for so long has failed.
        retry_seconds: how long a failing request is tried again, from its first failure on.
        verify: whether what was sent and listed is checked beyond what the protocol does; "auto" does so where the
            channel is not encrypted, and so does not protect the bytes itself.
        stale_upload_seconds: an interrupted upload that old is abandoned and is removed by `sweep`.
    """

    part_bytes: int = 64 << 20
    concurrency: int = 4
    timeout_seconds: float = 20.0
    retry_seconds: float = 60.0
    verify: str = "auto"
    stale_upload_seconds: float = 86_400.0

    @classmethod
    def split(cls, options: Mapping[str, object]) -> tuple[Self, dict[str, Any]]:
        """Ours, and the rest for the library.

        Raises:
            StorageError: one of ours has an impossible value.
        """
        rest = dict(options)
        ours = cls(**{field.name: rest.pop(field.name) for field in fields(cls) if field.name in rest})  # type: ignore[arg-type]
        ours._check()
        return ours, rest

    def _check(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise StorageError(f"storage option {name} must be a number of at least {least}, got {value!r}")
        if self.part_bytes > MAX_PART_BYTES:
            raise StorageError(f"storage option part_bytes must be at most {MAX_PART_BYTES}, got {self.part_bytes}")
        if self.verify not in VERIFY:
            raise StorageError(f"storage option verify must be one of {', '.join(VERIFY)}, got {self.verify!r}")

    def verifying(self, *, encrypted: bool) -> bool:
        """Whether bytes are checked beyond the protocol on such a channel."""
        return self.verify == "always" or (self.verify == "auto" and not encrypted)


BASE_SECONDS = 0.1
CAP_SECONDS = 8.0
SLOWEST_BYTES_PER_SECOND = 50_000
"""A request slower than this has failed, even if it moves."""

# Never the global stream of `random`: training draws from it, and a server that dies must not change a training run.
_uniform = random.SystemRandom().uniform


_NOBODY = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, int(socket.EAI_NONAME), int(socket.EAI_NODATA)}
)
_asking: ContextVar[bool] = ContextVar("ckpt_asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Within it a request to where no server listens is not tried again.

    For those who have other places to ask, or who come back later by themselves.
    """
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def ask_apart(question: Callable[[], T], name: str) -> Future[T]:
    """The answer to a question, asked at once within `asking` on a thread of that name, which may hang for ever."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            with asking():
                answer.set_result(question())
        except BaseException as err:  # noqa: BLE001 - raised where the answer is looked at
            answer.set_exception(err)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return answer


def is_asking() -> bool:
    """Whether this is within `asking`."""
    return _asking.get()


def is_hopeless(error: BaseException) -> bool:
    """Whether no server listens there, and the caller does not wait for one: see `asking`."""
    if not _asking.get():
        return False
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _NOBODY:
            return True
        link = link.__cause__ or link.__context__
    return False


@dataclass(frozen=True, slots=True)
class GrowingPauses:
    """Pauses between attempts or looks: each one is `factor` times as long as the one before, up to the longest."""

    first_seconds: float
    most_seconds: float
    factor: float = 2.0

    def seconds(self, number: int) -> float:
        """The pause with this number; the first one has 0."""
        return min(self.most_seconds, self.first_seconds * self.factor ** max(0, min(number, 30)))

    def after(self, seconds: float) -> float:
        """The pause that follows one of so many seconds."""
        return min(self.most_seconds, seconds * self.factor)


_PAUSES = GrowingPauses(BASE_SECONDS, CAP_SECONDS)


class Backoff:
    """The waits of one operation, until it has failed for `retry_seconds`.

    Args:
        retry_seconds: no new attempt begins later than this after the first failure.
        clock: monotonic seconds.
        uniform: a random number between its two arguments.
    """

    def __init__(
        self,
        retry_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = _uniform,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._uniform = uniform
        self._failed_since: float | None = None
        self.failures = 0

    def began(self) -> None:
        """The time runs from now on: what is done has a patience of its own, and fails late."""
        self._failed_since = self._clock()

    def progressed(self) -> None:
        """Part of the work was done: the time starts again."""
        self._failed_since = None
        self.failures = 0

    def next_wait(self, told_seconds: float = 0.0) -> float | None:
        """After a failure: seconds to wait before the next attempt, or None to give up.

        Args:
            told_seconds: the least wait that the server asked for.
        """
        now = self._clock()
        if self._failed_since is None:
            self._failed_since = now
        self.failures += 1
        wait = max(told_seconds, self._uniform(0.0, _PAUSES.seconds(self.failures)))
        return wait if now + wait - self._failed_since <= self._retry_seconds else None


class OtherAnswerError(ConnectionError):
    """What answers is no store, such as a proxy or a login page. A later answer may be that of the store."""


def require_empty(prefix: str, level: Collection[str], has_record: Callable[[], bool]) -> None:
    """An empty listing counts where what is around it agrees: libraries take some other answers for an empty one.

    Args:
        prefix: what was listed; "" for the root.
        level: a second listing, that of the names in the root; folders end with a slash.
        has_record: asks whether the root has a run's record.

    Raises:
        OtherAnswerError
    """
    is_listed = prefix.partition("/")[0] + "/" in level if prefix else bool(level)
    if is_listed or (names.RECORD not in level and has_record()):
        raise OtherAnswerError(f"the listing of {prefix or 'the root'} is empty, and another answer says it is not")


def require_stored(name: str, nbytes: int, there: int | None) -> None:
    """Raises `StorageError` unless the bytes of an object that the store has acknowledged are `there`."""
    if there != nbytes:
        raise StorageError(
            f"the store acknowledges {name}, and has {'nothing' if there is None else there} of its {nbytes} bytes",
            hint="look at the store: it loses what it acknowledges; or a .gitignore there names the object",
        )


NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL = frozenset({"EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_CREDENTIALS = frozenset(
    {
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "AuthorizationHeaderMalformed",
    }
)
CREDENTIALS_HINT = (
    "check the credentials: those in storage_options, in the environment (AWS_* and the like), or in the profile"
)


def explained(what: str, where: str, reason: str, status: int, code: str, hint: str | None) -> StorageError:
    """Our error for what an object store has answered when `what` was done at `where`.

    Args:
        status: of HTTP; 0: it did not answer.
        code: its own for the error, if it has one.
        hint: where the kind of error has none.
    """
    said = f"cannot {what} {where}: {reason}"
    if code in NO_BUCKET:
        return StorageMissingError(said, hint="create the bucket first; ckpt-engine makes none")
    if status == 404:
        return StorageMissingError(said)
    if status == 412:
        return StorageExistsError(f"cannot {what} {where}: it exists")
    if code in _FULL or status == 507:
        return StorageFullError(said, hint="free space or keep fewer snapshots")
    if code in _CREDENTIALS or status == 401:
        return StorageError(said, hint=CREDENTIALS_HINT)
    if status == 403:
        refused = StorageReadOnlyError if what in ("write", "delete") else StorageError
        return refused(said, hint=f"{CREDENTIALS_HINT}; and that they may {what} here")
    return StorageError(said, hint=hint)


_WORDS = ("key", "secret", "token", "pass", "credential", "sas", "connection_string")
_PUBLIC = frozenset({"endpoint_url", "region_name", "anon", "profile", "project", "account_name", "host", "port"})
_ENVIRONMENT = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_REDACTION_LEAST = 6
"""Shorter texts are parts of ordinary words: hiding them would make messages unreadable."""
_HIDDEN = "***"
_SIGNED = re.compile(r"[?&;](sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|token|access_token|accountkey)=", re.IGNORECASE)
"""In a URL that opens what it names for all who have it."""


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """The texts in a library's options and in the environment that must not be shown, longest first.

    At the top level that is everything but what is known to be public. Below, what its name says is a secret; and
    user names and passwords in any URL.
    """
    found = {os.environ.get(name, "") for name in _ENVIRONMENT}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found.update(_below(value, secret=_is_secret(name)))
        elif isinstance(value, str):
            found.update([*_passwords(value)] if name in _PUBLIC else [value, *_passwords(value)])
    found.update([quote(text, safe="") for text in found])
    return tuple(sorted((text for text in found if len(text) >= _REDACTION_LEAST), key=len, reverse=True))


def redacted(text: str, secrets: Collection[str]) -> str:
    """`text` without them."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text


def shows(error: BaseException, secrets: Collection[str]) -> bool:
    """Whether a traceback of `error` would show one of them or a signed URL, in what led to it too."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        text = "\n".join([f"{one!r} {one}", *getattr(one, "__notes__", ())])
        if redacted(text, secrets) != text or _SIGNED.search(text):
            return True
        waiting += [one.__cause__, one.__context__]
    return False


def _below(options: Mapping[str, object], *, secret: bool) -> Iterator[str]:
    for name, value in options.items():
        hidden = secret or _is_secret(name)
        if isinstance(value, Mapping):
            yield from _below(value, secret=hidden)
        elif isinstance(value, str):
            yield from _passwords(value)
            if hidden:
                yield value


def _is_secret(name: object) -> bool:
    return any(word in str(name).lower() for word in _WORDS)


def _passwords(text: str) -> Iterator[str]:
    """Who logs in with what, if `text` is a URL that says so; in pieces too, for a slash in it confuses libraries."""
    _, scheme, rest = text.partition("://")
    login, at, _ = rest.rpartition("@")
    if scheme and at:
        yield login
        for part in login.split(":", 1)[1:]:
            yield part
            yield from part.split("/")


_PACKAGES = frozenset(
    {"aiobotocore", "aiohttp", "botocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "ocifs", "ossfs", "paramiko"}
)
_own = random.SystemRandom()


def shield() -> None:
    """Give the modules of these packages that are imported by now a random source of their own."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
