"""Uploads a big object to S3 in parts.

Several parts are on their way at once. An upload that was interrupted is continued.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ckpt_engine.store.storage.s3_answers import (
    DamagedInTransitError,
    OthersError,
    S3Answer,
    code_of,
    existing,
    status_of,
)
from ckpt_engine.store.storage.s3_requests import S3Calls
from ckpt_engine.store.storage.upload_parts import MemoryBlocks, UploadPart

TOKEN = "ckpt-writer"
"""Name of the metadata that says which `put` wrote an object."""
ATTEMPTS = 3
"""So often an object is sent that does not appear as it should."""
_active: set[str] = set()
"""Ids of the uploads under way in this process."""


@dataclass(frozen=True, slots=True)
class Stale:
    """An unfinished upload, and how long ago it began by the server's own clock."""

    key: str
    id: str
    age_seconds: float


class Multipart:
    """Uploads in parts to one bucket.

    Args:
        payer: goes with every request.
    """

    def __init__(self, calls: S3Calls, bucket: str, payer: Mapping[str, Any]) -> None:
        self._calls = calls
        self._bucket = bucket
        self._payer = payer
        self._lanes = asyncio.Semaphore(calls.options.concurrency)
        self._left: dict[str, str] = {}

    async def upload(
        self,
        key: str,
        blocks: MemoryBlocks,
        parts: tuple[UploadPart, ...],
        made: Mapping[str, Any],
        condition: Mapping[str, Any],
    ) -> None:
        """Upload, and make the object visible at once.

        Args:
            made: goes with the request that begins it; its metadata has the token.
            condition: of the completing request.

        Raises:
            OthersError: `condition` does not hold because of somebody else's object.
            ClientError: from the store.
        """
        for attempt in range(1, ATTEMPTS + 1):
            upload, there = await self._begin(key, made)
            etag: str | None = None
            with _busy(upload):
                try:
                    etags = await self._send_parts(key, upload, blocks, parts, there)
                    etag = combined_etag(etags)
                    await self._complete(key, upload, parts, etags, condition)
                except ClientError as err:
                    if status_of(err) == 501 and etag is None and attempt < ATTEMPTS:
                        # Some stores cannot take a part again that arrived damaged.
                        await self._give_up(key, upload, err)
                        continue
                    if status_of(err) not in (404, 412) or code_of(err) == "NoSuchBucket":
                        if status_of(err) < 500:
                            await self._give_up(key, upload, err)
                        raise
                    # Also the answer to a request that was sent again because its first answer was lost.
                    found = await self.head(key)
                    if found is None or not _same(found, made["Metadata"][TOKEN], etag or ""):
                        await self._give_up(key, upload, err)
                        if found is not None and status_of(err) == 412:
                            raise OthersError(key) from err
                        if attempt == ATTEMPTS:
                            raise
                        continue
            self._left.pop(key, None)
            if not self._calls.verifying or await self._is_whole(key, blocks.nbytes, etag or ""):
                return
            await self._calls.call("delete_object", Bucket=self._bucket, Key=key, **self._payer)
        raise DamagedInTransitError(f"{key} is put together from other parts than were sent")

    async def head(self, key: str) -> S3Answer | None:
        """What the store says of an object, None if there is none."""
        return await existing(self._calls.call("head_object", Bucket=self._bucket, Key=key, **self._payer))

    async def abort_left(self, key: str) -> None:
        """Give up the upload of `key` that failed earlier in this storage, if any."""
        upload = self._left.pop(key, None)
        if upload is not None:
            await self.abort(key, upload)

    async def abort(self, key: str, upload: str) -> None:
        """Remove an upload's parts; one that is gone is no error."""
        await existing(self._calls.call("abort_multipart_upload", Bucket=self._bucket, Key=key, UploadId=upload))

    async def unfinished(self, prefix: str) -> list[Stale]:
        """The uploads that this process is not busy with; none where the store does not list them."""
        found: list[Stale] = []
        marks: dict[str, Any] = {}
        while True:
            try:
                answer = await self._calls.call(
                    "list_multipart_uploads", Bucket=self._bucket, Prefix=prefix, **self._payer, **marks
                )
            except ClientError as err:
                if status_of(err) in (400, 404, 405, 501) and code_of(err) != "NoSuchBucket":
                    return found
                raise
            now = server_time(answer)
            for item in answer.get("Uploads") or ():
                if item["UploadId"] not in _active and isinstance(item.get("Initiated"), datetime):
                    age = (now - item["Initiated"]).total_seconds() if now else 0.0
                    found.append(Stale(item["Key"], item["UploadId"], age))
            if not answer.get("IsTruncated") or not answer.get("NextKeyMarker"):
                return found
            marks = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}

    async def parts_of(self, key: str, upload: str) -> dict[int, tuple[int, str]]:
        """Sizes and ETags of the parts that have arrived, by number."""
        found: dict[int, tuple[int, str]] = {}
        after: dict[str, Any] = {}
        while True:
            answer = await self._calls.call("list_parts", Bucket=self._bucket, Key=key, UploadId=upload, **after)
            for item in answer.get("Parts") or ():
                found[item["PartNumber"]] = (item["Size"], plain_etag(item["ETag"]))
            if not answer.get("IsTruncated") or not answer.get("NextPartNumberMarker"):
                return found
            after = {"PartNumberMarker": answer["NextPartNumberMarker"]}

    async def _complete(
        self, key: str, upload: str, parts: tuple[UploadPart, ...], etags: list[str], condition: Mapping[str, Any]
    ) -> None:
        listed = [{"PartNumber": part.number, "ETag": f'"{etag}"'} for part, etag in zip(parts, etags, strict=True)]
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._calls.call(
                    "complete_multipart_upload",
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload,
                    MultipartUpload={"Parts": listed},
                    **condition,
                )
                return
            except ClientError as err:
                # Where the channel does not protect the bytes a list of parts may arrive as another one.
                if status_of(err) != 400 or not self._calls.verifying or attempt == ATTEMPTS:
                    raise

    async def _is_whole(self, key: str, nbytes: int, etag: str) -> bool:
        """Whether the object that appeared is made of all parts."""
        found = await self.head(key)
        if found is None or int(found["ContentLength"]) != nbytes:
            return False
        there = plain_etag(found["ETag"]).lower()
        return "-" not in there or etag in ("", there) or not _is_digest(found)

    async def _begin(self, key: str, made: Mapping[str, Any]) -> tuple[str, dict[int, tuple[int, str]]]:
        """An upload to continue, and what it has already; a new one if there is none."""
        candidates = [stale for stale in await self.unfinished(key) if stale.key == key]
        if candidates:
            youngest = min(candidates, key=lambda stale: stale.age_seconds)
            self._left[key] = youngest.id
            try:
                return youngest.id, await self.parts_of(key, youngest.id)
            except ClientError as err:
                if status_of(err) not in (400, 404, 405, 501):
                    raise
        answer = await self._calls.call("create_multipart_upload", Bucket=self._bucket, Key=key, **made)
        self._left[key] = answer["UploadId"]
        return answer["UploadId"], {}

    async def _send_parts(
        self,
        key: str,
        upload: str,
        blocks: MemoryBlocks,
        parts: tuple[UploadPart, ...],
        there: Mapping[int, tuple[int, str]],
    ) -> list[str]:
        async def send(part: UploadPart) -> str:
            async with self._lanes:
                size, etag = there.get(part.number, (-1, ""))
                if size == part.nbytes and etag.lower() == await digest_of(blocks, part):
                    return etag
                return await self._send_part(key, upload, blocks, part)

        tasks = [asyncio.create_task(send(part)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            # Nothing may read the caller's memory any more when this returns.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _send_part(self, key: str, upload: str, blocks: MemoryBlocks, part: UploadPart) -> str:
        digest = asyncio.ensure_future(digest_of(blocks, part)) if self._calls.summing else None

        async def check(answer: S3Answer) -> None:
            if digest is not None and not arrived_whole(answer, await asyncio.shield(digest)):
                raise DamagedInTransitError(f"part {part.number} of {key} arrived with other bytes")

        try:
            # Else it is made while the bytes are on their way.
            sums = await asyncio.shield(digest) if digest is not None and self._calls.options.protect_days else None
            answer = await self._calls.send(
                "upload_part",
                blocks,
                part.start,
                part.nbytes,
                check=check,
                Bucket=self._bucket,
                Key=key,
                UploadId=upload,
                PartNumber=part.number,
                **content_md5(sums),
            )
        finally:
            if digest is not None:
                await asyncio.wait([digest])
        return plain_etag(answer["ETag"])

    async def _give_up(self, key: str, upload: str, cause: BaseException) -> None:
        try:
            await self.abort(key, upload)
            self._left.pop(key, None)
        except Exception as err:  # noqa: BLE001 - the cause is raised; `sweep` removes it later
            cause.add_note(f"the parts of upload {upload} are left behind: {err}")


def plain_etag(text: str) -> str:
    """An ETag without its quotes."""
    return text.strip('"')


async def digest_of(blocks: MemoryBlocks, part: UploadPart) -> str:
    """The ETag that a part of these bytes gets, computed on another thread."""
    made = asyncio.ensure_future(asyncio.to_thread(md5_of, blocks, part.start, part.nbytes))
    try:
        return str((await asyncio.shield(made)).hexdigest())
    finally:
        if not made.done():
            await asyncio.wait([made])  # given up, but the thread still reads the caller's memory


def content_md5(digest: str | None) -> dict[str, Any]:
    """What has the store refuse other bytes than those of this ETag; None: it is not known."""
    return {} if digest is None else {"ContentMD5": base64.b64encode(bytes.fromhex(digest)).decode()}


def arrived_whole(answer: S3Answer, digest: str) -> bool:
    """Whether an upload's answer tells of the bytes with this MD5; true where it cannot tell."""
    return not _is_digest(answer) or plain_etag(answer.get("ETag", digest)).lower() == digest


def _is_digest(answer: S3Answer) -> bool:
    """Whether ETags are made of the bytes; under some encryptions they are of something else."""
    return str(answer.get("ServerSideEncryption", "AES256")) == "AES256" and not answer.get("SSECustomerAlgorithm")


def combined_etag(etags: list[str]) -> str:
    """The ETag of an object made of parts with these ETags; "" if they are no MD5 digests."""
    try:
        joined = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"


def _same(found: S3Answer, token: str, etag: str) -> bool:
    return found.get("Metadata", {}).get(TOKEN) == token or (etag != "" and plain_etag(found["ETag"]).lower() == etag)


@contextmanager
def _busy(upload: str) -> Iterator[None]:
    _active.add(upload)
    try:
        yield
    finally:
        _active.discard(upload)


def server_time(answer: S3Answer) -> datetime | None:
    """When the server wrote an answer, by its own clock."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError, TypeError):
        return None


def md5_of(blocks: MemoryBlocks, start: int, nbytes: int) -> Any:
    """The MD5 of a range, which S3 stores call ETag. Not a matter of security."""
    made = hashlib.md5(usedforsecurity=False)
    for view in blocks.views(start, nbytes, 1 << 20):
        with view:
            made.update(view)
    return made
