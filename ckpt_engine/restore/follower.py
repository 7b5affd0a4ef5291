"""Follows a run from another process, which gets the tensors of each new durable snapshot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from ckpt_engine.config import load_config
from ckpt_engine.config.load_config import ConfigSource
from ckpt_engine.config.sections import parse_duration_seconds
from ckpt_engine.errors import (
    ArgumentError,
    CkptError,
    CorruptError,
    FormatError,
    MismatchError,
    NotAFolderError,
    StorageError,
    StorageMissingError,
)
from ckpt_engine.observe.events import CLOSED, LOGGER_NAME, TELL_SECONDS, announce, said_if_slow
from ckpt_engine.observe.units import duration
from ckpt_engine.restore import ask_tiers
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate, SearchLog, candidates
from ckpt_engine.restore.far_storage import storage_of
from ckpt_engine.restore.match import tensor_nodes
from ckpt_engine.restore.read import read_entries
from ckpt_engine.state.rebuild import Rebuilder, flat_bytes
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import OWN_KEY, Manifest, by_age
from ckpt_engine.store.repository import Repository
from ckpt_engine.writer.attempts import Attempt, read_attempts

TRY_SECONDS = 120.0
"""How long a place is tried that has never answered."""
END_POLLS = 5
"""In so many polls that find nothing new, one looks whether the run has ended."""
_STOPPED = "signal"
"""Why the last snapshot of a run was taken that was asked to stop: the same command continues it."""
Changes = Iterator[tuple[int, dict[str, torch.Tensor]]]


def follow(url: ConfigSource, component: str | None = None, every: float | str = "1 s") -> Changes:
    """The step and the tensors of each new durable snapshot of a run that another process trains.

    The first one is the newest that there is, with all its tensors. Each later one has the tensors whose digest differs
    from what was given before: together they are the tensors of that snapshot and of no other. Every byte is verified.
    Snapshots that come faster than they are taken are left out. A place that does not answer is tried again, and a line
    says so after 3 s.

    It ends when the run has ended. A run that was killed, failed, or was asked to stop has not: it continues with the
    same command.

    Args:
        url: the run's folder, its storage URL, a `ckpt.yaml` that names its tiers, or a mapping with the same keys.
        component: top-level key of the state; its tensors have their names in it, as in a state dict. None: all of
            them, each with the name of its component before its own (`model.0.weight`).
        every: seconds between two looks, or a text such as `"500 ms"`. Each is one listing.

    Raises:
        ArgumentError: `every` is no duration.
        ConfigError: `url` is no place.
        MismatchError: the snapshot has no such component.
        ForeignError, NotAFolderError: it is another place than one of a run.
        StorageError: the place has not answered for two minutes, and never before.

    Examples:
        >>> for step, changed in follow("s3://bucket/run", component="model"):
        ...     model.load_state_dict(changed, strict=False)
        ...     print(step, evaluate(model))
    """
    try:
        seconds = parse_duration_seconds(every)
    except ValueError as err:
        raise ArgumentError(f"every {err}, got {every!r}") from err
    places = [Repository(storage_of(tier)) for tier in load_config(url).tiers]
    return _Follower(places, component, seconds).changes()


class _Follower:
    """What one process has of a run, and what there is.

    Args:
        places: of the run, nearest first.
    """

    def __init__(self, places: Sequence[Repository], component: str | None, every_seconds: float) -> None:
        self._places = places
        self._urls = ", ".join(place.storage.url for place in places)
        self._component = component
        self._every_seconds = every_seconds
        self._at = (-1, "")
        """The age of the snapshot that it has."""
        self._reason = ""
        self._contents: dict[str, tuple[Any, ...]] = {}
        """By tensor, what it has of it as the manifest says it."""
        self._digests: dict[str, str] = {}
        self._refused: dict[str, CkptError] = {}
        """Snapshots that are damaged."""
        self._began = time.monotonic()
        self._answered = self._said = False
        self._failing_since = 0.0
        self._broken: Attempt | None = None
        """The attempt of which it was said that it has not ended the run."""

    def changes(self) -> Changes:
        """See `follow`."""
        idle = 0
        while True:
            looked, found, ended = time.monotonic(), None, False
            try:
                found = self._look()
                if found is None and idle % END_POLLS == 0 and (ended := self._has_ended()):
                    found = self._look()  # what was committed before
                if found is None and not ended and self._at[0] < 0 and not self._refused:
                    raise StorageMissingError(f"no snapshot at {self._urls} yet")
                self._worked()
            except CkptError as err:
                self._failed(err)
            if found is not None:
                idle = 0
                yield found
            elif ended:
                return
            else:
                idle += 1
            time.sleep(max(0.0, looked + self._every_seconds - time.monotonic()))

    def _look(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """What is newer than what it has; None: nothing that can be used."""
        question = Repository.ids if self._answered else ask_tiers.ids_of_run
        answers = ask_tiers.ask(self._places, question, ask_tiers.at_most)
        self._answered = True
        there = [one for answer in answers for one in answer.value or () if one.id not in self._refused]
        if max(map(attrgetter("seq", "id"), there), default=self._at) <= self._at:
            return None
        search = SearchLog()
        for candidate in candidates(self._places, search, refused=self._refused):
            if by_age(candidate.info) <= self._at:
                break
            try:
                changed = self._read(candidate)
            except FormatError as err:
                search.reject(candidate.info.id, err)
                continue
            self._at, self._reason = by_age(candidate.info), candidate.info.reason
            return candidate.info.step, changed
        for one in search.rejected:
            if one.code.startswith(StorageError.code[:-2]):
                raise StorageMissingError(f"{one.snapshot}: {one.reason}")
            if one.snapshot not in self._refused:
                self._refused[one.snapshot] = CorruptError(one.reason)
                self._say(f"{one.snapshot} is left out: [{one.code}] {one.reason}")
        return None

    def _read(self, candidate: Candidate) -> dict[str, torch.Tensor]:
        """The tensors that differ from those it has; afterwards it has these."""
        manifest = candidate.unpacked().manifest.as_rank(0)
        nodes = self._nodes(manifest)
        contents = {name: _content(manifest, node) for name, node in nodes.items()}
        wanted = [name for name in nodes if contents[name] != self._contents.get(name)]
        sources = Sources([place.storage for place in candidate.sources])
        with said_if_slow(f"reading {candidate.info.id} from {candidate.sources[0].storage.url}"):
            entries = read_entries(sources, manifest, list(dict.fromkeys(nodes[name]["entry"] for name in wanted)))
        rebuilder = Rebuilder(entries, plain=True)
        tensors = {name: rebuilder.node(nodes[name], (name,)).detach() for name in wanted}
        found = {
            name: f"{one.dtype} {tuple(one.shape)} {digest(flat_bytes(one).data)}" for name, one in tensors.items()
        }
        before, self._contents = self._digests, contents
        self._digests = {name: found.get(name) or before[name] for name in nodes}
        return {name: one for name, one in tensors.items() if found[name] != before.get(name)}

    def _nodes(self, manifest: Manifest) -> dict[str, Mapping[str, Any]]:
        """The tensors that are followed, by the names that they are given."""
        component = self._component
        if component is not None and component not in manifest.tree:
            raise MismatchError(
                f"{manifest.info.id} has no component {component!r}; it has: {', '.join(map(repr, manifest.tree))}",
                hint="name one of them, or none: all are followed then",
            )
        found: dict[str, Mapping[str, Any]] = {}
        for path, node in tensor_nodes(manifest):
            if path[:1] == (OWN_KEY,) or component not in (None, "", *path[:1]):
                continue
            name = ".".join(map(str, path[bool(component) :]))
            if name in found:
                raise MismatchError(f"two tensors of {manifest.info.id} would be called {name!r}")
            found[name] = node
        return found

    def _has_ended(self) -> bool:
        """Whether the run's last process has closed it at its end."""
        last: Attempt | None = None
        for place in self._places:
            with suppress(CkptError):
                last = last or next(reversed(read_attempts(place.storage).rows), None)
        if last is None or last.end is None:
            return False
        if last.end == CLOSED and self._reason != _STOPPED:
            return True
        if last != self._broken:
            self._broken = last
            self._say("the run was stopped or has failed; waiting until it continues")
        return False

    def _worked(self) -> None:
        if self._said:
            self._say("it answers again")
        self._said, self._failing_since = False, 0.0

    def _failed(self, error: CkptError) -> None:
        """Raise what waiting does not mend, and say once what it waits for."""
        if not self._answered and isinstance(error, FormatError | NotAFolderError):
            raise error
        if not isinstance(error, FormatError | StorageError):
            raise error
        now = time.monotonic()
        if not self._answered and now - self._began > TRY_SECONDS:
            raise StorageError(
                f"{self._urls} has not answered for {duration(TRY_SECONDS)}: {error.message}",
                hint=error.hint or f"`ckpt doctor {self._urls}` tries it step by step",
            ) from error
        self._failing_since = self._failing_since or now
        if not self._said and now - self._failing_since >= TELL_SECONDS:
            self._said = True
            self._say(f"[{error.code}] {error.message}; it is tried again every {duration(self._every_seconds)}")

    def _say(self, line: str) -> None:
        announce(logging.getLogger(LOGGER_NAME), f"following {self._urls}: {line}")


def _content(manifest: Manifest, node: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the content of a tensor from another one, without reading it. Data files never change."""
    entry = manifest.entries[node["entry"]]
    pieces = [piece.content_digest or (manifest.files[piece.file].name, piece.offset) for piece in entry.pieces]
    form = [repr(node.get(key)) for key in ("view", "stride", "blocks")]
    return entry.dtype, entry.shape, *form, *pieces
