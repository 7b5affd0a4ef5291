"""What the answers of an S3 store mean for a request."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, TypeVar

from aiohttp import ClientError as HttpError
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

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.object_requests import CREDENTIALS_HINT, explained
from ckpt_engine.store.storage.redaction import redacted

S3Answer = dict[str, Any]
_T = TypeVar("_T")
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
OTHER_ANSWERS = 6
"""So many answers of something else are waited for to pass."""
_NO_CONTENT = frozenset({"DeleteObject", "AbortMultipartUpload"})


async def require_s3(http_response: Any, parsed: S3Answer, model: Any, **_: Any) -> None:
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


def _answer_of(error: BaseException) -> S3Answer:
    """The error answer; empty if there was no answer."""
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def status_of(error: BaseException) -> int:
    """The HTTP status of an error answer, 0 if there was no answer."""
    return int(_answer_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: BaseException) -> str:
    """The S3 error code of an error answer, "" if there was none."""
    return str(_answer_of(error).get("Error", {}).get("Code", ""))


async def existing(request: Awaitable[_T]) -> _T | None:
    """The answer to a request for an object; None: there is no such object, although there is the bucket."""
    try:
        return await request
    except ClientError as err:
        if status_of(err) == 404 and code_of(err) != "NoSuchBucket":
            return None
        raise


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, ClientError):
        return status_of(error) in _TRANSIENT_STATUS or code_of(error) in _TRANSIENT_CODES
    return isinstance(
        error,
        TimeoutError
        | ConnectionError
        | BotoConnectionError
        | HTTPClientError
        | HttpError
        | ResponseParserError
        | DamagedInTransitError,
    )


def retry_after_seconds(error: BaseException) -> float:
    """The `Retry-After` of an answer in seconds, at most a minute; 0 if there is none."""
    text = str(_answer_of(error).get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
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
