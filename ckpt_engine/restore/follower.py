"""Follows a run from another process, which gets the tensors of each new durable snapshot."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_engine.config import load_config
from ckpt_engine.config.load_config import ConfigSource
from ckpt_engine.config.option_types import parse_duration_seconds
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
from ckpt_engine.observe.events import CLOSED, LOG, TELL_SECONDS, announce, said_if_slow
from ckpt_engine.observe.units import duration
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate, SearchLog, candidates
from ckpt_engine.restore.far_storage import storage_of
from ckpt_engine.restore.match import tensor_nodes
from ckpt_engine.restore.read import read_entries
from ckpt_engine.state.rebuild import Rebuilder, flat_bytes
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import OWN_KEY, RAW, Manifest, by_age
from ckpt_engine.store.repository import Repository
from ckpt_engine.writer.attempts import Attempt, read_attempts

TRY_SECONDS = 120.0
"""How long a place is tried that has never answered."""
END_POLLS = 5
"""In so many polls that find nothing new, one looks whether the run has ended."""
_STOPPED = "signal"
"""Why the last snapshot of a run was taken that was asked to stop: the same command continues it."""


def follow(
    url: ConfigSource, component: str | None = None, every: float | str = "1 s"
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """The step and the tensors of each new durable snapshot of a run that another process trains.

    The first one is the newest that there is, with all its tensors. Each later one has the tensors whose digest differs
    from what was given before: together they are the tensors of that snapshot and of no other. Every byte is verified.
    Snapshots that come faster than they are taken are left out. Of a tier with differences only the new ones are read:
    one copy of what is followed stays in memory for that. A place that does not answer is tried again, and a line
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
    return _Follower(places, component, seconds, time.monotonic() + TRY_SECONDS).changes()


@dataclass
class _Follower:
    """What one process has of a run, and how it gets what is new.

    Args:
        _places: of the run, nearest first.
        _gives_up_at: infinite: it has answered.
        _at: the age of the snapshot that it has; `_reason`: why that was taken.
        _refused: snapshots that cannot be used.
        _had: by tensor, its content as the manifest says it, and its digest.
        _bases: decoded bytes of their pieces, by digest, of a place that stores differences: one copy more of them.
        _fails_since: 0.0: it works; infinite: it does not, and that was said.
    """

    _places: Sequence[Repository]
    _component: str | None
    _every_seconds: float
    _gives_up_at: float
    _at: tuple[int, str] = (-1, "")
    _reason: str = ""
    _refused: dict[str, CkptError] = field(default_factory=dict)
    _had: dict[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    _bases: dict[str | None, memoryview] = field(default_factory=dict)
    _fails_since: float = 0.0

    @property
    def _urls(self) -> str:
        return ", ".join(place.storage.url for place in self._places)

    def changes(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """See `follow`."""
        idle = 0
        while True:
            looked, found = time.monotonic(), None
            try:
                found = self._look()
                # What was committed before the end is given before it.
                if found is None and idle % END_POLLS == 0 and self._has_ended() and (found := self._look()) is None:
                    return
                self._fails_since = 0.0
            except CkptError as err:
                self._failed(err)
            idle += 1
            if found is not None:
                idle = 0
                yield found
            time.sleep(max(0.0, looked + self._every_seconds - time.monotonic()))

    def _look(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """What is newer than what it has; None: nothing that can be used. One listing, if nothing is new."""
        search, found = SearchLog(), None
        for candidate in candidates(self._places, search, after=self._at, refused=self._refused):
            try:
                found = candidate.info.step, self._read(candidate)
            except FormatError as err:
                search.reject(candidate.info.id, err)
                self._bases = {}
                continue
            self._at, self._reason = by_age(candidate.info), candidate.info.reason
            break
        self._gives_up_at = math.inf
        if not search.newest_seq:
            self._places[0].record()  # refuses what is not ours
            raise StorageMissingError(f"no snapshot at {self._urls} yet")
        for one in search.rejected:
            if one.code.startswith(StorageError.code[:-2]):
                if found is None:
                    raise StorageMissingError(f"{one.id}: {one.reason}")
            elif one.id not in self._refused:
                self._say(f"{one.id} is left out: [{one.code}] {one.reason}")
                self._refused[one.id] = CorruptError(one.reason)
        return found

    def _read(self, candidate: Candidate) -> dict[str, torch.Tensor]:
        """The tensors that differ from those it has; afterwards it has these."""
        manifest = candidate.unpacked().manifest.as_rank(0)
        nodes = self._nodes(manifest)
        contents = {name: _content(manifest, node) for name, node in nodes.items()}
        wanted = [name for name in nodes if name not in self._had or contents[name] != self._had[name][0]]
        sources = Sources([place.storage for place in candidate.sources], self._bases)
        with said_if_slow(f"reading {candidate.info.id} from {candidate.sources[0].storage.url}"):
            entries = read_entries(sources, manifest, list(dict.fromkeys(nodes[name]["entry"] for name in wanted)))
        self._keep(manifest, {node["entry"] for node in nodes.values()}, entries)
        rebuilder = Rebuilder(entries, plain=True)
        tensors = {name: rebuilder.node(nodes[name], (name,)).detach() for name in wanted}
        found = {
            name: f"{one.dtype} {tuple(one.shape)} {digest(flat_bytes(one).data)}" for name, one in tensors.items()
        }
        before = self._had
        self._had = {name: (contents[name], found.get(name) or before[name][1]) for name in nodes}
        return {name: one for name, one in tensors.items() if name not in before or found[name] != before[name][1]}

    def _keep(self, manifest: Manifest, names: Set[str], read: Mapping[str, torch.Tensor]) -> None:
        """Keep the bytes of the followed entries where they are stored encoded: the next ones may be differences."""
        pieces = [(name, *placed) for name in names for placed in manifest.entries[name].placed()]
        data = {name: memoryview(flat_bytes(one)) for name, one in read.items()}  # type: ignore[arg-type]
        is_encoded = any(piece.codec != RAW for _, _, piece in pieces)
        self._bases = {
            # A copy: a view would keep the whole entry, for as long as one of its pieces comes back.
            one: self._bases[one]
            if one in self._bases
            else memoryview(bytearray(data[name][start : start + piece.raw_nbytes]))
            for name, start, piece in pieces
            if is_encoded and (one := piece.content_digest) and (name in data or one in self._bases)
        }

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
        rows: Sequence[Attempt] = ()
        for place in self._places:
            with suppress(CkptError):
                rows = rows or read_attempts(place.storage).attempts
        return bool(rows) and rows[-1].end == CLOSED and self._reason != _STOPPED

    def _failed(self, error: CkptError) -> None:
        """Raise what waiting does not mend, and say once what it waits for."""
        if not isinstance(error, StorageError) or isinstance(error, NotAFolderError):
            raise error
        now = time.monotonic()
        if now > self._gives_up_at:
            raise StorageError(
                f"{self._urls} has not answered for {duration(TRY_SECONDS)}: {error.message}",
                hint=error.hint or f"`ckpt doctor {self._urls}` tries it step by step",
            ) from error
        self._fails_since = self._fails_since or now
        if now - self._fails_since >= TELL_SECONDS:
            self._fails_since = math.inf
            self._say(f"[{error.code}] {error.message}; it is tried again every {duration(self._every_seconds)}")

    def _say(self, line: str) -> None:
        announce(LOG, f"following {self._urls}: {line}")


def _content(manifest: Manifest, node: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the content of a tensor from another one, without reading it. Data files never change."""
    entry = manifest.entries[node["entry"]]
    pieces = [piece.content_digest or (manifest.files[piece.file].name, piece.offset) for piece in entry.pieces]
    return entry.dtype, entry.shape, *(repr(node.get(key)) for key in ("view", "stride", "blocks")), *pieces
