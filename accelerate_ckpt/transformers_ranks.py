"""The ranks of one `Trainer` begin together: none is missing, and all have their snapshots in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import ConfigError, WaitTimeoutError

_CALLS = (
    "on every rank: trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer)), with the callback in the trainer"
)
_Place = tuple[str, str]
"""The machine of a folder, or "" for a place that all machines see; and its URL."""


def meet(engine: Checkpointer, check: Callable[[], None]) -> None:
    """All ranks are here and want the same, or each of them raises. Nothing is started or written before that.

    `train` has collectives from its beginning on: a rank that went there alone would wait until the group gives up.

    Args:
        engine: of this rank.
        check: raises what is wrong with this rank.

    Raises:
        ConfigError: a rank has not come within minutes, or ranks have their snapshots in different places.
        CkptError: what `check` has raised on some rank.
    """

    def say() -> list[_Place]:
        check()
        node = engine.ranks.node if engine.ranks is not None else ""
        return [(node if tier.is_folder else "", tier.url) for tier in engine.config.tiers]

    try:
        engine.meet(say, _require_one_run)
    except WaitTimeoutError as err:
        raise ConfigError("rank 0 has not called resume_from()", hint=_CALLS) from err


def _require_one_run(said: list[list[_Place] | None]) -> None:
    missing = [rank for rank, one in enumerate(said) if one is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(said)} ranks have not called resume_from(): {', '.join(map(str, missing))}",
            hint=_CALLS,
        )
    # Machines may have disks of their own at different paths; the ranks of one machine share what it has.
    first: dict[tuple[int, str], tuple[int, Any]] = {}
    for rank, places in enumerate(said):
        for number, (machine, url) in enumerate(places or ()):
            other, known = first.setdefault((number, machine), (rank, url))
            if url != known:
                raise ConfigError(
                    f"rank {rank} has its snapshots in {url}, and rank {other} in {known}",
                    hint="give all ranks the same folder: a name with a time or a process number in it differs",
                )
