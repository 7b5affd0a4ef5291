"""A file that appears whole or not at all, where the user asked for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ckpt_engine.errors import StorageExistsError, StorageMissingError
from ckpt_engine.store.storage.oserrors import translated


def check_free(path: Path, *, replace: bool) -> None:
    """Refuse early what `new_file` would refuse late.

    Raises:
        StorageExistsError: the file exists and shall not be replaced, or it is a folder.
        StorageMissingError: its folder does not exist.
    """
    if path.is_dir():
        raise StorageExistsError(f"{path} is a folder", hint="name the file to write")
    if not replace and os.path.lexists(path):
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it")
    if not path.absolute().parent.is_dir():
        raise StorageMissingError(f"the folder of {path} does not exist")


@contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """A temporary file next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: the file cannot be written, or exists and shall not be replaced.
    """
    check_free(path, replace=replace)
    temp = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temp.replace(path)
        else:
            path.hardlink_to(temp)  # unlike a rename it never replaces what came into being meanwhile
        _sync_folder(path.absolute().parent)
    except FileExistsError as err:
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
    except OSError as err:
        raise translated(err, "write", str(path)) from err
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(fd)
