"""What ROOT and SNAPSHOT on the command line mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_engine.config import Config, Tier, load_config
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store.layout import ParsedId
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage

LATEST = "latest"
_STEP = re.compile(r"(?:step=)?(\d+)")


def open_root(root: str) -> Repository:
    """The repository at a folder, a URL, or the first place named by a YAML file.

    Raises:
        ConfigError: a YAML file that is wrong or missing, or an unsupported URL.
        StorageMissingError: no run there.
        ForeignError: files there, and none of ours.
    """
    repository = _repository(load_config(root).tiers[0])
    _require_run(repository)
    return repository


def open_places(config: Config) -> list[tuple[Tier, Repository]]:
    """All tiers with their repositories, nearest first, without further ones to which nothing has been copied yet.

    Raises:
        StorageMissingError: no run at the first one.
        ForeignError: files at one of them, and none of ours.
        StorageError: one of them cannot be read.
    """
    places = [(tier, _repository(tier)) for tier in config.tiers]
    _require_run(places[0][1])
    return [places[0], *(place for place in places[1:] if place[1].record() is not None)]


def _repository(tier: Tier) -> Repository:
    return Repository(open_storage(tier.url, tier.storage_options))


def _require_run(repository: Repository) -> None:
    if repository.record() is None and not repository.ids():
        raise StorageMissingError(
            f"no run at {repository.storage.url}", hint="check the path; a run starts with its first snapshot"
        )


def find_snapshot(repository: Repository, wanted: str = LATEST) -> str:
    """The id of the snapshot that `wanted` names: an id, the start of one, a step, or `latest`.

    A number is a step if there is one, else the start of an id. Several snapshots of a step: the newest.

    Raises:
        StorageMissingError: none, or more than one, of that name.
    """
    ids = repository.ids()
    if wanted == LATEST and ids:
        return ids[-1].id
    step = _STEP.fullmatch(wanted)
    of_step = [parsed.id for parsed in ids if step and parsed.step == int(step[1])]
    if of_step:
        return of_step[-1]
    starting = [parsed.id for parsed in ids if wanted and parsed.id.startswith(wanted)]
    if len(starting) == 1:
        return starting[0]
    where = repository.storage.url
    if starting:
        shown = ", ".join(starting[:3]) + (", ..." if len(starting) > 3 else "")
        raise StorageMissingError(f"{len(starting)} snapshots at {where} start with {wanted!r}: {shown}")
    raise StorageMissingError(
        f"no snapshot {wanted!r} at {where}{_nearest(ids, step)}", hint=f"`ckpt ls {where}` lists them"
    )


def _nearest(ids: Sequence[ParsedId], step: re.Match[str] | None) -> str:
    if not ids:
        return ": it has none yet"
    if step is None:
        return ""
    wanted = int(step[1])
    return f"; the nearest step is {min((parsed.step for parsed in ids), key=lambda s: abs(s - wanted))}"
