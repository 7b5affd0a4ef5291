"""The storage of a tier to read from, which the first request opens."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ckpt_engine.config import Tier
from ckpt_engine.errors import CkptError
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Capabilities, Storage, WrapperStorage
from ckpt_engine.store.storage.object_requests import split_url
from ckpt_engine.store.storage.watchdog import ResponsivenessProbe, WatchedStorage


class FarStorage(WrapperStorage):
    """An object store, to read from, opened by the first request: its library is slow to import.

    Args:
        url: of a root, `scheme://…`.

    Raises:
        StorageError: not the URL of a root.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        scheme, path = split_url(url)
        self.url = f"{scheme}://{path}"
        self._open = partial(open_storage, url, options)
        self._lock = threading.Lock()
        self._opened: Storage | None = None
        self._signs = ResponsivenessProbe()

    @property
    def capabilities(self) -> Capabilities:
        # 0 seconds also while the library is still being imported.
        return Capabilities(silent_seconds=lambda: self._signs.silent_seconds, prepare=self.open_ahead)

    @property
    def inner(self) -> Storage:  # type: ignore[override]
        """The store, watched for signs."""
        with self._lock:
            if self._opened is None:
                storage = self._open()
                prepare = storage.capabilities.prepare
                if prepare is not None:
                    prepare()
                self._opened = WatchedStorage(storage, self._signs)
            return self._opened

    def open_ahead(self) -> None:
        """Open it; the first request raises what is wrong."""
        with suppress(CkptError):
            _ = self.inner


def storage_of(tier: Tier) -> Storage:
    """What a tier has, to read from; an object store is opened by the first request."""
    options = tier.for_storage()
    return open_storage(tier.url, options) if tier.is_folder else FarStorage(tier.url, options)
