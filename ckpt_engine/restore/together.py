"""Several ranks load the same snapshot: rank 0 finds it, the others take no other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt_engine.errors import RanksError
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.restore import load as restore
from ckpt_engine.restore.as_rank import as_rank
from ckpt_engine.restore.choose import Candidate, Check
from ckpt_engine.restore.node import Sharing
from ckpt_engine.store.repository import Repository

Places = Callable[[], Sequence[Repository]]


def choose(session: Session, where: Places, step: int | None, check: Check | None) -> Candidate | None:
    """As `load.choose`, on all ranks."""
    seen = None if check is None else lambda manifest: check(as_rank(manifest, session.ranks.rank))
    found: list[Candidate | None] = []

    def look() -> str | None:
        found.append(restore.choose(where(), step, seen))
        return found[0].info.id if found[0] is not None else None

    agreed = session.agree(look, LOAD_SECONDS)
    if agreed is None or session.coordinates:
        return found[0] if found else None
    return restore.choose(where(), None, seen, only=agreed)


def load(
    session: Session, where: Places, step: int | None, *, into: Any, check: Check | None, pickle_paths: Sequence[str]
) -> restore.Loaded | None:
    """As `load.load`, on all ranks: rank 0 first, which has then seen that every byte is there.

    Raises:
        RanksError: this rank does not find what rank 0 has loaded.
    """
    with Sharing(session, where, into) as sharing:
        return _load(session, sharing.places, step, into=into, check=check, pickle_paths=pickle_paths)


def _load(
    session: Session, where: Places, step: int | None, *, into: Any, check: Check | None, pickle_paths: Sequence[str]
) -> restore.Loaded | None:
    ranks = session.ranks
    found: list[restore.Loaded] = []

    def read(only: str | None) -> str | None:
        one = restore.load(
            where(),
            step,
            into=into,
            check=check,
            pickle_paths=pickle_paths,
            only=only,
            rank=ranks.rank,
            size=ranks.size,
        )
        found.extend([one] if one is not None else [])
        return one.info.id if one is not None else None

    agreed = session.agree(lambda: read(None), LOAD_SECONDS)
    if agreed is None:
        return None
    if not session.coordinates and read(agreed) is None:
        raise RanksError(
            f"rank 0 has loaded snapshot {agreed}, and rank {ranks.rank} does not find it",
            hint="all ranks need the same folder: a shared file system, or an object store",
        )
    return found[0]
