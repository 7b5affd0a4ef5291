"""Compares each durable snapshot with the one before: whether it has what optimizer steps have changed since.

Only digests are compared, and nothing is read. A group is reported where a step has used it at a learning rate above 0,
and none of its weights, or none of its moments, has changed. Where all moments are zeros no gradient has reached the
group so far. Where step counters on a device have not changed either, a gradient scaler has left out the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt_engine.copy.job import GroupMark, TrainedGroup
from ckpt_engine.observe.events import Event, Notice, StaleSnapshot
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import Manifest

_SHOWN = 3
"""Tensors that an event names."""
_IDLE = 3
"""So many snapshots after another one are at a learning rate of 0 before that is reported: a warm-up may begin so."""


@dataclass(eq=False)
class Freshness:
    """Takes the durable snapshots of one run in their order.

    Args:
        tier: how the place is called in events.
    """

    _tier: str
    _before: tuple[Sequence[TrainedGroup], Sequence[GroupMark], Manifest] | None = field(default=None, init=False)
    _said: set[tuple[str, str]] = field(default_factory=set, init=False)
    _idle: int = field(default=0, init=False)

    def compare(self, groups: Sequence[TrainedGroup], marks: Sequence[GroupMark], new: Manifest) -> Iterator[Event]:
        """What is stale in the next one, of each group once until that changes again; and a run that trains nothing.

        Args:
            groups: that are trained.
            marks: how far each was at the instant.
            new: the manifest, of all ranks.
        """
        before, self._before = self._before, (groups, marks, new)
        if before is None or before[0] != groups:
            return
        old = before[2]
        stepped = any(was.used != one.used for was, one in zip(before[1], marks, strict=True))
        at_rest = {mark.trains for mark in (*before[1], *marks)} == {False}
        self._idle = self._idle + stepped if at_rest else 0
        if stepped and self._idle == _IDLE:
            yield Notice(
                "WARNING",
                f"step {new.info.step:,}: nothing is trained: the learning rate of every group is 0, in {_IDLE + 1} "
                "snapshots in a row, although optimizers step → set a learning rate, if this is no warm-up",
            )
        for group, was, one in zip(groups, before[1], marks, strict=True):
            if not (was.trains and one.trains) or was.used == one.used:
                continue
            every = (*group.weights, *group.moments, *group.counters)
            if group.counters and _are_same(old, new, every):
                continue
            moments = group.moments if was.moved != one.moved else ()
            for what, names in (("weights", group.weights), ("moments", moments)):
                if not _are_same(old, new, names):
                    self._said.discard((group.name, what))
                elif (group.name, what) not in self._said and not _are_zeros(new, group.moments):
                    self._said.add((group.name, what))
                    yield StaleSnapshot(
                        new.info.id,
                        new.info.step,
                        old.info.id,
                        old.info.step,
                        self._tier,
                        group.name,
                        what,
                        names[:_SHOWN],
                        len(names),
                    )


def _are_same(before: Manifest, now: Manifest, names: Sequence[str]) -> bool:
    """Whether all entries have the bytes that they had; False where there are none, or that is not known."""
    digests = ((_digests(before, name), _digests(now, name)) for name in names)
    return bool(names) and all(old == new and None not in new for old, new in digests)


def _digests(manifest: Manifest, name: str) -> Sequence[str | None]:
    """Of the pieces of an entry, decoded; not known where the snapshot is a node's part, which lacks the entry."""
    return [piece.content_digest for piece in manifest.entries[name].pieces] if name in manifest.entries else [None]


def _are_zeros(manifest: Manifest, names: Sequence[str]) -> bool:
    """Whether all entries have nothing but zeros."""
    pieces = [piece for name in names if name in manifest.entries for piece in manifest.entries[name].pieces]
    return bool(pieces) and all(piece.content_digest == digest(bytes(piece.raw_nbytes)) for piece in pieces)
