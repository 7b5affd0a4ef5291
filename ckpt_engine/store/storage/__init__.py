"""The storage that serves a URL.

From a URL to the storage that serves it: local, S3 by our own streaming uploads, of a plugin, or through fsspec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from ckpt_engine.errors import StorageError
from ckpt_engine.plugins import STORAGES, plugin
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.object_options import ObjectOptions
from ckpt_engine.store.storage.object_requests import split_url

S3_SCHEMES = ("s3", "s3a")
TRANSPORTS = ("fsspec", "obstore")
"""Values of the option `transport` of any object store; the first one is the default."""
SEAL = "seal"
"""The option of any storage that says how it is sealed: arguments of `KeyRing`."""
_NONE: Mapping[str, object] = MappingProxyType({})


def open_storage(url: str | os.PathLike[str], options: Mapping[str, object] = _NONE) -> Storage:
    """The storage at `url`: a path, `file:///absolute/path`, `s3://bucket/folder` or another URL.

    Other schemes are those that installed packages register in `ckpt_engine.storages`, then those of fsspec.

    Touches nothing yet.

    Args:
        options: for the storage; the local one has none.

    Raises:
        StorageError: a scheme or an option that is not supported, or a library that is not installed.
        ConfigError: a package that registers the scheme cannot be imported.
    """
    text = os.fspath(url)
    if SEAL in options:
        return _sealed(text, options)
    scheme = text.partition("://")[0].lower() if "://" in text else "file"
    if scheme != "file":
        return open_objects(text, options)
    if options:
        raise StorageError(
            f"local storage takes no storage_options, got {', '.join(sorted(options))}", hint="remove storage_options"
        )
    return LocalStorage(_local_path(text))


def require_served(url: str, options: Mapping[str, object] = _NONE) -> None:
    """As `open_storage`, but where that is slow only what can be said without importing a library.

    Raises:
        StorageError: as `open_storage`, for most reasons.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in S3_SCHEMES and "transport" not in options and find_spec("s3fs") is not None:
        split_url(url)
        ObjectOptions.split(options)
        return
    open_storage(url, options)


def _sealed(url: str, options: Mapping[str, object]) -> Storage:
    try:
        from ckpt_engine.store.storage.sealed import SealedStorage, ring_of
    except ImportError as err:
        raise StorageError(
            f"seal needs a package that is not installed, or is too old: {err}",
            hint="pip install 'ckpt-engine[seal]'",
        ) from err
    inner = open_storage(url, {name: value for name, value in options.items() if name != SEAL})
    return SealedStorage(inner, ring_of(inner.url, json.dumps(options[SEAL]), os.environ.get(names.KEY_VARIABLE)))


def _local_path(text: str) -> str:
    if "://" not in text:
        if not text:
            raise StorageError("the storage URL is empty", hint="give a path or file:///absolute/path")
        return text
    parts = urlsplit(text)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise StorageError(f"not a local file URL: {text}", hint="use three slashes: file:///absolute/path")
    if parts.query or parts.fragment:
        raise StorageError(f"'?' and '#' have no meaning here: {text}", hint="write them as %3F and %23")
    return path


def open_objects(url: str, options: Mapping[str, object]) -> Storage:
    """The storage at a URL that is not local. Touches nothing yet.

    Raises:
        StorageError: no library serves this scheme, it is not installed, or it refuses the options.
        ConfigError: as `open_storage`.
    """
    scheme = url.partition("://")[0].lower()
    given = dict(options)
    transport = given.pop("transport", "fsspec")
    if transport not in TRANSPORTS:
        raise StorageError(f"no transport {transport!r}", hint=f"there are {' and '.join(TRANSPORTS)}")
    if scheme in ("http", "https"):
        is_azure = split_url(url)[1].partition("/")[0].endswith(".windows.net")
        hint = (
            "Azure is az://container/run with the storage option account_name"
            if is_azure
            else "an S3 server is s3://bucket/run with the storage option endpoint_url"
        )
        raise StorageError(f"{scheme}://{split_url(url)[1]} has no listings and cannot be written", hint=hint)
    try:
        if transport == "obstore":
            from ckpt_engine.store.storage.objects_obstore import ObstoreStorage

            return ObstoreStorage(url, given)
        if scheme in S3_SCHEMES:
            from ckpt_engine.store.storage.objects_s3 import S3Storage

            return S3Storage(url, given)
        if (made := plugin(STORAGES, scheme)) is not None:
            storage: Storage = made(url, given)
            return storage
        from ckpt_engine.store.storage.objects_fsspec import FsspecStorage

        return FsspecStorage(url, given)
    except ImportError as err:
        missing = err.name or str(err)
        hint = "pip install 'ckpt-engine[s3]'" if scheme in S3_SCHEMES else f"install it ({missing})"
        if transport == "obstore":
            hint = "pip install 'ckpt-engine[s3-fast]'"
        needed = "a package that" if err.name is None else f"the package {err.name}, which"
        raise StorageError(f"storage on {scheme}:// needs {needed} is not installed", hint=hint) from err
