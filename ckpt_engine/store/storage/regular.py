"""Opens the files of a run: regular files only, and never what a link leads to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISLNK, S_ISREG, S_ISSOCK

from ckpt_engine.errors import CorruptError

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a pipe waits for its other end without `O_NONBLOCK`; regular files do not notice it."""
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)


def open_regular(path: str, flags: int) -> int:
    """A descriptor of the regular file at `path`. Links on the way to its folder are followed.

    Raises:
        CorruptError: something else has this name.
        OSError: from the file system.
    """
    try:
        fd = os.open(path, flags | _SAFE, 0o666)
    except BlockingIOError:
        # Another process has a kernel lease on the file (file servers do) and is being asked to give it up.
        _require_regular(path, Path(path).lstat().st_mode)
        fd = os.open(path, (flags | _SAFE) & ~os.O_NONBLOCK, 0o666)
    except OSError as err:
        if err.errno in _NOT_REGULAR:
            _require_regular(path, Path(path).lstat().st_mode)
        raise
    try:
        _require_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_size(where: str, nbytes: int, most_bytes: int) -> None:
    """Refuse an object that is larger than the format allows.

    Raises:
        CorruptError
    """
    if nbytes > most_bytes:
        raise CorruptError(f"{where} has {nbytes:,} bytes; the format allows {most_bytes:,}")


def _require_regular(path: str, mode: int) -> None:
    if not S_ISREG(mode):
        raise CorruptError(
            f"{path} is {_kind(mode)}, not a file",
            hint="ckpt-engine makes and follows no such thing: put the file itself there, or remove it",
        )


def _kind(mode: int) -> str:
    for is_it, text in ((S_ISLNK, "a link"), (S_ISFIFO, "a named pipe"), (S_ISDIR, "a folder"), (S_ISSOCK, "a socket")):
        if is_it(mode):
            return text
    return "a device"
