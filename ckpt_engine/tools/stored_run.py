"""A run as its tiers have it.

It finds the snapshot that a name means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt_engine.config import Config, Tier, load_config
from ckpt_engine.errors import CkptError, ForeignError, StorageMissingError
from ckpt_engine.grouping import grouped
from ckpt_engine.observe.units import first
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.choose import UnreachableTier, away_of
from ckpt_engine.store.names import RECORD, ParsedId
from ckpt_engine.store.repository import ForkPoint, Repository, RunRecord, fork_of
from ckpt_engine.store.storage import open_storage

LATEST = "latest"
_STEP = re.compile(r"(?:step=)?(\d+)")
_MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its tiers have it.

    Args:
        places: those that answer, nearest first; one that is empty yet is among them.
        holders: all snapshots, oldest first, and the places that have a copy, nearest first.
        away: tiers that do not answer, or are not of this run.
        tiers: the URLs of all tiers that ROOT names.
        parts: by the URL of a tier the parity that its data files should have, as of `Tier.parts`.
    """

    places: tuple[Repository, ...]
    holders: Mapping[ParsedId, tuple[Repository, ...]]
    away: tuple[UnreachableTier, ...]
    tiers: tuple[str, ...]
    parts: Mapping[str, tuple[int, int] | None]

    @property
    def is_tiered(self) -> bool:
        """Whether ROOT names several tiers."""
        return len(self.tiers) > 1

    @property
    def in_use(self) -> tuple[Repository, ...]:
        """The places that something was written to."""
        holding = {place for holders in self.holders.values() for place in holders}
        return tuple(place for place in self.places if place in holding or place.record() is not None)

    @property
    def record(self) -> RunRecord | None:
        """Which run it is, by the nearest place that has its record; None: none has."""
        return next((record for place in self.places if (record := place.record()) is not None), None)

    def notes(self, wanted: str = LATEST) -> Mapping[str, Any]:
        """The notes of a snapshot, as of `find`; none where it cannot be read."""
        with suppress(CkptError):
            snapshot, (place, *_) = self.find(wanted)
            return place.read(snapshot).notes
        return {}

    @property
    def fork(self) -> ForkPoint | None:
        """Where it was forked, as its newest snapshot has it; None: it was not, or that cannot be read."""
        return fork_of(self.notes())

    def find(self, wanted: str = LATEST) -> tuple[str, tuple[Repository, ...]]:
        """The snapshot that `wanted` names, an id, the start of one, a step or `latest`, and the places that have it.

        A number is a step if there is one, else the start of an id. Several snapshots of a step: the newest.

        Raises:
            StorageMissingError: none, or more than one, of that name.
        """
        ids, step = list(self.holders), _STEP.fullmatch(wanted)
        of_step = [parsed for parsed in ids if step and parsed.step == int(step[1])]
        starting = [parsed for parsed in ids if wanted and parsed.id.startswith(wanted)]
        if found := ids[-1:] if wanted == LATEST else of_step[-1:] or starting[: len(starting) == 1]:
            return found[0].id, self.holders[found[0]]
        where = ", ".join(place.storage.url for place in self.places)
        if starting:
            shown = ", ".join(parsed.id for parsed in starting[:3]) + (", ..." if len(starting) > 3 else "")
            raise StorageMissingError(
                f"{len(starting)} snapshots at {where} start with {wanted!r}: {shown}",
                hint="give more of the one you mean",
            )
        away = "".join(f"; {one.url} may have it, but does not answer" for one in self.away)
        raise StorageMissingError(
            f"no snapshot {wanted!r} at {where}{_nearest(ids, step)}{away}", hint="`ckpt ls` lists them"
        )


def find_run(
    root: str, config: Config | None = None, say: Callable[[str], object] = str, *, every: bool = False
) -> Run:
    """The run at a folder, a URL, or all tiers of a YAML file. Tiers that do not answer are left out.

    Args:
        config: what ROOT stands for, where more than ROOT says that.
        say: takes the line about a wait of some seconds.
        every: no tier may be left out.

    Raises:
        ConfigError: a YAML file that is wrong or missing, or an unsupported URL.
        StorageMissingError: no run there.
        ForeignError: the place has files, and no run.
        CkptError: no tier answers; the error of the nearest.
    """
    tiers = (config or load_config(root)).tiers
    repositories = [repository_of(tier) for tier in tiers]
    try:
        answers = ask_tiers.of_one_run(ask_tiers.ask(repositories, _ids_of_run, ask_tiers.at_most, say))
        for answer in answers if every else ():
            if answer.error is not None:
                raise answer.error
    except ForeignError as err:  # who reads needs another folder, not how to begin a run there
        raise ForeignError(err.message, hint=_where_else(root)) from err
    there = [(answer.place, answer.value) for answer in answers if answer.value is not None]
    away = away_of(answers)
    holders = grouped((parsed, place) for place, ids in there for parsed in ids)
    if not holders and all(place.record() is None for place, _ in there):
        unasked = "".join(f"; {one.url} does not answer: [{one.code}] {one.reason}" for one in away)
        where = ", ".join(place.storage.url for place, _ in there)
        raise StorageMissingError(f"no run at {where}{unasked}", hint=_where_else(root))
    in_order = {parsed: tuple(holders[parsed]) for parsed in sorted(holders, key=lambda one: (one.seq, one.id))}
    urls = tuple(repository.storage.url for repository in repositories)
    parts = {url: tier.parts for url, tier in zip(urls, tiers, strict=True)}
    return Run(tuple(place for place, _ in there), in_order, away, urls, parts)


def _ids_of_run(place: Repository) -> tuple[ParsedId, ...]:
    place.record()  # refuses what is not ours
    return place.ids()


def repository_of(tier: Tier) -> Repository:
    """What a tier has."""
    return Repository(open_storage(tier.url, tier.for_storage()))


def runs_below(root: str) -> list[Path]:
    """The folders of runs in a folder, or in a folder of it, at most 1,000; none where the folder is a run itself."""
    folder = Path(os.path.expanduser(os.path.expandvars(root)))  # noqa: PTH111 - a ~ of no user is refused with the other options
    if "://" in root or not folder.is_dir() or (folder / RECORD).is_file():
        return []
    found = (path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{RECORD}"))
    return sorted(islice(found, _MOST_RUNS))


def _where_else(root: str) -> str:
    if above := [folder for folder in Path(root).expanduser().resolve().parents[:2] if (folder / RECORD).is_file()]:
        return f"it belongs to a run: `ckpt ls {above[0]}`"
    folder, mark, _ = root.rpartition("#")
    if mark:
        return f"this takes a whole run, and no snapshot of it: {folder}"
    if not (below := runs_below(root)):
        return "check the path; a run starts with its first snapshot"
    return f"name a run below it: {first([*map(str, below)], 1)} (`ckpt ls {root}` lists them)"


def _nearest(ids: Sequence[ParsedId], step: re.Match[str] | None) -> str:
    if not ids:
        return ": it has none yet"
    if step is None:
        return ""
    return f"; the nearest step is {min((parsed.step for parsed in ids), key=lambda s: abs(s - int(step[1])))}"
