"""Other bounds of what is shared and stored as differences, so that little data meets all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_engine.copy import write_plan


def bounds(kind: str, **changes: Any) -> tuple[Any, str, Any]:
    """What `monkeypatch.setattr` takes to change those of `PLAIN` or `ENCODED` places."""
    return write_plan, kind, replace(getattr(write_plan, kind), **changes)
