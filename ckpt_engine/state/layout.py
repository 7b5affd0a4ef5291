"""Plan where every array of a state goes in the container, and keep the plan while the structure stays the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.copy.job import EntryLayout, Layout
from ckpt_engine.errors import StateError
from ckpt_engine.ranks.session import Session
from ckpt_engine.state import entries as drafting
from ckpt_engine.state import entries as shares
from ckpt_engine.state.entries import EntryDraft
from ckpt_engine.state.flatten import ArrayLeaf, Flattener, LazyPredicate, Scan
from ckpt_engine.store.container import container_form, data_header
from ckpt_engine.store.tree import TreePath

ROOT_KEY = ""
"""Component name of a state that is not a plain dict with string keys."""

WITHOUT_COPY = frozenset(
    getattr(torch, f"{sign}{bits}") for sign in ("int", "uint") for bits in range(1, 8) if hasattr(torch, f"int{bits}")
)
"""Dtypes torch has no copy kernel for; they are copied as bytes."""


@dataclass(frozen=True, slots=True)
class EntrySource:
    """Where the bytes of one entry come from.

    Args:
        array: index into the arrays of a snapshot, in scan order.
        storage_bytes: None for the array itself; (start, nbytes) of its storage when several views overlap in it.
        lazy: may be copied until the next fence.
        path: of the first leaf that uses the entry.
        rows: (dimension, first, count) of the rows that this rank writes; None: all.
    """

    array: int
    storage_bytes: tuple[int, int] | None
    lazy: bool
    path: TreePath
    rows: tuple[int, int, int] | None = None

    def tensor(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """The live tensor to copy."""
        found = arrays[self.array]
        if self.storage_bytes is None:
            if self.rows is not None:
                found = found.detach().narrow(*self.rows)
            return found.view(torch.uint8) if found.dtype in WITHOUT_COPY else found
        start, nbytes = self.storage_bytes
        if self.rows is not None:
            _, first, nbytes = self.rows
            start += first
        return torch.empty(0, dtype=torch.uint8, device=found.device).set_(
            found.untyped_storage(), start, (nbytes,), (1,)
        )


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The container layout of one structure. `sources[i]` fills `layout.entries[i]`.

    Args:
        trees: the skeletons by component; one that is as in the plan before is the same object.
        devices: GPUs that some of the sources are on.
    """

    layout: Layout
    header: bytes
    trees: Mapping[str, Any]
    sources: tuple[EntrySource, ...]
    nbytes: int
    devices: tuple[torch.device, ...]


@dataclass(frozen=True, slots=True)
class CapturedState:
    """One instant of state, flattened against a plan: live arrays, and the values of all other leaves by component."""

    plan: StatePlan
    arrays: list[torch.Tensor]
    values: Mapping[str, list[Any]]


def components_of(state: Any) -> dict[str, Any]:
    """The state's top-level keys, or the whole state under `ROOT_KEY`."""
    if type(state) is dict and state and set(map(type, state)) <= {str} and ROOT_KEY not in state:
        return state
    return {ROOT_KEY: state}


class Planner:
    """Captures states of one run, planning again only when something about their structure changed.

    With a `session` of several ranks it plans the share of this rank.

    Not thread safe: used on the training thread only.
    """

    def __init__(self, flattener: Flattener, session: Session | None = None) -> None:
        self._flattener = flattener
        self._session = session
        self._known: _Known | None = None

    def capture(self, state: Any, lazy: LazyPredicate | None = None) -> CapturedState:
        """Flatten `state`; `lazy` is asked only when planning.

        Raises:
            UnstorableLeafError, StateError: the state cannot be stored; names the leaf.
        """
        components = components_of(state)
        if self._session is not None:
            components = self._session.arranged(components)
        scans = {key: self._flattener.scan(node, (key,) if key else ()) for key, node in components.items()}
        arrays = [array for scan in scans.values() for array in scan.arrays]
        known = self._known
        if known is None or not known.fits(scans, arrays, lazy):
            known = self._known = self._replan(components, scans, arrays, lazy)
        return CapturedState(known.plan, arrays, {key: scan.values for key, scan in scans.items()})

    def _replan(
        self,
        components: Mapping[str, Any],
        scans: Mapping[str, Scan],
        arrays: list[torch.Tensor],
        lazy: LazyPredicate | None,
    ) -> _Known:
        trees: dict[str, Any] = {}
        leaves: list[ArrayLeaf] = []
        copied: set[int] = set()
        for key, node in components.items():
            skeleton = self._flattener.describe(node, (key,) if key else ())
            if len(skeleton.leaves) != len(scans[key].arrays):
                raise StateError(f"the state changed while it was being captured (component {key!r})")
            trees[key] = skeleton.tree
            copied.update(len(leaves) + i for i in scans[key].copied)
            leaves.extend(skeleton.leaves)
        drafts = drafting.drafts_of(leaves, arrays, lazy)
        shares.require_all(drafts, self._session.ranks if self._session is not None else None)
        layout, header, sources = self._lay_out(drafts)
        old = self._known.plan.trees if self._known else {}
        trees = {key: old[key] if key in old and old[key] == tree else tree for key, tree in trees.items()}
        nbytes = sum(e.nbytes for e in layout.entries)
        gpus = tuple(dict.fromkeys(d.device for d in drafts if d.device.type == "cuda"))
        plan = StatePlan(layout, header, trees, sources, nbytes, gpus)
        views = any(d.storage_bytes is not None for d in drafts)
        # A private copy has a new address every time, which means nothing.
        metas = [
            (0 if i in copied else a.data_ptr(), a.dtype, a.shape, a.stride(), a.requires_grad)
            for i, a in enumerate(arrays)
        ]
        shared = _shared([meta[0] for meta in metas])
        devices = [drafting.device_of(a) for a in arrays]
        return _Known(plan, {k: s.signature for k, s in scans.items()}, metas, lazy, shared, views, devices)

    def _lay_out(self, drafts: Sequence[EntryDraft]) -> tuple[Layout, bytes, tuple[EntrySource, ...]]:
        # Largest item size first: every entry is then naturally aligned without holes, which safetensors forbids.
        ordered = sorted(drafts, key=lambda d: -d.dtype.itemsize)
        structure = ""
        if self._session is not None:
            structure = shares.structure_of(ordered)
            ordered = shares.mine(ordered, self._session.ranks)
        # Then what can cross from a device in one piece: the same device, and as early or late. Other ranks have
        # other devices, so that this comes after the shares.
        ordered.sort(key=lambda d: (-d.dtype.itemsize, *_crossing(d)))
        rows = []
        for draft in ordered:
            name = drafting.dtype_name(draft.dtype)
            code, shape = container_form(name, draft.shape, draft.nbytes)
            rows.append((draft.name, name, code, shape, draft.nbytes))
        try:
            header = data_header([(n, code, shape, nbytes) for n, _, code, shape, nbytes in rows])
        except ValueError as err:
            raise StateError(
                f"a state of {len(rows):,} arrays cannot be saved: {err}",
                hint="one file has all of them, about 700,000 at most: join small tensors into larger ones (torch.cat)",
            ) from err
        offset, entries = len(header), []
        for draft, (name, dtype, code, _, nbytes) in zip(ordered, rows, strict=True):
            form = (tuple(draft.shape), code, offset, nbytes)
            entries.append(EntryLayout(name, dtype, *form, draft.whole, draft.start_bytes))
            offset += nbytes
        sources = tuple(EntrySource(d.array, d.storage_bytes, d.lazy, d.leaves[0].path, d.rows) for d in ordered)
        known = self._known.plan.layout if self._known else None
        is_known = known and known.entries == tuple(entries) and known.header_nbytes == len(header)
        if known and is_known and known.structure == structure:
            return known, header, sources
        return Layout(len(header), offset, tuple(entries), structure), header, sources


@dataclass(frozen=True, slots=True)
class _Known:
    """What the current plan was made for.

    Args:
        metas: (address or 0, dtype, shape, stride, requires_grad) of every array.
        shared: which arrays have the same address, see `_shared`.
        views: some arrays overlap without having the same address.
        devices: of every array.
    """

    plan: StatePlan
    signatures: Mapping[str, list[Any]]
    metas: list[tuple[Any, ...]]
    lazy: LazyPredicate | None
    shared: list[int]
    views: bool
    devices: list[torch.device]

    def fits(self, scans: Mapping[str, Scan], arrays: Sequence[torch.Tensor], lazy: LazyPredicate | None) -> bool:
        """Whether the plan serves this snapshot too; addresses only matter where tensors share memory."""
        if lazy is not self.lazy or list(scans) != list(self.signatures):
            return False
        if any(scan.signature != self.signatures[key] for key, scan in scans.items()):
            return False
        if len(arrays) != len(self.metas):
            return False
        moved = False
        # One by one: a list of 10,000 fresh tuples would set off the garbage collector at every snapshot.
        for array, (address, dtype, shape, stride, requires_grad) in zip(arrays, self.metas, strict=True):
            if (
                array.dtype is not dtype
                or array.shape != shape
                or array.layout is not torch.strided
                or array.stride() != stride
                or array.requires_grad is not requires_grad
            ):
                return False
            if address and array.data_ptr() != address:
                moved = True
        if not moved:
            return True
        if any(drafting.device_of(array) != device for array, device in zip(arrays, self.devices, strict=True)):
            return False
        # Gradients, metrics and logged values are new objects at every step: what matters is who shares with whom.
        addresses = [a.data_ptr() if meta[0] else 0 for a, meta in zip(arrays, self.metas, strict=True)]
        return not self.views and _shared(addresses) == self.shared


def _shared(addresses: Sequence[int]) -> list[int]:
    """For every array the index of the first one at its address; its own index if it has none."""
    first: dict[int, int] = {}
    return [first.setdefault(address, i) if address else i for i, address in enumerate(addresses)]


def _crossing(draft: EntryDraft) -> tuple[str, bool]:
    return ("", False) if draft.device.type == "cpu" else (str(draft.device), draft.lazy)
