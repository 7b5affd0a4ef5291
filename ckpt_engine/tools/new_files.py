"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ckpt_engine.errors import StorageExistsError, StorageMissingError
from ckpt_engine.store.storage.disk import translated


def check_free(path: Path, *, replace: bool, folder: bool = False) -> None:
    """Refuse early what `new_file`, or for a `folder` `new_folder`, would refuse late.

    Raises:
        StorageExistsError: it exists and shall not be replaced, or it is a folder where a file is to be, or a file.
        StorageMissingError: the folder to hold it does not exist.
    """
    if path.exists() and path.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        raise StorageExistsError(f"{path} is {there}", hint=f"name the {wanted} to write")
    if not replace and os.path.lexists(path):
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it")
    if not path.absolute().parent.is_dir():
        raise StorageMissingError(f"the folder of {path} does not exist", hint="make it, or name another")


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
        _sync(path.absolute().parent)
    except FileExistsError as err:
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
    except OSError as err:
        raise translated(err, "write", str(path)) from err
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()


@contextmanager
def new_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: it cannot be written, or exists and shall not be replaced.
    """
    check_free(path, replace=replace, folder=True)
    suffix = os.urandom(4).hex()
    temp, old = (path.with_name(f".{path.name}.{suffix}.{kind}") for kind in ("tmp", "old"))
    try:
        temp.mkdir()
        yield temp
        for one in (*temp.rglob("*"), temp):
            _sync(one)
        if replace and path.exists():
            path.rename(old)
        try:
            temp.rename(path)  # onto an empty folder at most: what came into being meanwhile is not replaced
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _sync(path.absolute().parent)
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
        raise translated(err, "write", str(path)) from err
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)
