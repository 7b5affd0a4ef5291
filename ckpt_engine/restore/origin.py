"""The other run that a new run begins with a snapshot of, as the option `resume.from` names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from ckpt_engine.config import load_config
from ckpt_engine.errors import ResumeError
from ckpt_engine.restore.ask_tiers import FindPlaces
from ckpt_engine.restore.far_storage import storage_of
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import FORKED, ForkPoint, Repository

_T = TypeVar("_T")
_SNAPSHOT = re.compile(r"(.+?)(?:#(?:latest|(?:step=)?(\d+)))?", re.DOTALL)


def look_elsewhere(origin: str, look: Callable[[FindPlaces, int | None], _T | None]) -> _T:
    """What `look` finds in the places of the other run; it is given the step, too.

    Args:
        origin: as the option has it, `URL#STEP`.

    Raises:
        ResumeError: nothing.
        CkptError: from the place, or nothing usable.
    """
    root, step = _SNAPSHOT.fullmatch(origin).groups()  # type: ignore[union-attr]
    places = [Repository(storage_of(tier)) for tier in load_config(root).tiers]
    found = look(lambda: places, None if step is None else int(step))
    if found is None:
        raise ResumeError(f"resume.from: {root} has no snapshot", hint=f"`ckpt ls {root}` lists what is there")
    return found


def note_of_fork(url: str, manifest: Manifest) -> dict[str, Any]:
    """The note of the snapshots of a run that begins with this one, which is at `url`."""
    return {FORKED: asdict(ForkPoint(url, manifest.run, manifest.info.id, manifest.info.step))}
