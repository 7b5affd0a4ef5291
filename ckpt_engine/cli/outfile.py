"""A file or folder that appears whole or not at all, where the user asked for it."""

from __future__ import annotations

import errno
import os
import shutil
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


def check_free_folder(path: Path, *, replace: bool) -> None:
    """Refuse early what `new_folder` would refuse late.

    Raises:
        StorageExistsError: something of that name is there and shall not be replaced, or it is a file.
        StorageMissingError: the folder to hold it does not exist.
    """
    if path.exists() and not path.is_dir():
        raise StorageExistsError(f"{path} is a file", hint="name the folder to write")
    if not replace and os.path.lexists(path):
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it")
    if not path.absolute().parent.is_dir():
        raise StorageMissingError(f"the folder of {path} does not exist")


@contextmanager
def new_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: it cannot be written, or exists and shall not be replaced.
    """
    check_free_folder(path, replace=replace)
    suffix = os.urandom(4).hex()
    temp, old = (path.with_name(f".{path.name}.{suffix}.{kind}") for kind in ("tmp", "old"))
    try:
        temp.mkdir()
        yield temp
        for file in temp.rglob("*"):
            _sync(file)
        _sync_folder(temp)
        if replace and path.exists():
            path.rename(old)
        try:
            temp.rename(path)  # onto an empty folder at most: what came into being meanwhile is not replaced
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _sync_folder(path.absolute().parent)
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
        raise translated(err, "write", str(path)) from err
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(fd)
