"""From the operating system's errors to ours: what happened, where, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_engine.errors import (
    NotAFolderError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)

_KINDS: dict[int, tuple[type[StorageError], str | None]] = {
    errno.ENOSPC: (StorageFullError, "free space or keep fewer snapshots"),
    errno.EDQUOT: (StorageFullError, "the quota is used up: free space or keep fewer snapshots"),
    errno.EROFS: (StorageReadOnlyError, "mount it read-write or choose another folder"),
    errno.EACCES: (StorageReadOnlyError, "check the permissions of this folder and its parents"),
    errno.EPERM: (StorageReadOnlyError, "check the permissions of this folder and its parents"),
    errno.ENOTDIR: (NotAFolderError, "give the path of a folder"),
    errno.ENOENT: (StorageMissingError, None),
    errno.EEXIST: (StorageExistsError, None),
}


def translated(error: OSError, what: str, path: str) -> StorageError:
    """Our error for `error`, which happened when doing `what` at `path`; raise it `from` the original."""
    kind, hint = _KINDS.get(error.errno or 0, (StorageError, None))
    reason = error.strerror or str(error) or type(error).__name__
    return kind(f"cannot {what} {path}: {reason}", hint=hint)


@contextmanager
def translating(what: str, path: str) -> Iterator[None]:
    """Turns an `OSError` of the block into our error."""
    try:
        yield
    except OSError as err:
        raise translated(err, what, path) from err
