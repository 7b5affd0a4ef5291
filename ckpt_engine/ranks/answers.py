"""Values of any size in the ranks' store, under one name: what is too large for one entry is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

from ckpt_engine.errors import RanksError
from ckpt_engine.ranks.world import Store
from ckpt_engine.store.digest import digest

PIECE_BYTES = 4 << 20
"""The server of torch's `TCPStore` hangs up on whoever sets more than 8 MiB at once."""


def say(store: Store, key: str, answer: dict[str, Any]) -> None:
    """Set `key` to a JSON value, for `hear`.

    Args:
        answer: without an entry `pieces`.

    Raises:
        RanksError: the store does not take it.
    """
    text = json.dumps(answer)  # ASCII: as many bytes as characters
    if len(text) > PIECE_BYTES:
        pieces = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            store.set(f"{key}/piece/{number}", piece)
        text = json.dumps({"pieces": len(pieces), "digest": digest(memoryview(text.encode()))})
    store.set(key, text)


def hear(store: Store, key: str, timeout: float) -> dict[str, Any]:
    """What `say` has set or will set within `timeout` seconds.

    Raises:
        WaitTimeoutError: nobody has said it.
        RanksError: the store does not answer, or what it has is not what was said.
    """
    found: dict[str, Any] = json.loads(store.wait(key, timeout))
    if "pieces" not in found:
        return found
    text = "".join(store.wait(f"{key}/piece/{number}", timeout) for number in range(found["pieces"]))
    if digest(memoryview(text.encode())) != found["digest"]:
        raise RanksError(
            f"the {found['pieces']} pieces of {key} in the ranks' store are not what was put there",
            hint="every rank must make its checkpointers and call load and save in the same order",
        )
    value: dict[str, Any] = json.loads(text)
    return value
