"""Small JSON objects that carry a digest of themselves as their last key, `digest`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ckpt_engine.errors import CorruptError, ForeignError, FormatError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.container import ALGORITHM, T, digest
from ckpt_engine.store.json_checks import reading
from ckpt_engine.store.storage.base import Storage

_KEY = b', "digest": "'


def seal(row: Mapping[str, Any]) -> bytes:
    """The text of a JSON object, ending in the digest of what is before it. `row` MUST NOT be empty."""
    body = json.dumps(row).encode()[:-1]
    return b'%s%s%s"}' % (body, _KEY, digest(body).encode())


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """The object of a text that `seal` has made, or of one without a digest, as earlier versions wrote it.

    Args:
        text: with white space at its end, or without.
        where: it comes from, for messages.

    Raises:
        CorruptError: it was changed, or it is no JSON.
        ForeignError: it is no JSON object.
    """
    body, found, _ = text.rpartition(_KEY)
    end = b'%s%s"}' % (_KEY, digest(body).encode())
    if found and text[len(body) :].rstrip(b" \n") != end:
        raise CorruptError(f"{where} is damaged: it does not match its digest")
    with reading(f"{where} is damaged"):
        row = msgspec.json.decode(text)
    if not isinstance(row, dict):
        raise ForeignError(f"{where} is not of ckpt-engine")
    if found:
        del row["digest"]
    elif any(isinstance(value, str) and value.startswith(f"{ALGORITHM}:") for value in row.values()):
        raise CorruptError(f"{where} is damaged: its digest has no name")  # a flip in the name hides the digest
    return row


def stored(storage: Storage, name: str, parse: Callable[[bytes, str], T]) -> T | None:
    """What `parse` makes of the object `name`, given its bytes and its place for messages; None: there is none.

    Raises:
        StorageError
    """
    try:
        text = storage.get(name)
    except StorageMissingError:
        return None
    return parse(text, f"{storage.url}/{name}")


def parsed(text: bytes, where: str, kind: type[T], hint: str) -> T:
    """The value of `kind`, a dataclass, that a sealed text has; see `unseal`. Keys that `kind` does not have are left
    out: a newer version may have written more.

    Args:
        hint: what to do with a file that has another text.

    Raises:
        CorruptError: it has none: a field is missing, of another type or out of range.
        SealError: it is sealed.
    """
    with reading(f"{where} is damaged", hint):
        try:
            return msgspec.convert(unseal(text, where), kind)
        except FormatError as err:
            names.refuse_sealed(text)
            raise CorruptError(err.message, hint=hint) from err
