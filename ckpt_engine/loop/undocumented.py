"""Names of a framework that its documentation does not promise: an adapter lists what it uses and probes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.errors import CkptError


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One such name.

    Args:
        owner: the object it belongs to, a key of the owners that are probed.
        name: the attribute.
        used_for: what stops working without it.
    """

    owner: str
    name: str
    used_for: str


def missing(names: Sequence[PrivateName], owners: Mapping[str, Any]) -> list[PrivateName]:
    """The names that `owners` do not have; an owner that is None has none."""
    return [entry for entry in names if not _has(owners[entry.owner], entry.name)]


def require(names: Sequence[PrivateName], owners: Mapping[str, Any], framework: str, version: str, user: str) -> None:
    """Whether a framework has all names.

    Args:
        user: the package that uses them.

    Raises:
        CkptError: lists every missing name with the feature that needs it.
    """
    lines = "; ".join(f"{one.owner}.{one.name} (for {one.used_for})" for one in missing(names, owners))
    if lines:
        raise CkptError(
            f"{framework} {version} lacks names that {user} uses: {lines}",
            hint=f"use a version of {framework} that {user} was tested with, or update ckpt-engine",
        )


def _has(owner: Any, name: str) -> bool:
    """True where the attribute exists; properties that fail to compute still exist."""
    if owner is None:
        return False
    return name in getattr(owner, "__dict__", ()) or hasattr(type(owner), name) or hasattr(owner, name)
