"""Objects in a store that is reached through obstore, a client in Rust.

It is for S3, Google and Azure where processors limit an upload. It takes the caller's memory without a copy, encrypts
on threads of its own and tries requests again. It neither continues an interrupted upload nor lists one, and an object
of several parts appears without a condition.
"""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from ckpt_engine.errors import CkptError, CorruptError, StorageError, StorageExistsError
from ckpt_engine.store import names
from ckpt_engine.store.storage import redaction, retries
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo
from ckpt_engine.store.storage.disk import Meter, require_size
from ckpt_engine.store.storage.object_requests import (
    NO_BUCKET,
    ObjectStore,
    OtherAnswerError,
    explained,
    require_empty,
    require_stored,
)
from ckpt_engine.store.storage.retries import BASE_SECONDS, CAP_SECONDS, SLOWEST_BYTES_PER_SECOND, Backoff
from ckpt_engine.store.storage.upload_parts import MemoryBlocks, plan_parts

SCHEMES: Mapping[str, Any] = {
    **dict.fromkeys(("s3", "s3a"), S3Store),
    **dict.fromkeys(("gs", "gcs"), GCSStore),
    **dict.fromkeys(("az", "abfs", "abfss"), AzureStore),
}
_S3FS = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
}
"""Options of s3fs and their names here, so that one line changes the transport."""
_TOKEN = "ckptwriter"
"""Metadata that says which put wrote an object; Azure takes no other names than identifiers."""
_SLICE_BYTES = 4 << 20
_READ_BYTES = 16 << 20
_STATUS = re.compile(r"(?:status(?: code)?:?|<HTTPStatusCode>) *(\d{3})", re.IGNORECASE)
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_MISSING = (FileNotFoundError, exceptions.NotFoundError)
_STATUSES = {
    _MISSING: 404,
    (exceptions.AlreadyExistsError, exceptions.PreconditionError): 412,
    (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError): 403,
}
_LOOK_SECONDS = 0.01

_T = TypeVar("_T")
_ObstoreRows = list[ObjectInfo]  # inside ObstoreStorage, `list` is its method
_Views = list[memoryview]


class ObstoreStorage(ObjectStore):
    """`Storage` on a bucket or container, or below a prefix of one.

    A small exclusive put asks the store not to replace anything. A big one looks before, which leaves a gap: names are
    unique and one process writes a run.

    Args:
        url: of the root; of Azure `az://container/folder`.
        options: those of `ObjectOptions`, of the store's configuration in obstore, and `client_options`.

    Raises:
        StorageError: no such store or setting, or a channel that does not protect the bytes.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, options)
        if self._scheme not in SCHEMES or not self._bucket:
            raise StorageError(f"obstore serves no {self.url}", hint=f"give {', '.join(SCHEMES)}://bucket/folder")
        self._kind = SCHEMES[self._scheme]
        self._client, self._config = _settings(self._kind, self._library_options)
        self._stores: dict[tuple[bool, bool], Any] = {}
        self._conditional = True
        self._meter = Meter()
        if self.options.verifying(encrypted=self.encrypted()):
            raise StorageError(
                f"obstore cannot check what arrives at {self.url}, and the channel does not protect it",
                hint="use https://, leave `transport` out of storage_options, or trust the network: verify: never",
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(metered=self._metered, versions=self, encrypted=self.encrypted)

    def _metered(self, wrap: Callable[[Meter], Meter]) -> Self:
        made = copy.copy(self)
        made._meter = wrap(self._meter)
        return made

    def encrypted(self) -> bool:
        """Whether the channel protects the bytes."""
        config = self._trying(self._store, "open", "").config
        return not (str(config.get("endpoint", "")).startswith("http:") or config.get("use_emulator"))

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        key = self._key(name)
        token = os.urandom(16).hex()
        with closing(MemoryBlocks.of(blocks)) as whole:
            self._trying(lambda: self._put(key, whole, token, exclusive=exclusive), "write", name)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        key = self._key(name)
        if nbytes is not None and nbytes <= 0:
            return b""
        return self._trying(lambda: self._get(name, key, start, nbytes), "read", name)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        key = self._key(name)
        target = out.cast("B")
        for at in range(0, len(target), _READ_BYTES):
            part = target[at : at + _READ_BYTES]
            found = memoryview(self._trying(partial(self._range, key, start + at, len(part)), "read", name))
            if len(found) < len(part):
                end = start + at + len(found)
                raise CorruptError(f"{self.url}/{name} ends at byte {end}, needed up to {start + len(target)}")
            part[:] = found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._prefix + prefix.rpartition("/")[0]
        yield from self._trying(lambda: self._found(folder, self._prefix + prefix), "list", prefix)

    def delete(self, *names: str) -> None:
        for name, key in [(name, self._key(name)) for name in names]:
            self._trying(partial(self._remove, key), "delete", name)

    def sweep(self) -> int:
        """Nothing: the library does not list unfinished uploads. A lifecycle rule of the bucket removes them."""
        return 0

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        """A small object and its version, None if there is none. For `replace`."""
        key = self._key(name)

        def read() -> tuple[bytes, str] | None:
            found = _there(lambda: _genuine(self._store().get(key)))
            if found is None:
                return None
            require_size(f"{self.url}/{name}", found.meta["size"], names.most_bytes(name))
            return bytes(found.bytes()), _version(found.meta)

        return self._trying(read, "read", name)

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        """Write a small object if it still has this version (None: if there is none).

        Raises:
            StorageExistsError: it has another version.
        """
        key, token = self._key(name), os.urandom(16).hex()
        mode: Any = "create" if version is None else _condition(version)

        def write() -> None:
            try:
                self._store().put(key, data, mode=mode, attributes={_TOKEN: token}, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, *_MISSING) as err:
                if _no_bucket(err):
                    raise
                if self._writer_of(key) != token:
                    raise StorageExistsError(f"{self.url}: {key} was replaced meanwhile") from err

        self._trying(write, "write", name)

    def _put(self, key: str, blocks: MemoryBlocks, token: str, *, exclusive: bool) -> None:
        small = blocks.nbytes <= self.options.part_bytes
        if exclusive and not (small and self._conditional) and self._writer_of(key) is not None:
            raise exceptions.AlreadyExistsError(key)
        try:
            if small:
                self._put_small(key, blocks, token, exclusive=exclusive)
            else:
                self._put_big(key, blocks, token)
        except exceptions.NotSupportedError:
            if not self._conditional:
                raise
            self._conditional = False
            self._put(key, blocks, token, exclusive=exclusive)
        except (exceptions.BaseError, OSError) as err:
            if not self._arrived(key, token, err):
                raise
        if exclusive:  # else another may have replaced it by now
            there = self._head(key)
            require_stored(key, blocks.nbytes, there and there.meta["size"])

    def _arrived(self, key: str, token: str, cause: Exception) -> bool:
        """Whether our object is there, although a put failed: the answer to it, or to its first try, was lost."""
        try:
            return self._writer_of(key, patient=isinstance(cause, exceptions.AlreadyExistsError)) == token
        except (exceptions.BaseError, OSError) as err:
            cause.add_note(f"it may have become visible all the same: {type(err).__name__}")
            return False

    def _put_small(self, key: str, blocks: MemoryBlocks, token: str, *, exclusive: bool) -> None:
        data = b"".join(self._slices(blocks, []))
        mode: Any = "create" if exclusive and self._conditional else "overwrite"
        self._store(writing=True).put(key, data, mode=mode, attributes={_TOKEN: token}, use_multipart=False)

    def _put_big(self, key: str, blocks: MemoryBlocks, token: str) -> None:
        lent: _Views = []
        part_bytes = plan_parts(blocks.nbytes, self.options.part_bytes)[0].nbytes
        try:
            self._store(writing=True).put(
                key,
                self._slices(blocks, lent),
                attributes={_TOKEN: token},
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=self.options.concurrency,
            )
        finally:
            self._take_back(lent)

    def _slices(self, blocks: MemoryBlocks, lent: _Views) -> Iterator[memoryview]:
        """The caller's memory, each slice when it is its turn. What is still lent is in `lent`."""
        for view in blocks.views(0, blocks.nbytes, _SLICE_BYTES):
            lent.append(view)
            self._meter.take_turn(len(view))
            yield view

    def _take_back(self, lent: _Views) -> None:
        """Return when the library reads none of it: connections that were given up end on its own threads."""
        waiting = threading.Event()
        left = self.options.timeout_seconds
        for view in lent:
            while True:
                try:
                    view.release()
                    break
                except BufferError:
                    if left <= 0:
                        raise
                    left -= _LOOK_SECONDS
                    waiting.wait(_LOOK_SECONDS)

    def _head(self, key: str, *, patient: bool = True) -> Any:
        """What the store says of an object; None: there is none."""
        return _there(lambda: _genuine(self._store(patient=patient).get(key, options={"head": True})))

    def _writer_of(self, key: str, *, patient: bool = True) -> str | None:
        """The token of the put that wrote an object, "" if it has none; None: there is no object."""
        found = self._head(key, patient=patient)
        return None if found is None else str(found.attributes.get(_TOKEN, ""))

    def _get(self, name: str, key: str, start: int, nbytes: int | None) -> bytes:
        if nbytes is not None:
            return bytes(self._range(key, start, nbytes))
        found = _genuine(self._store().get(key))
        require_size(f"{self.url}/{name}", found.meta["size"], names.most_bytes(name))
        return bytes(found.bytes())[start:]

    def _range(self, key: str, start: int, nbytes: int) -> Any:
        """At most so many bytes, fewer where the object ends."""
        try:
            return self._store().get_range(key, start=start, end=start + nbytes)
        except exceptions.GenericError as err:
            size = (there := self._head(key)) and there.meta["size"]
            if there is None:
                raise
            if size <= start:
                return b""
            if size >= start + nbytes:
                raise
            return self._store().get_range(key, start=start, end=size) if _status(err) in (0, 416) else b""

    def _found(self, folder: str, prefix: str) -> _ObstoreRows:
        rows = [row for rows in self._store().list(prefix=folder.rstrip("/") or None) for row in rows]
        inner = prefix.removeprefix(self._prefix)
        if not rows:  # the library takes any answer for an empty listing
            level = self._store().list_with_delimiter(self._prefix.rstrip("/") or None)
            level_names = [row["path"].removeprefix(self._prefix) for row in level["objects"]]
            level_names += [f"{one.removeprefix(self._prefix)}/" for one in level["common_prefixes"]]
            require_empty(inner, level_names, lambda: self._head(self._key(names.RECORD)) is not None)
        if any(not row["path"].startswith(folder) for row in rows):
            raise OtherAnswerError(f"the answer lists something else than {inner or 'the root'}")
        return [
            ObjectInfo(row["path"].removeprefix(self._prefix), row["size"], row.get("e_tag") or "")
            for row in rows
            if row["path"].startswith(prefix)
        ]

    def _remove(self, key: str) -> None:
        _there(lambda: self._store().delete(key))

    def _store(self, *, writing: bool = False, patient: bool = True) -> Any:
        """The client for such requests. One that uploads does not know whether bytes move: it has a limit in all."""
        patient = patient and not retries.is_asking()
        if (writing, patient) not in self._stores:
            options = self.options
            most_bytes = options.part_bytes if writing else _READ_BYTES
            seconds = options.timeout_seconds + most_bytes / SLOWEST_BYTES_PER_SECOND
            limits: dict[str, Any] = {
                "connect_timeout": timedelta(seconds=options.timeout_seconds),
                "timeout": timedelta(seconds=seconds),
            }
            if not writing:
                limits["read_timeout"] = timedelta(seconds=options.timeout_seconds)
            self._stores[writing, patient] = self._kind(
                self._bucket,
                config=self._config,
                client_options={**limits, **self._client},
                retry_config={
                    "max_retries": 1000 if patient else 0,
                    "retry_timeout": timedelta(seconds=options.retry_seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=BASE_SECONDS),
                        "max_backoff": timedelta(seconds=CAP_SECONDS),
                        "base": 2,
                    },
                },
            )
        return self._stores[writing, patient]

    def _trying(self, work: Callable[[], _T], what: str, name: str) -> _T:
        """The result of `work`. The library tries most requests again, but not conditional puts and torn listings."""
        backoff = Backoff(self.options.retry_seconds)
        backoff.began()
        while True:
            try:
                return work()
            except (CkptError, BufferError):
                raise
            except (exceptions.BaseError, OSError, ValueError, TypeError) as err:
                broken = isinstance(err, exceptions.GenericError | OtherAnswerError) and not _status(err)
                wait = backoff.next_wait() if broken and not retries.is_asking() else None
                if wait is None:
                    shown = _explained(err, what, f"{self.url}/{name}" if name else self.url)
                    raise shown from (None if redaction.shows(err, self._secrets) else err)
            self._meter.wait(0)
            time.sleep(wait)


def _settings(kind: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the library takes for its connections and for the store, of what the user gave."""
    config = dict(given)
    client = dict(config.pop("client_options", {}))
    if kind is S3Store:
        kwargs = dict(config.pop("client_kwargs", {}))
        if verify := kwargs.pop("verify", None):
            client["root_certificate"] = Path(verify).read_text()
        config = {_S3FS.get(name, name): value for name, value in {**config, **kwargs}.items()}
        config.setdefault("unsigned_payload", True)
    if str(config.get("endpoint", "")).startswith("http:"):
        client["allow_http"] = True
    return client, config


def _genuine(found: Any) -> Any:
    """An object as a store sends it; raises `OtherAnswerError` if something else has answered."""
    if not found.meta.get("e_tag"):
        raise OtherAnswerError(f"the answer for {found.meta['path']} has no ETag")
    return found


def _version(meta: Mapping[str, Any]) -> str:
    """Google has generations, the others ETags."""
    return str(meta.get("version") or "") + "\n" + str(meta.get("e_tag") or "")


def _condition(version: str) -> dict[str, str]:
    number, _, tag = version.partition("\n")
    return {name: text for name, text in (("version", number), ("e_tag", tag)) if text}


def _status(error: BaseException) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _there(ask: Callable[[], _T]) -> _T | None:
    """What `ask` answers of an object; None: there is no such object, although there is the bucket."""
    try:
        return ask()
    except _MISSING as err:
        if _no_bucket(err):
            raise
        return None


def _no_bucket(error: BaseException) -> str | None:
    """The code with which a store says that the bucket is missing; None: it does not say so."""
    return next((code for code in NO_BUCKET if code in str(error)), None)


def _explained(error: Exception, what: str, where: str) -> StorageError:
    """Only the kind of an error is shown: its text quotes answers and URLs."""
    status, found = _status(error), _CODE.search(str(error))
    code = _no_bucket(error) or (found[1] if found else "")
    kind = type(error).__name__ + (f" ({status or ''} {code})".replace(" )", ")") if status else "")
    if isinstance(error, OtherAnswerError):
        kind = str(error)
    hint = "check the endpoint, the network and storage_options"
    if isinstance(error, exceptions.UnknownConfigurationKeyError | ValueError | TypeError):
        hint = "with `transport: obstore` storage_options are those of obstore's stores"
    known = next((number for kinds, number in _STATUSES.items() if isinstance(error, kinds)), status)
    return explained(what, where, kind, status if status == 401 else known, code, hint)
