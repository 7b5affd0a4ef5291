"""From the URL of an object store to its storage: S3 by our own streaming uploads, all others through fsspec."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.open import S3_SCHEMES


def open_objects(url: str, options: Mapping[str, object]) -> Storage:
    """The storage at a URL that is not local. Touches nothing yet.

    Raises:
        StorageError: no library serves this scheme, it is not installed, or it refuses the options.
    """
    scheme = url.partition("://")[0].lower()
    try:
        if scheme in S3_SCHEMES:
            from ckpt_engine.store.storage.objects_s3 import S3Storage

            return S3Storage(url, options)
        from ckpt_engine.store.storage.objects_fsspec import FsspecStorage

        return FsspecStorage(url, options)
    except ImportError as err:
        missing = err.name or str(err)
        hint = "pip install 'ckpt-engine[s3]'" if scheme in S3_SCHEMES else f"install what fsspec needs for {scheme}://"
        raise StorageError(f"storage on {scheme}:// needs {missing}, which is not installed", hint=hint) from err
