"""A sealed place that an earlier version has written is read as it was."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

from ckpt_engine.store.storage import open_storage

KNOWN = json.loads((Path(__file__).parent / "known_sealed.json").read_text())


def test_a_known_key_opens_known_objects(tmp_path: Path) -> None:
    """Keys, signatures, wraps, derivations and chunks are those of the format page; cryptography 48.0.1 wrote them."""
    (tmp_path / "key").write_text(KNOWN["key"])
    for name, text in KNOWN["sealed"].items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b64decode(text))
    storage = open_storage(str(tmp_path / "run"), {"seal": {"key": str(tmp_path / "key")}})
    assert {name: storage.get(name).decode() for name in KNOWN["plain"]} == KNOWN["plain"]
    assert {item.name: item.nbytes for item in storage.list("")} == {
        name: len(text) for name, text in KNOWN["plain"].items()
    }
