"""What several ranks have found at their repeated steps.

Each publishes it once, and rank 0 takes the earliest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import msgspec

from ckpt_engine.observe.resume_report import Replay
from ckpt_engine.probe.repeated_steps import CAUSES
from ckpt_engine.ranks.world import Ranks

_KEY = "replay"
_MISSING = Replay("not compared", 0, "its steps were not compared until the end")


def publish(ranks: Ranks, resumed: int, replay: Replay) -> None:
    """What this rank has found.

    Args:
        resumed: the step at which all ranks have resumed.

    Raises:
        RanksError: the store is gone.
    """
    ranks.store.set(f"{_KEY}/{resumed}/{ranks.rank}", json.dumps(asdict(replay)))
    ranks.store.add(f"{_KEY}/{resumed}")


def joined(ranks: Ranks, resumed: int, *, last: bool) -> Replay | None:
    """The earliest difference; else what keeps the resume from being proved, or the proof.

    Args:
        last: ranks that have not published yet do not count.

    Returns:
        None: not all ranks have published. One look into the store tells.

    Raises:
        RanksError: the store is gone.
    """
    key = f"{_KEY}/{resumed}"
    if not last and int(ranks.store.get(key) or 0) < ranks.size:
        return None
    texts = [ranks.store.get(f"{key}/{rank}") for rank in range(ranks.size)]
    found = [msgspec.json.decode(text, type=Replay) if text else _MISSING for text in texts]
    differ = [(one.first.step, list(CAUSES).index(one.first.what), rank) for rank, one in enumerate(found) if one.first]
    unproved = [rank for rank, one in enumerate(found) if one.result != "exact"]
    if not unproved:
        return found[0]
    rank = min(differ)[-1] if differ else unproved[0]
    return replace(found[rank], why=f"on rank {rank}: {found[rank].why}")
