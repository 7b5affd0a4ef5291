"""The options of an object store that are ours.

All others belong to the library that talks to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ckpt_engine.errors import (
    StorageError,
)
from ckpt_engine.store.storage.upload_parts import MAX_PART_BYTES, MIN_PART_BYTES

VERIFY = ("auto", "always", "never")
_LEAST = {"part_bytes": MIN_PART_BYTES, "concurrency": 1, "timeout_seconds": 0, "retry_seconds": 0, "protect_days": 0}


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """How objects are moved.

    Args:
        part_bytes: size of the parts of a big upload; bigger where the object needs it. From 5 MiB to 5 GiB.
        concurrency: parts under way at once.
        timeout_seconds: a request that moves no byte for so long has failed.
        retry_seconds: how long a failing request is tried again, from its first failure on.
        verify: whether what was sent and listed is checked beyond what the protocol does; "auto" does so where the
            channel is not encrypted, and so does not protect the bytes itself.
        stale_upload_seconds: an interrupted upload that old is abandoned and is removed by `sweep`.
        protect_days: how long the store refuses to delete manifests and parity that are put, and what `retain` names,
            if it can.
    """

    part_bytes: int = 64 << 20
    concurrency: int = 4
    timeout_seconds: float = 20.0
    retry_seconds: float = 60.0
    verify: str = "auto"
    stale_upload_seconds: float = 86_400.0
    protect_days: float = 0.0

    @classmethod
    def split(cls, options: Mapping[str, object]) -> tuple[Self, dict[str, Any]]:
        """Ours, and the rest for the library.

        Raises:
            StorageError: one of our options has an impossible value.
        """
        rest = dict(options)
        ours = cls(**{field.name: rest.pop(field.name) for field in fields(cls) if field.name in rest})  # type: ignore[arg-type]
        ours._check()
        return ours, rest

    def _check(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise StorageError(f"storage option {name} must be a number of at least {least}, got {value!r}")
        if self.part_bytes > MAX_PART_BYTES:
            raise StorageError(f"storage option part_bytes must be at most {MAX_PART_BYTES}, got {self.part_bytes}")
        if self.verify not in VERIFY:
            raise StorageError(f"storage option verify must be one of {', '.join(VERIFY)}, got {self.verify!r}")

    def verifying(self, *, encrypted: bool) -> bool:
        """Whether bytes are checked beyond the protocol on such a channel."""
        return self.verify == "always" or (self.verify == "auto" and not encrypted)
