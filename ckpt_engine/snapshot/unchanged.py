"""Knows which host tensors seem not to have changed since their bytes came into an arena slot.

`_version` alone proves nothing: writes through `.data` and some optimizers do not count there. So what seems unchanged
is compared with the slot instead of copied, before training continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_engine.copy.job import Layout
from ckpt_engine.snapshot.copying import Claim, is_movable
from ckpt_engine.state.layout import CapturedState, StatePlan

LEAST_BYTES = 1 << 20
"""Smaller tensors are copied: it takes no time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tag:
    """What is the same as long as nothing counted has changed a tensor. The weak reference keeps its number unique."""

    storage: StorageWeakRef
    form: tuple[Any, ...]
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tag:
        storage = tensor.untyped_storage()
        form = (storage._cdata, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return cls(StorageWeakRef(storage), form, tensor._version)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Claims:
    """Of one snapshot, by index of the source. What is not claimed is copied."""

    slot: int = -1
    by_source: dict[int, Claim] = field(default_factory=dict)
    tags: dict[int, _Tag] = field(default_factory=dict)


@dataclass(eq=False)
class Unchanged:
    """The tags of all slots of one run. `claim`, then `settle` once that snapshot is staged, in turn."""

    _held: dict[int, Mapping[int, _Tag]] = field(default_factory=dict, init=False)
    """By slot the tags of what it holds in the current layout, by index of the source."""
    _last: dict[str, _Tag] = field(default_factory=dict, init=False)
    _changing: set[str] = field(default_factory=set, init=False)
    _layout: Layout | None = field(default=None, init=False)
    _large: Sequence[int] = field(default=(), init=False)

    def claim(self, slot: int, known: Sequence[int], capture: CapturedState) -> Claims:
        """What `slot` seems to hold already of an instant. Until `settle` it counts as holding nothing.

        Args:
            known: all slots that exist.
        """
        plan = capture.plan
        if plan.layout is not self._layout:
            self._layout, self._large = plan.layout, _large(plan)
            self._held.clear()
        there = self._held.pop(slot, {})
        self._held = {index: one for index, one in self._held.items() if index in known}
        claims = Claims(slot)
        for index in self._large:
            name, source = plan.layout.entries[index].name, plan.sources[index]
            tensor = capture.arrays[source.array]
            if name in self._changing or not is_movable(tensor) or tensor.requires_grad or tensor.is_inference():
                continue
            last, now = self._last.get(name), _Tag.of(tensor)
            if last is not None and (last.form, last.version) != (now.form, now.version):
                self._give_up(name)
                continue
            tag = self._last[name] = last or now
            claims.tags[index] = tag
            if there.get(index) is tag:
                claims.by_source[index] = Claim(name)
        return claims

    def settle(self, claims: Claims, *, staged: bool) -> None:
        """The snapshot is staged, or that has failed: learn which claims were wrong. Any thread."""
        for claim in claims.by_source.values():
            if claim.differs:
                self._give_up(claim.name)
        if staged:
            self._held[claims.slot] = claims.tags

    def _give_up(self, name: str) -> None:
        """It changes: it is copied from now on."""
        self._changing.add(name)
        self._last.pop(name, None)


def _large(plan: StatePlan) -> list[int]:
    entries = zip(plan.layout.entries, plan.sources, strict=True)
    return [
        index
        for index, (entry, source) in enumerate(entries)
        if entry.nbytes >= LEAST_BYTES and source.storage_bytes is None and source.members is None
    ]
