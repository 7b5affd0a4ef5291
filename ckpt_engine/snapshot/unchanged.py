"""Knows which tensors seem not to have changed since their bytes came into an arena slot, and how far that is believed.

`_version` alone proves nothing: writes through `.data` and some optimizers do not count there. So what seems unchanged
is compared with the slot instead of copied: before training goes on until that was right often enough, and behind
training from then on. Lazy tensors are copied behind training anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_engine.snapshot.plan import Capture, Plan
from ckpt_engine.store.tree import TreePath

LEAST_BYTES = 1 << 20
"""Smaller tensors are copied: it takes no time."""
PROVEN = 2
"""So often a tensor must have been found unchanged before that is checked behind training."""


@dataclass(frozen=True, slots=True)
class _Tag:
    """What is the same as long as nothing counted has changed a tensor. The weak reference keeps its number unique."""

    storage: StorageWeakRef
    address: int
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tag:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether it is of the same memory, in the same form, however often changed."""
        return (
            tensor.untyped_storage()._cdata == self.storage.cdata
            and tensor.data_ptr() == self.address
            and (tensor.dtype, tensor.shape, tensor.stride()) == (self.dtype, self.shape, self.stride)
        )


@dataclass(slots=True)
class Claim:
    """That the slot already holds the bytes of one entry.

    Args:
        name, path: of the entry.
        version: what torch had counted for the tensor at the instant.
        hinted: checked behind training.
        differs: set by whoever finds that it is wrong; final once the snapshot is staged.
    """

    name: str
    path: TreePath
    version: int
    hinted: bool
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Claims:
    """Of one snapshot, by index of the source. What is not claimed is copied."""

    slot: int = -1
    by_source: dict[int, Claim] = field(default_factory=dict)
    tags: dict[int, _Tag] = field(default_factory=dict)

    @property
    def any_hinted(self) -> bool:
        """Whether something is checked behind training."""
        return any(claim.hinted for claim in self.by_source.values())


@dataclass(slots=True)
class _Held:
    """The tags of what one slot holds, by index of the source."""

    layout: int
    tags: dict[int, _Tag]


class Unchanged:
    """The tags of all slots of one run. `claim`, then `settle` once that snapshot is staged, in turn."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._last: dict[str, _Tag] = {}
        self._found_right: Counter[str] = Counter()
        self._changing: set[str] = set()
        self._layout = -1
        self._large: Sequence[int] = ()

    def claim(self, slot: int, known: Sequence[int], capture: Capture) -> Claims:
        """What `slot` seems to hold already of an instant. Until `settle` it counts as holding nothing.

        Args:
            known: all slots that exist.
        """
        plan = capture.plan
        if plan.layout.id != self._layout:
            self._layout, self._large = plan.layout.id, _large(plan)
        held = self._held.pop(slot, None)
        self._held = {index: one for index, one in self._held.items() if index in known}
        there = held.tags if held is not None and held.layout == self._layout else {}
        claims = Claims(slot)
        for index in self._large:
            name, source = plan.layout.entries[index].name, plan.sources[index]
            tensor = capture.arrays[source.array]
            if source.lazy or name in self._changing or not _is_candidate(tensor):
                continue
            last = self._last.get(name)
            if last is not None and (not last.is_same(tensor) or last.version != tensor._version):
                self._give_up(name)
                continue
            tag = self._last[name] = last or _Tag.of(tensor)
            claims.tags[index] = tag
            if there.get(index) is tag:
                hinted = self._found_right[name] >= PROVEN
                claims.by_source[index] = Claim(name, source.path, tag.version, hinted)
        return claims

    def settle(self, claims: Claims, *, staged: bool) -> None:
        """The snapshot is staged, or that has failed: learn which claims were wrong. Any thread."""
        for claim in claims.by_source.values():
            if claim.differs:
                self._give_up(claim.name)
            elif staged:
                self._found_right[claim.name] += 1
        if staged:
            self._held[claims.slot] = _Held(self._layout, dict(claims.tags))

    def _give_up(self, name: str) -> None:
        """It changes: it is copied from now on."""
        self._changing.add(name)
        self._last.pop(name, None)
        self._found_right.pop(name, None)


def _large(plan: Plan) -> list[int]:
    entries = zip(plan.layout.entries, plan.sources, strict=True)
    return [
        index
        for index, (entry, source) in enumerate(entries)
        if entry.nbytes >= LEAST_BYTES and source.storage_bytes is None
    ]


def _is_candidate(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )
