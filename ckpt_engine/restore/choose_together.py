"""All ranks choose the same snapshot to resume from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.restore.ask_tiers import FindPlaces
from ckpt_engine.restore.choose import Candidate, ManifestCheck, SearchLog, choose
from ckpt_engine.restore.node_roots import JointTiers
from ckpt_engine.store.manifest import Manifest


def choose_together(
    session: Session, where: FindPlaces, step: int | None, check: ManifestCheck | None, known: dict[bytes, Manifest]
) -> Candidate | None:
    """As `choose`, on all ranks."""
    seen = None if check is None else lambda manifest: check(manifest.as_rank(session.ranks.rank))
    with JointTiers(session, where) as gathered:
        look = partial(choose, check=seen, search=SearchLog(known=known))
        chosen, found = agree_on(session, gathered, lambda: look(gathered.places(), step))
        if chosen is None or session.coordinates:
            return found
        return look(gathered.places(), only=chosen)


def agree_on(
    session: Session, gathered: JointTiers, look: Callable[[], Candidate | None]
) -> tuple[str | None, Candidate | None]:
    """The id of the snapshot that rank 0 finds, on all ranks, and on rank 0 what it has found."""
    found: Candidate | None = None

    def chosen() -> tuple[str, str | None] | None:
        nonlocal found
        found = look()
        return None if found is None else (found.info.id, gathered.parts_of(found.manifest))

    agreed = session.agree(chosen, LOAD_SECONDS)
    if agreed is None:
        return None, None
    gathered.learn(*agreed)
    return agreed[0], found
