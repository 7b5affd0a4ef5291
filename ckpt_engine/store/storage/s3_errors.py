"""From the errors of an S3 client to ours: which are worth another try, and what the rest means to a user."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

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

from ckpt_engine.errors import (
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.store.storage.object_requests import redacted

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
_FULL = frozenset({"EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_CREDENTIALS_HINT = (
    "check the credentials: storage_options key and secret, the AWS_* environment, or the profile in ~/.aws"
)


class DamagedInTransitError(Exception):
    """What arrived is not what was sent."""


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
    kind, reason, hint = _explained(error, what)
    return kind(f"cannot {what} {where}: {redacted(reason, secrets)}", hint=hint)


def _explained(error: BaseException, what: str) -> tuple[type[StorageError], str, str | None]:
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return StorageError, str(error), _CREDENTIALS_HINT
    if isinstance(error, ClientError):
        return _explained_answer(error, what)
    if isinstance(error, DamagedInTransitError):
        return (
            StorageError,
            str(error),
            "check the network; if ETags of this store are no MD5: storage_options verify: never",
        )
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, TimeoutError):
        return StorageError, "the server does not answer", "check the endpoint and the network"
    if isinstance(error, BotoConnectionError | ConnectionError | HttpError | HTTPClientError):
        return StorageError, reason, "check the endpoint and the network"
    if isinstance(error, BotoCoreError | ValueError):
        return StorageError, reason, "check the URL and storage_options"
    return StorageError, reason, None


def _explained_answer(error: ClientError, what: str) -> tuple[type[StorageError], str, str | None]:
    status, code = status_of(error), code_of(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    reason = f"{status} {code}: {message}" if message else f"{status} {code}"
    if code == "NoSuchBucket":
        return StorageMissingError, reason, "create the bucket first; ckpt-engine makes none"
    if code in _FULL or status == 507:
        return StorageFullError, reason, "free space or keep fewer snapshots"
    if code in _CREDENTIALS or status == 401:
        return StorageError, reason, _CREDENTIALS_HINT
    if status == 403:
        kind = StorageReadOnlyError if what in ("write", "delete") else StorageError
        return kind, reason, f"{_CREDENTIALS_HINT}; and that they may {what} here"
    if status == 404:
        return StorageMissingError, reason, None
    if status == 412:
        return StorageExistsError, "it exists", None
    if status in (301, 307, 400) and code in ("PermanentRedirect", "IllegalLocationConstraintException"):
        return StorageError, reason, "set region_name in storage_options: client_kwargs"
    return StorageError, reason, None
