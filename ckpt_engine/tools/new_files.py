"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ckpt_engine.errors import StorageExistsError, StorageMissingError
from ckpt_engine.store.storage.disk import closing_fd, translated
from ckpt_engine.undo import on_failure


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
    with _beside(path) as temp:
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temp.replace(path)
        else:
            path.hardlink_to(temp)  # unlike a rename it never replaces what came into being meanwhile


@contextmanager
def new_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: it cannot be written, or exists and shall not be replaced.
    """
    check_free(path, replace=replace, folder=True)
    with _beside(path) as temp, _beside(path) as old:
        temp.mkdir()
        yield temp
        for one in (*temp.rglob("*"), temp):
            _sync(one)
        if replace and path.exists():
            path.rename(old)
        with on_failure(lambda: old.exists() and old.rename(path)):
            temp.rename(path)  # onto an empty folder at most: what came into being meanwhile is not replaced


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A free name next to `path`; behind the block nothing has it, and the change of names in the folder is synced."""
    temp = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temp
        _sync(path.absolute().parent)
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
        raise translated(err, "write", str(path)) from err
    finally:
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        elif os.path.lexists(temp):  # on a disk that is read-only, removing nothing fails too
            temp.unlink()


def _sync(path: Path) -> None:
    with closing_fd(os.open(path, os.O_RDONLY)) as fd:
        try:
            os.fsync(fd)
        except OSError as err:
            if err.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
                raise
