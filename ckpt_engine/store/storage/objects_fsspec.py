"""Objects in any store that fsspec reaches, such as `gs://`.

Where closing a file publishes it whole (object stores) it is written under its name; everywhere else under a temporary
one, and then renamed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import fsspec

from ckpt_engine.errors import (
    CkptError,
    CorruptError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
)
from ckpt_engine.store import names
from ckpt_engine.store.storage import client_randomness, redaction
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo
from ckpt_engine.store.storage.disk import require_size, translated
from ckpt_engine.store.storage.object_requests import (
    ObjectStore,
    OtherAnswerError,
    explained,
    require_empty,
    require_stored,
)
from ckpt_engine.store.storage.retries import Backoff, is_hopeless
from ckpt_engine.store.storage.upload_parts import MemoryBlocks
from ckpt_engine.undo import on_failure

WHOLE_AT_CLOSE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "oci", "ocilake", "oss", "s3", "s3a", "hf"})
"""Schemes of stores that show an object only when its upload is complete."""
_TEMP = re.compile(r"(.*/)?\.tmp-[0-9a-f]{16}-[^/]+")
_SLICE_BYTES = 8 << 20
_VERSIONS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated", "modified", "created")
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_NAMES = frozenset(
    {"ClientConnectionError", "ConnectionError", "ServiceRequestError", "ServiceResponseError", "TransportError"}
)
"""Of aiohttp, requests, Azure's libraries and httpx, which have trees of their own."""

_T = TypeVar("_T")
_FsspecRows = list[tuple[str, int, str]]  # inside FsspecStorage, `list` is its method

_publishing = threading.Lock()
"""Makes looking and renaming one step, at least within this process."""


class FsspecStorage(ObjectStore):
    """`Storage` on an fsspec file system, by what all of them have in common.

    An exclusive put asks for creation where the file system offers that, and looks before in any case. Timeouts of
    single requests are the library's own.

    Args:
        url: of the root.
        options: those of `ObjectOptions` and of the file system.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, options)
        scheme, library_options = self._scheme, self._library_options
        try:
            filesystem, root = fsspec.core.url_to_fs(
                self.url, **library_options, skip_instance_cache=bool(library_options), use_listings_cache=False
            )
        except (ValueError, TypeError, KeyError) as err:
            reason = redaction.redacted(str(err), self._secrets)
            shown = StorageError(f"no storage for {scheme}:// URLs: {reason}", hint="use a path, s3:// or file://")
            raise shown from self._shown(err)
        except OSError as err:  # some connect at once
            reason = redaction.redacted(str(err), self._secrets)
            hint = "check the name of its host, and the network"
            raise StorageError(f"{self.url} is unreachable: {reason}", hint=hint) from self._shown(err)
        client_randomness.shield()
        self._fs: Any = filesystem
        self._root = root.rstrip("/")
        self._prefix = f"{self._root}/"
        self._whole_at_close = scheme in WHOLE_AT_CLOSE
        self._begun = set[str]()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self._trying(partial(self._put, self._key(name), blocks, exclusive=exclusive), "write", name)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return self._trying(partial(self._read, name, self._key(name), start, nbytes), "read", name)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        target = out.cast("B")
        done = 0
        while done < len(target):
            data = self.get(name, start + done, min(len(target) - done, _SLICE_BYTES * 2))
            if not data:
                raise CorruptError(f"{self.url}/{name} ends at byte {start + done}, needed up to {start + len(target)}")
            target[done : done + len(data)] = data
            done += len(data)
        if not target:
            self._key(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        for name, nbytes, version in self._found(folder):
            if name.startswith(prefix) and not _TEMP.fullmatch(name):
                yield ObjectInfo(name, nbytes, version)

    def delete(self, *names: str) -> None:
        for name, path in [(name, self._key(name)) for name in names]:
            self._trying(partial(self._remove, path), "delete", name)

    def sweep(self) -> int:
        freed = 0
        for name, nbytes, _ in self._found(""):
            path = f"{self._root}/{name}"
            if _TEMP.fullmatch(name) and path not in self._begun and self._is_stale(path):
                self._trying(partial(self._remove, path), "clear", name)
                freed += nbytes
        return freed

    def _fresh(self, path: str | None = None) -> Any:
        """The file system, without what it remembers of a path, or of any: some libraries do in spite of
        `use_listings_cache`, and do not see what others have written."""
        self._fs.invalidate_cache(path)
        return self._fs

    def _put(self, path: str, blocks: Sequence[memoryview], *, exclusive: bool) -> None:
        if exclusive and self._info(path) is not None:
            raise FileExistsError(17, "File exists", path)
        if self._whole_at_close:
            self._write(path, blocks, "xb" if exclusive else "wb")
        else:
            self._write_and_move(path, blocks, exclusive=exclusive)
        if exclusive:  # else another may have replaced it by now
            there = self._info(path)
            nbytes = None if there is None else int(there["size"])
            require_stored(path, MemoryBlocks.of(blocks).nbytes, nbytes)

    def _write_and_move(self, path: str, blocks: Sequence[memoryview], *, exclusive: bool) -> None:
        folder, _, file = path.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        temp = f"{folder}/.tmp-{os.urandom(8).hex()}-{file}"
        self._begun.add(temp)
        try:
            with on_failure(partial(self._remove, temp)):
                self._write(temp, blocks, "wb")
                with _publishing:
                    if exclusive and self._info(path) is not None:
                        raise FileExistsError(17, "File exists", path)
                    self._fs.mv(temp, path)
        finally:
            self._begun.discard(temp)

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """What the library says of a file or folder; None: there is none. Its `exists` says so after any error."""
        try:
            return dict(self._fresh(path).info(path))
        except FileNotFoundError:
            return None

    def _write(self, path: str, blocks: Sequence[memoryview], mode: str) -> None:
        file = self._open(path, mode)
        try:
            for block in blocks:
                data = block.cast("B")
                for start in range(0, len(data), _SLICE_BYTES):
                    file.write(bytes(data[start : start + _SLICE_BYTES]))
        except BaseException:
            # Closing would publish what has been written so far.
            if hasattr(file, "discard"):
                file.discard()
            file.closed = True
            raise
        file.close()

    def _open(self, path: str, mode: str) -> Any:
        sized = {"block_size": self.options.part_bytes} if self._whole_at_close else {}
        if mode == "xb":
            try:
                return self._fs.open(path, "xb", **sized)
            except (ValueError, NotImplementedError):
                mode = "wb"  # this library has no exclusive mode; we have looked
        return self._fs.open(path, mode, **sized)

    def _read(self, name: str, path: str, start: int, nbytes: int | None) -> bytes:
        size = int(self._fresh(path).info(path)["size"])
        if nbytes is None:
            require_size(f"{self.url}/{name}", size, names.most_bytes(name))
        stop = size if nbytes is None else min(start + nbytes, size)
        if start >= stop:
            return b""
        data: bytes = self._fs.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise ConnectionError(f"{len(data)} bytes came instead of {stop - start}")
        return data

    def _found(self, folder: str) -> _FsspecRows:
        top = f"{self._root}/{folder}" if folder else self._root

        def find() -> _FsspecRows:
            there = self._info(top)
            if there is not None and there["type"] != "directory":
                raise NotADirectoryError(20, "Not a directory", top)
            rows: Mapping[str, Mapping[str, Any]] = self._fs.find(top, detail=True) if there is not None else {}
            skip = len(self._root) + 1
            if not rows:
                record = self._key(names.RECORD)
                require_empty(f"{folder}/" if folder else "", self._level(skip), lambda: self._info(record) is not None)
            files = [(path[skip:], row) for path, row in rows.items() if row["type"] == "file"]
            return [(name, int(row["size"]), _version(row)) for name, row in files]

        return self._trying(find, "list", folder)

    def _level(self, skip: int) -> Sequence[str]:
        try:
            rows = self._fresh().ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        # A folder may be empty, but not in a store of objects, where it is made of their names.
        folders = [f"{row['name'][skip:]}/" for row in rows if row["type"] == "directory" and self._whole_at_close]
        return [row["name"][skip:] for row in rows if row["type"] == "file"] + folders

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except Exception as err:
            if not isinstance(err, FileNotFoundError | KeyError) and _status(err) != 404:
                raise

    def _is_stale(self, path: str) -> bool:
        try:
            age = time.time() - self._fs.modified(path).timestamp()
        except (FileNotFoundError, NotImplementedError):
            return False
        return bool(age >= self.options.stale_upload_seconds)

    def _shown(self, error: Exception) -> Exception | None:
        """`error`, if a traceback may show it."""
        return None if redaction.shows(error, self._secrets) else error

    def _trying(self, work: Callable[[], _T], what: str, name: str) -> _T:
        backoff = Backoff(self.options.retry_seconds)
        where = f"{self.url}/{name}"
        while True:
            try:
                return work()
            except CkptError:
                raise
            except FileNotFoundError as err:
                if what == "write":
                    problem = f"cannot write {where}: the place does not exist"
                    raise StorageMissingError(problem, hint="make its bucket, container or repository first") from err
                raise StorageMissingError(f"cannot {what} {where}: it does not exist") from err
            except FileExistsError as err:
                raise StorageExistsError(f"cannot {what} {where}: it exists") from err
            except Exception as err:  # noqa: BLE001 - raised again, translated, or tried again
                wait = backoff.next_wait() if _is_transient(err) and not is_hopeless(err) else None
                if wait is None:
                    raise _explained(err, what, where) from self._shown(err)
            time.sleep(wait)


def _version(row: Mapping[str, Any]) -> str:
    """What shows in a listing that an object was written again, by the library's name for it."""
    return str(next((row[key] for key in _VERSIONS if row.get(key)), ""))


def _status(error: BaseException) -> int:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdigit():
                return int(value)
    return 0


def _is_transient(error: Exception) -> bool:
    is_known = isinstance(error, ConnectionError | TimeoutError) or _status(error) in _TRANSIENT_STATUS
    return is_known or not _TRANSIENT_NAMES.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def _explained(error: Exception, what: str, where: str) -> StorageError:
    status = _status(error)
    # Only the kind of a library's error is shown: its text may carry a signed URL or a key.
    of_library = type(error).__name__ + (f" ({status})" if status else "")
    kind = str(error) if isinstance(error, OtherAnswerError) else of_library
    if isinstance(error, PermissionError):
        status = 403
    if status not in (401, 403, 507) and isinstance(error, OSError) and error.errno:
        return translated(OSError(error.errno, os.strerror(error.errno)), what, where)
    return explained(what, where, kind, status, "", "check the address, the network and storage_options")
