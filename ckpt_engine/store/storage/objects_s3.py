"""Objects in an S3 store, streamed from memory.

They are published whole and never renamed. No bucket is ever made.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self, TypeVar

from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ckpt_engine.errors import CorruptError, StorageError, StorageExistsError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, Duplicate, ObjectInfo, Storage
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.object_requests import ObjectStore, checked
from ckpt_engine.store.storage.retries import BASE_SECONDS, Backoff
from ckpt_engine.store.storage.s3_answers import (
    DamagedInTransitError,
    LostError,
    NotS3Error,
    OthersError,
    code_of,
    existing,
    is_transient,
    status_of,
)
from ckpt_engine.store.storage.s3_multipart import (
    ATTEMPTS,
    TOKEN,
    Multipart,
    arrived_whole,
    content_md5,
    digest_of,
    plain_etag,
    server_time,
)
from ckpt_engine.store.storage.s3_requests import S3Calls
from ckpt_engine.store.storage.upload_parts import MemoryBlocks, UploadPart, plan_parts

_SMALL_BYTES = 1 << 20
_LOOKS = 8
_AT_ONCE = 16
_T = TypeVar("_T")
_S3Rows = tuple[tuple[str, int, str], ...]
"""Objects of a listing: key, size, ETag."""


class S3Storage(ObjectStore):
    """`Storage` on a bucket, or below a prefix of one.

    An exclusive put asks the store not to replace anything. A store that ignores this, or is not atomic
    about it, is looked at before, which leaves a gap: names are unique and one process writes a run.

    Args:
        url: `s3://bucket/prefix`.
        options: those of `ObjectOptions` and of `s3fs.S3FileSystem`.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, options)
        if not self._bucket:
            raise StorageError(f"no bucket in {self._scheme}://", hint="give s3://bucket/folder")
        library_options = self._library_options
        extra: Any = library_options.pop("s3_additional_kwargs", {})
        payer: dict[str, Any] = {"RequestPayer": "requester"} if library_options.get("requester_pays") else {}
        self._put_extra = {**extra, **payer}
        self._extra = payer
        self._calls = S3Calls(self.url, self.options, library_options)
        self._multipart = Multipart(self._calls, self._bucket, payer)
        self._conditional = True
        self._lock_rule: dict[str, Any] | None = None
        """What the bucket says of Object Lock; None: it was not asked."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            metered=self._metered,
            versions=self,
            prepare=self.prepare,
            server_seconds=self.server_seconds,
            encrypted=lambda: self._calls.encrypted,
            duplicate=self._duplicate,
            retain=self._retain if self.options.protect_days else None,
        )

    def _metered(self, wrap: Callable[[Meter], Meter]) -> Self:
        made = copy.copy(self)
        made._calls = copy.copy(self._calls)
        made._calls.meter = wrap(self._calls.meter)
        made._multipart = Multipart(made._calls, self._bucket, self._extra)
        return made

    def _duplicate(self, source: Storage) -> Duplicate | None:
        is_near = isinstance(source, S3Storage) and source._calls.fs is self._calls.fs
        return partial(self._copy_of, source) if isinstance(source, S3Storage) and is_near else None

    def _copy_of(self, source: S3Storage, name: str) -> bool:
        """Have the store copy an object; False: it refuses."""
        places = [f"{one._bucket}/{one._key(name)}" for one in (source, self)]
        try:
            self._calls.run(self._calls.fs._cp_file(*places), "copy", name)
        except StorageError:
            return False
        return True

    def _retain(self, names: Sequence[str]) -> str | None:
        lock = self._calls.run(self._lock(), "protect", "")
        if not lock:
            return "the bucket has no Object Lock, or these credentials may not see it"

        async def extend(name: str) -> None:
            at = {"Bucket": self._bucket, "Key": self._key(name), **self._extra}
            try:
                await self._calls.call("put_object_retention", Retention=lock, **at)
            except ClientError as err:  # it is locked for longer; where nothing may be locked the manifest is refused
                if status_of(err) != 403:
                    raise

        self._calls.run(_each(names, extend), "protect", "".join(names[:1]))
        return None

    def prepare(self) -> None:
        """Make the client, which reads large descriptions of the service. Nothing is asked yet."""
        self._calls.run(self._calls.client(), "open", "")

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        with closing(MemoryBlocks.of(blocks)) as whole:
            self._calls.run(self._put(name, self._key(name), whole, exclusive=exclusive), "write", name)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        checked(name)
        if nbytes is not None and nbytes <= 0:
            return b""
        try:
            read = self._get_verified if self._calls.verifying else self._read
            return self._calls.run(read(name, start, nbytes), "read", name)
        except StorageMissingError as err:
            raise StorageMissingError(f"no object {self.url}/{name}", hint=err.hint) from err

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        done = self._calls.run(self._get_into(self._key(name), start, out.cast("B")), "read", name)
        if done < out.nbytes:
            raise CorruptError(f"{self.url}/{name} ends at byte {start + done}, needed up to {start + out.nbytes}")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        after: str | None = None
        while True:
            page, after = self._calls.run(self._page(self._prefix + prefix, after), "list", prefix)
            for key, nbytes, version in page:
                yield ObjectInfo(key[len(self._prefix) :], nbytes, version)
            if after is None:
                return

    def delete(self, *names: str) -> None:
        keys = [self._key(name) for name in names]
        if keys:
            self._calls.run(self._delete(keys), "delete", names[0])

    def sweep(self) -> int:
        return self._calls.run(self._sweep(), "clear", "")

    def server_seconds(self) -> float | None:
        """The server's wall clock, in whole seconds; None if it does not tell."""

        async def ask() -> float | None:
            answer = await self._calls.call("list_objects_v2", Bucket=self._bucket, MaxKeys=1, **self._extra)
            now = server_time(answer)
            return now.timestamp() if now else None

        return self._calls.run(ask(), "read", "")

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        """A small object and its version, None if there is none. For `replace`."""
        return self._calls.run(existing(self._get_small(name)), "read", name)

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        """Write a small object if it still has this version (None: if there is none), where the store can do that.

        Where it cannot the object is replaced in any case: read it back after a while.

        Raises:
            StorageExistsError: it has another version.
        """
        self._calls.run(self._replace(self._key(name), data, version), "write", name)

    # Writing

    async def _put(self, name: str, key: str, blocks: MemoryBlocks, *, exclusive: bool) -> None:
        # Look before sending gigabytes, and because some stores ignore the condition.
        if exclusive and await self._multipart.head(key) is not None:
            raise StorageExistsError(f"cannot write {self.url}/{name}: it exists")
        token = os.urandom(16).hex()
        is_locked = name.startswith(names.MANIFESTS) or names.parity_of(name) is not None
        lock = await self._lock() if self.options.protect_days and is_locked else {}
        locked = {f"ObjectLock{field}": value for field, value in lock.items()}
        made = {"Metadata": {TOKEN: token}, **locked, **self._put_extra}
        put = self._put_small if blocks.nbytes <= self.options.part_bytes else self._put_big
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await put(key, blocks, made, {"IfNoneMatch": "*"} if exclusive else {})
                if not exclusive:
                    return  # others may have replaced it by now
                there = await self._multipart.head(key)
                if there is not None and int(there["ContentLength"]) == blocks.nbytes:
                    return
                await asyncio.sleep(BASE_SECONDS * attempt)
            raise LostError(f"the store acknowledges {key}, and does not have its {blocks.nbytes} bytes")
        except OthersError as err:
            raise StorageExistsError(f"cannot write {self.url}/{name}: it exists") from err
        except Exception as err:
            if exclusive:
                await self._withdraw(key, token, err)
            raise

    async def _withdraw(self, key: str, token: str, cause: Exception) -> None:
        """Remove what a put that failed may have made visible. The store may be gone: a single try."""
        at: dict[str, Any] = {"Bucket": self._bucket, "Key": key, "backoff": Backoff(-1.0), **self._extra}
        try:
            there = await self._calls.call("head_object", **at)
            if there.get("Metadata", {}).get(TOKEN) == token:
                await self._calls.call("delete_object", **at)
        except Exception as err:  # noqa: BLE001 - the cause is raised
            if status_of(err) != 404:
                cause.add_note(f"it may have become visible all the same: {err}")

    async def _put_small(
        self, key: str, blocks: MemoryBlocks, made: Mapping[str, Any], condition: Mapping[str, Any]
    ) -> None:
        """Put an object by one request.

        Raises:
            OthersError: `condition` does not hold because of somebody else's object.
        """
        whole = UploadPart(1, 0, blocks.nbytes)
        # The server refuses other bytes. Seen by the answer alone they would stay if this process is killed then.
        digest = await digest_of(blocks, whole) if self._calls.summing else None
        backoff = self._calls.backoff()
        while True:
            wanted = condition if self._conditional else {}
            try:
                answer = await self._calls.send(
                    "put_object",
                    blocks,
                    0,
                    blocks.nbytes,
                    backoff=backoff,
                    Bucket=self._bucket,
                    Key=key,
                    **made,
                    **content_md5(digest),
                    **wanted,
                )
            except ClientError as err:
                if self._refuses_condition(err, wanted):
                    continue
                if status_of(err) != 412 and not (status_of(err) == 404 and "IfMatch" in wanted):
                    raise
                # Also the answer to our own request, sent again after its first answer was lost.
                answer = await self._multipart.head(key) or {}
                if answer.get("Metadata", {}).get(TOKEN) != made["Metadata"][TOKEN]:
                    raise OthersError from err
            if digest is None or not self._calls.verifying or arrived_whole(answer, digest):
                return
            condition = {}  # the damaged object is ours: replace it
            wait = backoff.next_wait()
            if wait is None:
                await self._delete([key])
                raise DamagedInTransitError(f"{key} arrives with other bytes than were sent")
            await asyncio.sleep(wait)

    async def _put_big(
        self, key: str, blocks: MemoryBlocks, made: Mapping[str, Any], condition: Mapping[str, Any]
    ) -> None:
        parts = plan_parts(blocks.nbytes, self.options.part_bytes)
        wanted = condition if self._conditional else {}
        try:
            await self._multipart.upload(key, blocks, parts, made, wanted)
        except ClientError as err:
            if not self._refuses_condition(err, wanted):
                raise
            await self._multipart.upload(key, blocks, parts, made, {})

    def _refuses_condition(self, error: ClientError, condition: Mapping[str, str]) -> bool:
        """Whether the store cannot do conditional writes; it is not asked again then."""
        if condition and (status_of(error) == 501 or code_of(error) in ("NotImplemented", "InvalidArgument")):
            self._conditional = False
            return True
        return False

    async def _replace(self, key: str, data: bytes, version: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}
        made = {"Metadata": {TOKEN: os.urandom(16).hex()}, **self._put_extra}
        blocks = MemoryBlocks([memoryview(data)])
        try:
            await self._put_small(key, blocks, made, condition)
        except OthersError as err:
            there = await self._multipart.head(key)
            if (plain_etag(there["ETag"]) if there else None) != version:
                raise StorageExistsError(f"{self.url}: {key} was replaced meanwhile") from err
            # It is the version we asked for, and yet refused: this store compares ETags in a way of its own.
            await self._put_small(key, blocks, made, {})

    # Object Lock

    async def _lock(self) -> dict[str, Any]:
        """The retention with which the store refuses to delete an object for so many days; empty: it cannot."""
        if self._lock_rule is None:
            try:
                answer = await self._calls.call("get_object_lock_configuration", Bucket=self._bucket, **self._extra)
            except ClientError as err:
                if is_transient(err):
                    raise
                answer = {}
            self._lock_rule = answer.get("ObjectLockConfiguration", {})
        if self._lock_rule.get("ObjectLockEnabled") != "Enabled":
            return {}
        # What the bucket promises itself is never made shorter or weaker.
        own = self._lock_rule.get("Rule", {}).get("DefaultRetention", {})
        days = max(self.options.protect_days, own.get("Days", 0) + 365 * own.get("Years", 0))
        return {"Mode": own.get("Mode", "GOVERNANCE"), "RetainUntilDate": datetime.now(UTC) + timedelta(days=days)}

    # Reading

    async def _get_verified(self, name: str, start: int, nbytes: int | None) -> bytes:
        """Small objects steer what is kept and what is deleted: they have to match the store's own digest.

        Of the others (which have our digests) a small part has to be answered twice alike.
        """
        key = self._key(name)
        head = await self._multipart.head(key)
        if head is None:
            raise StorageMissingError(f"no object {key}")
        size = int(head["ContentLength"])
        if size > _SMALL_BYTES and (nbytes is None or nbytes > _SMALL_BYTES):
            return await self._read(name, start, nbytes)
        if size <= _SMALL_BYTES:
            return (await self._get_small(name))[0][start:][:nbytes]
        return await self._twice(lambda: self._read(name, start, nbytes), bytes, f"{key} reads differently each time")

    async def _twice(self, ask: Callable[[], Awaitable[_T]], part: Callable[[_T], object], problem: str) -> _T:
        """The first answer of which this part is as it was in the one before."""
        before = await ask()
        for _ in range(_LOOKS):
            again = await ask()
            if part(again) == part(before):
                return again
            before = again
        raise DamagedInTransitError(problem)

    async def _get_small(self, name: str) -> tuple[bytes, str]:
        """A small object and its ETag, which has to match where it is a digest of the bytes."""
        key = self._key(name)
        for _ in range(_LOOKS):
            data, answer = await self._calls.receive_all(name, Bucket=self._bucket, Key=key, **self._extra)
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            etag = plain_etag(answer["ETag"])
            if not self._calls.verifying or "-" in etag or arrived_whole(answer, digest):
                return data, etag
        raise DamagedInTransitError(f"{key} arrives with other bytes than were stored")

    async def _read(self, name: str, start: int, nbytes: int | None) -> bytes:
        if nbytes is None:
            data, _ = await self._calls.receive_all(name, Bucket=self._bucket, Key=self._key(name), **self._extra)
            return data[start:] if start else data
        out = bytearray(nbytes)
        done = await self._get_into(self._key(name), start, memoryview(out))
        return bytes(memoryview(out)[:done])

    async def _get_into(self, key: str, start: int, out: memoryview) -> int:
        try:
            return await self._calls.receive(out, start, Bucket=self._bucket, Key=key, **self._extra)
        except ClientError as err:
            if status_of(err) == 416:
                return 0
            raise

    async def _page(self, prefix: str, after: str | None) -> tuple[_S3Rows, str | None]:
        ask = partial(self._page_once, prefix, after)
        if not self._calls.verifying:
            return await ask()
        # One flipped bit in a name, and what belongs to that snapshot would look like garbage.
        return await self._twice(ask, lambda page: (page[0], page[1] is None), "the listing is different each time")

    async def _page_once(self, prefix: str, after: str | None) -> tuple[_S3Rows, str | None]:
        more: dict[str, Any] = {"ContinuationToken": after} if after else {}
        answer = await self._calls.call("list_objects_v2", Bucket=self._bucket, Prefix=prefix, **more, **self._extra)
        rows = answer.get("Contents") or ()
        try:
            found = tuple((str(row["Key"]), int(row["Size"]), plain_etag(row.get("ETag", ""))) for row in rows)
            after = answer["NextContinuationToken"] if answer["IsTruncated"] else None
        except KeyError as err:
            raise DamagedInTransitError(f"the listing, or a row of it, has no {err}") from err
        is_other = not rows and answer.get("Prefix", "") != prefix
        if is_other or not all(key.startswith(prefix) for key, _, _ in found):
            raise NotS3Error(f"the answer lists something else than {prefix}")
        return found, after

    # Removing

    async def _delete(self, keys: Sequence[str]) -> None:
        async def remove(key: str) -> None:
            await self._multipart.abort_left(key)
            await existing(self._calls.call("delete_object", Bucket=self._bucket, Key=key, **self._extra))

        await remove(keys[0])  # where nothing may be removed that is one request, and not one for each object
        await _each(keys[1:], remove)

    async def _sweep(self) -> int:
        freed = 0
        for stale in await self._multipart.unfinished(self._prefix):
            ours = names.is_ours(stale.key[len(self._prefix) :])
            if ours and stale.age_seconds >= self.options.stale_upload_seconds:
                sizes = (await self._multipart.parts_of(stale.key, stale.id)).values()
                await self._multipart.abort(stale.key, stale.id)
                freed += sum(size for size, _ in sizes)
        return freed


async def _each(keys: Sequence[str], work: Callable[[str], Awaitable[object]]) -> None:
    """Do `work` for all keys, some at once. When this raises, all of it has ended."""
    lanes = asyncio.Semaphore(_AT_ONCE)

    async def one(key: str) -> None:
        async with lanes:
            await work(key)

    for outcome in await asyncio.gather(*map(one, keys), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
