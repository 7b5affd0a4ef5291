"""Manifests changed by hand, with the digest of what they say now: what somebody who means harm can write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.store.container import digest


def sealed(body: Any, key: str = "manifest") -> bytes:
    """A document of a store around `body`, which need not make sense."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"digest":"%s","%s":%s}\n' % (digest(text).encode(), key.encode(), text)


def newest(root: Path) -> Path:
    """The newest manifest of the run at `root`."""
    return max((root / "snapshots").glob("*.json"))


def forge(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the newest manifest of the run at `root`, and seal it again."""
    path = newest(root)
    body = json.loads(path.read_bytes())["manifest"]
    change(body)
    path.write_bytes(sealed(body))
