"""What a run will need of memory and disk, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import yaml

from ckpt_engine.config import Config, Tier
from ckpt_engine.copy.make_room import shortage
from ckpt_engine.copy.memory_limits import look, plan_arena
from ckpt_engine.errors import CkptError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.store.retention_preflight import most_kept
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.tools.try_storage import Finding, Mark, tried


def newest_bytes(config: Config) -> int | None:
    """The size of the newest snapshot at the nearest tier; None: there is none, or it does not answer."""
    with suppress(CkptError):
        return next((info.nbytes for info in reversed(repository_of(config.tiers[0]).list())), None)
    return None


def memory_need(config: Config, state_bytes: int) -> Finding:
    """Whether this machine has room for the arena of a run with all its ranks here."""
    slots, room = config.arena_slots, look()
    is_process = config.writer == "process"
    fit = plan_arena(state_bytes, slots, memory=config.memory is not None, room=room, process=is_process)
    if fit.warning:
        return Finding("host memory", Mark.BAD, fit.warning)
    needed = f"{count(slots, 'slot')} of {units.size(state_bytes)} need {units.size(slots * state_bytes)}"
    there = f"{units.size(room.nbytes)} are available ({room.limit})" if room else "what is available is not known"
    return Finding("host memory", Mark.OK, f"{needed}; {there}")


def tier_needs(config: Config, tier: Tier, state_bytes: int | None) -> Iterator[Finding]:
    """What is kept on a tier, and whether it has room for that."""
    rules = config.keep_rules(tier)
    yield Finding("keeps", Mark.OK, yaml.safe_dump(rules, default_flow_style=True, width=1000, sort_keys=False).strip())
    if state_bytes is not None:
        place, policy = repository_of(tier), policy_from(rules)
        most, is_bounded = most_kept(policy)
        needed = f"{'' if is_bounded else 'at least '}{units.size(most * state_bytes)} for {count(most, 'snapshot')}"

        def fits(_: object) -> tuple[Mark, str]:
            short = shortage(place, policy, state_bytes)
            return (Mark.BAD, short) if short else (Mark.OK, needed)

        yield tried("disk", fits, place.storage)
