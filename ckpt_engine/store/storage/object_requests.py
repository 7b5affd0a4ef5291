"""What requests to all object stores share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from ckpt_engine.errors import (
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.observe.units import LOGIN
from ckpt_engine.store import names
from ckpt_engine.store.storage import redaction
from ckpt_engine.store.storage.object_options import ObjectOptions

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


class ObjectStore:
    """What the storages of all object stores begin with.

    Args:
        url: of the root.
        options: those of `ObjectOptions` and of the client library; subclasses find the latter in `_library_options`.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._scheme, path = split_url(url)
        self.url = f"{self._scheme}://{path}"
        self._bucket, _, prefix = path.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        """Of the keys of all objects; empty, or with a slash at its end."""
        self.options, self._library_options = ObjectOptions.split(options)
        self._secrets = redaction.secrets_of(self._library_options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _key(self, name: str) -> str:
        return self._prefix + checked(name)


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
        refused = StorageReadOnlyError if what in ("write", "delete", "clear") else StorageError
        return refused(said, hint=f"{CREDENTIALS_HINT}; and that they may {what} here")
    return StorageError(said, hint=hint)
