"""Several ranks load the same snapshot: rank 0 chooses it, and all take it if each of them can read what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ckpt_engine.errors import CkptError, CorruptError, NoUsableSnapshotError, RanksError, WaitTimeoutError
from ckpt_engine.persist.job import ErrorRecord
from ckpt_engine.ranks.session import LOAD_SECONDS, Session
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore import load as restore
from ckpt_engine.restore.as_rank import as_rank
from ckpt_engine.restore.choose import Candidate, Check, Search, candidates, none_usable
from ckpt_engine.restore.gather import Gathered
from ckpt_engine.restore.node import Sharing
from ckpt_engine.store.repository import Repository

Places = Callable[[], Sequence[Repository]]
Read = Callable[..., restore.Loaded | None]
"""`restore.load` with all that does not depend on the snapshot."""
_Choice = tuple[str, str | None]
"""The id of a snapshot, and what other ranks have to know of it."""


def choose(session: Session, where: Places, step: int | None, check: Check | None) -> Candidate | None:
    """As `load.choose`, on all ranks."""
    seen = None if check is None else lambda manifest: check(as_rank(manifest, session.ranks.rank))
    found: list[Candidate | None] = []
    with Gathered(session, where) as gathered:

        def look() -> _Choice | None:
            found.append(restore.choose(gathered.places(), step, seen))
            return _chosen(found[0], gathered)

        agreed = session.agree(look, LOAD_SECONDS)
        if agreed is None or session.coordinates:
            return found[0] if found else None
        gathered.learn(*agreed)
        return restore.choose(gathered.places(), None, seen, only=agreed[0])


def load(
    session: Session,
    where: Places,
    step: int | None,
    *,
    into: Any,
    live: restore.Live | None,
    check: Check | None,
    pickle_paths: Sequence[str],
) -> restore.Loaded | None:
    """As `load.load`, on all ranks at once: what one of them cannot read none of them takes.

    Raises:
        RanksError: a rank does not find what rank 0 has chosen.
    """
    # What is filled in place by `live` is divided, too.
    with (
        Gathered(session, where) as gathered,
        Sharing(session, gathered.places, into, alike=live is None) as sharing,
    ):

        def read(**which: Any) -> restore.Loaded | None:
            return restore.load(sharing.places(), into=into, live=live, check=check, pickle_paths=pickle_paths, **which)

        return _load(session, sharing.places, gathered, step, check, read)


def _load(
    session: Session, where: Places, gathered: Gathered, step: int | None, check: Check | None, read: Read
) -> restore.Loaded | None:
    ranks = session.ranks
    seen = None if check is None else lambda manifest: check(as_rank(manifest, 0))
    refused: dict[str, CkptError] = {}
    while True:
        search = Search()

        def look() -> _Choice | None:
            found = candidates(where(), search, step=step, check=seen, refused=refused)  # noqa: B023
            one = next(found, None)
            if one is None and (error := none_usable(where(), search, step)) is not None:  # noqa: B023
                raise error
            return _chosen(one, gathered)

        agreed = session.agree(look, LOAD_SECONDS)
        if agreed is None:
            return None
        chosen = agreed[0]
        gathered.learn(*agreed)
        found, failure = _attempt(ranks, read, chosen)
        mine = {"error": None if failure is None else asdict(ErrorRecord.of(failure))}
        verdict = session.meet(lambda: mine, _verdict, LOAD_SECONDS)  # noqa: B023
        if verdict is None:
            assert found is not None
            rejected = (*search.rejected, *found.rejected)
            return replace(found, rejected=rejected, newest_seq=search.newest_seq)
        error = ErrorRecord(**verdict).exception()
        if not isinstance(error, NoUsableSnapshotError):
            raise failure or error
        refused[chosen] = CorruptError(error.message)


def _chosen(candidate: Candidate | None, gathered: Gathered) -> _Choice | None:
    return None if candidate is None else (candidate.info.id, gathered.told(candidate.manifest))


def _attempt(ranks: Ranks, read: Read, snapshot: str) -> tuple[restore.Loaded | None, CkptError | None]:
    try:
        found = read(only=snapshot, rank=ranks.rank, size=ranks.size)
    except CkptError as err:
        return None, err
    if found is None:
        return None, RanksError(
            f"rank 0 has chosen snapshot {snapshot}, and rank {ranks.rank} does not find it",
            hint="all ranks need the same folder: a shared file system, or an object store",
        )
    return found, None


def _verdict(said: list[dict[str, Any] | None]) -> Any:
    """What went wrong on the first rank that has something to say; first of all what another snapshot does not mend."""
    wrong: list[tuple[int, dict[str, Any]]] = []
    for rank, one in enumerate(said):
        if one is None:
            raise WaitTimeoutError(f"rank {rank} has not said in time whether it has loaded the snapshot")
        if one["error"] is not None:
            wrong.append((rank, one["error"]))
    if not wrong:
        return None
    rank, first = min(wrong, key=lambda item: item[1]["code"] == NoUsableSnapshotError.code)
    return {**first, "message": f"on rank {rank}: {first['message']}"}
