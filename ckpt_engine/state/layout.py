"""Plans where every array of a state goes in the container, and keeps the plan while the structure stays the same.
Where a component has very many small arrays these are packed, and described in a schema (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch

from ckpt_engine.copy.job import EntryLayout, Layout
from ckpt_engine.errors import StateError
from ckpt_engine.ranks.session import Session
from ckpt_engine.state import entries as drafting
from ckpt_engine.state.entries import WITHOUT_COPY, EntrySource, PackMembers
from ckpt_engine.state.flatten import ArrayLeaf, Flattener, Forms, LazyPredicate, Scan, bytes_tensor, first_of
from ckpt_engine.store.container import DTYPES, container_form, data_header
from ckpt_engine.store.manifest import PACKED
from ckpt_engine.store.manifest_codec import uncollected
from ckpt_engine.store.tree import Pack, Schema, encode_schema

ROOT_KEY = ""
"""Component name of a state that is not a plain dict with string keys."""
SMALL_BYTES = 64 << 10
"""Larger arrays are entries of their own: what describes them is little beside their bytes."""
_VIEWED_BYTES = 8 << 10
_ALONE = 32 << 10
"""Elements that torch copies without its thread team."""
_RUN_BYTES = 16 << 20
_RUN_ARRAYS = 16 << 10
LEAST_ARRAYS = 4096
"""Components with fewer small arrays have an entry for each, which any reader of safetensors finds by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class AddressRun:
    """Small arrays in host memory whose bytes lie one behind another in the container: copied by their addresses.

    Args:
        offset: of the first one.
        arrays: index among those of a snapshot, of each.
        nbytes: of each.
        forms: dtype and shape of each, where views to copy them into are worth their making.
    """

    offset: int
    arrays: np.ndarray[Any, np.dtype[np.int64]]
    nbytes: np.ndarray[Any, np.dtype[np.uint64]]
    forms: Sequence[tuple[torch.dtype, torch.Size]] = ()


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The container layout of one structure. `sources[i]` fills `layout.entries[i]`.

    Args:
        trees: the skeletons by component; one that is as in the plan before is the same object.
        devices: GPUs that some of the sources are on.
        aboard: indices of those sources.
        runs: what is copied together.
        apart: indices of the other sources that are in no run.
        schemas: arrays beside those of the state: what packed components look like.
        drafts: all entries, those of other ranks too.
    """

    layout: Layout
    header: bytes
    trees: Mapping[str, Any]
    sources: tuple[EntrySource, ...]
    nbytes: int
    devices: tuple[torch.device, ...]
    aboard: tuple[int, ...] = ()
    runs: tuple[AddressRun, ...] = ()
    apart: tuple[int, ...] = ()
    schemas: tuple[torch.Tensor, ...] = ()
    drafts: tuple[EntrySource, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturedState:
    """One instant of state, flattened against a plan: live arrays, and the values of all other leaves by component.

    The arrays end in the schemas of the plan.

    Args:
        addresses: of the arrays of the state.
    """

    plan: StatePlan
    arrays: list[torch.Tensor]
    values: Mapping[str, list[Any]]
    addresses: list[int]


def components_of(state: Any) -> dict[str, Any]:
    """The state's top-level keys, or the whole state under `ROOT_KEY`."""
    if type(state) is dict and state and set(map(type, state)) <= {str} and ROOT_KEY not in state:
        return state
    return {ROOT_KEY: state}


@dataclass(eq=False)
class Planner:
    """Captures states of one run, planning again only when something about their structure changed.

    With a session of several ranks it plans the share of this rank.

    Not thread safe: used on the training thread only.
    """

    _flattener: Flattener
    _session: Session | None = None
    _known: _Known | None = None

    def capture(self, state: Any, lazy: LazyPredicate | None = None) -> CapturedState:
        """Flatten `state`; `lazy` is asked only when planning.

        Raises:
            UnstorableLeafError, StateError: the state cannot be stored; names the leaf.
        """
        components = components_of(state)
        if self._session is not None:
            components = self._session.arranged(components)
        scans = {key: self._flattener.scan(node, (key,) if key else ()) for key, node in components.items()}
        arrays = list(chain.from_iterable(scan.arrays for scan in scans.values()))
        known = self._known
        addresses = None if known is None else known.fit(scans, arrays, lazy)
        if known is None or addresses is None:
            with uncollected():
                known = self._known = self._replan(components, scans, arrays, lazy)
            addresses = [array.data_ptr() for array in arrays]
        values = {key: scan.values for key, scan in scans.items()}
        arrays += known.plan.schemas
        return CapturedState(known.plan, arrays, values, addresses)

    def _replan(
        self,
        components: Mapping[str, Any],
        scans: Mapping[str, Scan],
        arrays: list[torch.Tensor],
        lazy: LazyPredicate | None,
    ) -> _Known:
        trees: dict[str, Any] = {}
        counts: dict[str, int] = {}
        leaves: list[ArrayLeaf] = []
        copied: set[int] = set()
        for key, node in components.items():
            skeleton = self._flattener.describe(node, (key,) if key else ())
            if len(skeleton.leaves) != len(scans[key].arrays):
                raise StateError(f"the state changed while it was being captured (component {key!r})")
            trees[key], counts[key] = skeleton.tree, len(skeleton.leaves)
            copied.update(len(leaves) + i for i in scans[key].copied)
            leaves.extend(skeleton.leaves)
        names = drafting.Names()
        clusters = drafting.clusters_of(leaves, arrays)
        # What several ranks have alike is divided among them array by array.
        packed = _pack(counts if self._session is None else {}, clusters, leaves, arrays, lazy, names)
        others = [cluster for cluster in clusters if cluster[0] not in packed.packed]
        drafts = [*packed.drafts, *(drafting.draft_of(one, leaves, arrays, lazy, names) for one in others)]
        schemas = packed.close(trees, {key: len(scan.values) for key, scan in scans.items()}, names)
        drafts += [_own_draft(name, data, len(arrays) + n) for n, (name, data) in enumerate(schemas.items())]
        drafting.require_all(drafts, self._session.ranks if self._session is not None else None)
        layout, header, sources = self._lay_out(drafts)
        old, before = (self._known.plan.trees, self._known.signatures) if self._known else ({}, {})
        # Equal dicts may differ in their order, signatures do not.
        same = {key for key, tree in trees.items() if before.get(key) == scans[key].signature and old[key] == tree}
        trees = {key: old[key] if key in same else tree for key, tree in trees.items()}
        nbytes = sum(e.nbytes for e in layout.entries)
        gpus = tuple(dict.fromkeys(d.device for d in drafts if d.device.type == "cuda"))
        every = [*arrays, *schemas.values()]
        aboard = tuple(i for i, one in enumerate(sources) if drafting.device_of(every[one.array]).type == "cuda")
        runs, apart = _runs(layout, sources, arrays)
        apart = tuple(sorted(set(apart).difference(aboard)))
        extra = tuple(schemas.values())
        plan = StatePlan(layout, header, trees, sources, nbytes, gpus, aboard, runs, apart, extra, tuple(drafts))
        views = any(d.storage_bytes is not None for d in drafts)
        addresses = _told([a.data_ptr() for a in arrays], copied)
        shared = first_of(addresses)
        devices = [drafting.device_of(a) for a in arrays]
        signatures = {k: s.signature for k, s in scans.items()}
        return _Known(plan, signatures, Forms(arrays), addresses, copied, lazy, shared, views, devices)

    def _lay_out(self, drafts: Sequence[EntrySource]) -> tuple[Layout, bytes, tuple[EntrySource, ...]]:
        # Largest item size first: every entry is then naturally aligned without holes, which safetensors forbids.
        ordered = sorted(drafts, key=lambda d: -d.dtype.itemsize)
        structure = ""
        if self._session is not None:
            structure = drafting.structure_of(ordered)
            ordered = drafting.mine(ordered, self._session.ranks)
        # Then what can cross from a device in one piece: the same device, and as early or late. Other ranks have
        # other devices, so that this comes after the drafting. Small ones are copied together.
        crossing = {id(d): ("", False) if d.device.type == "cpu" else (str(d.device), d.lazy) for d in ordered}
        ordered.sort(key=lambda d: (-d.dtype.itemsize, *crossing[id(d)], d.lazy, d.nbytes >= SMALL_BYTES))
        forms = [container_form(drafting.dtype_name(d.dtype), d.shape, d.nbytes) for d in ordered]
        try:
            header = data_header([(d.name, *form, d.nbytes) for d, form in zip(ordered, forms, strict=True)])
        except ValueError as err:
            raise StateError(
                f"a state of {len(forms):,} arrays cannot be saved: {err}",
                hint="one file has all of them, about 700,000 at most: join small tensors into larger ones (torch.cat)",
            ) from err
        offset, entries = len(header), []
        for draft, (code, _) in zip(ordered, forms, strict=True):
            form = (tuple(draft.shape), code, offset, draft.nbytes)
            name = drafting.dtype_name(draft.dtype)
            entries.append(EntryLayout(draft.name, name, *form, draft.whole, draft.start_bytes))
            offset += draft.nbytes
        sources = tuple(ordered)
        layout = Layout(len(header), offset, tuple(entries), structure)
        known = self._known.plan.layout if self._known else layout
        return known if known == layout else layout, header, sources


@dataclass(frozen=True, slots=True)
class _Known:
    """What the current plan was made for.

    Args:
        forms: of the arrays.
        addresses: of every array; 0 of private copies.
        copied: indices of private copies.
        shared: which arrays have the same address, see `first_of`.
        views: some arrays overlap without having the same address.
        devices: of every array.
    """

    plan: StatePlan
    signatures: Mapping[str, list[Any]]
    forms: Forms
    addresses: list[int]
    copied: set[int]
    lazy: LazyPredicate | None
    shared: list[int]
    views: bool
    devices: list[torch.device]

    def fit(
        self, scans: Mapping[str, Scan], arrays: Sequence[torch.Tensor], lazy: LazyPredicate | None
    ) -> list[int] | None:
        """The addresses of the arrays, which only matter where some share memory; None: the plan serves others."""
        if lazy != self.lazy or list(scans) != list(self.signatures):
            return None
        if any(scan.signature != self.signatures[key] for key, scan in scans.items()):
            return None
        addresses = self.forms.addresses(arrays)
        if addresses is None:
            return None
        # A private copy has a new address every time, which means nothing.
        told = _told(addresses, self.copied) if self.copied else addresses
        if told == self.addresses:
            return addresses
        if any(drafting.device_of(array) != device for array, device in zip(arrays, self.devices, strict=True)):
            return None
        # Gradients, metrics and logged values are new objects at every step: what matters is who shares with whom.
        return addresses if not self.views and first_of(told) == self.shared else None


def _runs(
    layout: Layout, sources: Sequence[EntrySource], arrays: Sequence[torch.Tensor]
) -> tuple[tuple[AddressRun, ...], tuple[int, ...]]:
    """The runs of a plan, and the sources that are in none."""
    runs, apart = list[AddressRun](), list[int]()
    sizes = [entry.nbytes for entry in layout.entries]
    kinds = [_has_address(source, nbytes, arrays) for source, nbytes in zip(sources, sizes, strict=True)]
    for has_address, group in groupby(range(len(sources)), kinds.__getitem__):
        indices = list(group)
        if not has_address:
            apart += indices
            continue
        parts = [
            sources[i].members or PackMembers(np.array([sources[i].array]), np.array([sizes[i]], np.uint64))
            for i in indices
        ]
        members = np.concatenate([part.arrays for part in parts])
        nbytes = np.concatenate([part.nbytes for part in parts])
        ends = np.cumsum(nbytes)
        at, start = 0, 0
        while at < len(members):
            # Of so many bytes that all threads have some, and so few arrays that none has most.
            stop = max(at + 1, int(np.searchsorted(ends, start + _RUN_BYTES, "right")))
            stop = min(stop, at + _RUN_ARRAYS, len(members))
            offset, run = layout.entries[indices[0]].offset + start, members[at:stop]
            forms = _forms([arrays[index] for index in run], int(nbytes[at:stop].mean()))
            runs.append(AddressRun(offset, run, nbytes[at:stop], forms))
            at, start = stop, int(ends[stop - 1])
    return tuple(runs), tuple(apart)


def _forms(arrays: Sequence[torch.Tensor], mean_bytes: int) -> Sequence[tuple[torch.dtype, torch.Size]]:
    """As `AddressRun.forms`. Copying small ones through the kernel takes less than a view of each."""
    alone = mean_bytes >= _VIEWED_BYTES and all(a.numel() <= _ALONE and a.dtype not in WITHOUT_COPY for a in arrays)
    return [(array.dtype, array.shape) for array in arrays] if alone else ()


def _has_address(source: EntrySource, nbytes: int, arrays: Sequence[torch.Tensor]) -> bool:
    """Whether the addresses of its arrays say all that copying them takes, as long as the plan fits."""
    if source.array >= len(arrays) or drafting.device_of(array := arrays[source.array]).type != "cpu":
        return False  # a schema, or on a device
    is_whole = source.storage_bytes is None and source.rows is None and nbytes < SMALL_BYTES
    plain = array.is_contiguous() and not array.is_complex() and not array.is_neg()
    return source.members is not None or (is_whole and plain)


def _own_draft(name: str, data: torch.Tensor, index: int) -> EntrySource:
    """Of an array that is none of the state's."""
    leaf = ArrayLeaf((name,), {})
    return EntrySource(name, data.dtype, tuple(data.shape), data.nbytes, index, None, False, [leaf], data.device)


def _told(addresses: list[int], copied: set[int]) -> list[int]:
    """What addresses say: those of private copies say nothing."""
    return [0 if i in copied else address for i, address in enumerate(addresses)]


@dataclass(frozen=True, slots=True)
class _Packing:
    """What is packed of one state.

    Args:
        packed: indices of the arrays that are in packs.
        drafts: of the packs.
        components: with packs, by key: the packs, the numbers of the nodes of packed arrays by `id`, the other leaves.
    """

    packed: set[int] = field(default_factory=set)
    drafts: list[EntrySource] = field(default_factory=list)
    components: dict[str, tuple[tuple[Pack, ...], dict[int, int], list[ArrayLeaf]]] = field(default_factory=dict)

    def close(self, trees: dict[str, Any], values: Mapping[str, int], names: drafting.Names) -> dict[str, torch.Tensor]:
        """Put the nodes of packed components in the place of their trees, once all entries have names.

        Args:
            values: how many values each component has.

        Returns:
            The bytes of the schemas, by entry.
        """
        found = {}
        for key, (packs, numbers, leaves) in self.components.items():
            name = names.unique((key, "schema"))
            found[name] = bytes_tensor(encode_schema(Schema(_numbered(trees[key], numbers), packs)))
            others = dict.fromkeys(leaf.node["entry"] for leaf in leaves)
            trees[key] = {
                "$": PACKED,
                "entry": name,
                "entries": [*(pack.entry for pack in packs), *others],
                "values": [{"$": "v", "i": number} for number in range(values[key])],
            }
        return found


def _pack(
    counts: Mapping[str, int],
    clusters: Sequence[Sequence[int]],
    leaves: Sequence[ArrayLeaf],
    arrays: Sequence[torch.Tensor],
    lazy: LazyPredicate | None,
    names: drafting.Names,
) -> _Packing:
    """Find the components with very many small arrays, and pack those.

    Args:
        counts: how many of the leaves are in each component, in their order.
        clusters: see `entries.clusters_of`.
    """
    found = _Packing()
    start = 0
    alone = {cluster[0] for cluster in clusters if len(cluster) == 1}
    for key, count in counts.items():
        indices = range(start, start + count)
        start += count
        if count < LEAST_ARRAYS:
            continue
        small = [index for index in indices if index in alone and _is_packable(leaves[index], arrays[index])]
        if len(small) < LEAST_ARRAYS:
            continue
        groups = _groups(small, leaves, arrays, lazy)
        found.packed.update(small)
        made = [_packed(key, members, leaves, arrays, lazy, names) for members in groups]
        found.drafts.extend(draft for draft, _ in made)
        numbers = {id(leaves[index].node): number for number, index in enumerate(chain.from_iterable(groups))}
        others = [leaves[index] for index in indices if index not in found.packed]
        found.components[key] = tuple(pack for _, pack in made), numbers, others
    return found


def _is_packable(leaf: ArrayLeaf, array: torch.Tensor) -> bool:
    return (
        leaf.shard is None
        and leaf.node["$"] == "tensor"
        and 0 < array.numel() * array.element_size() < SMALL_BYTES
        and array.is_contiguous()
        and not array.is_complex()
        and not array.is_neg()
        and drafting.dtype_name(array.dtype) in DTYPES
        # Keys of some mappings are leaves as well.
        and not any(type(part) is str and part.startswith("key ") for part in leaf.path)
    )


def _groups(
    small: Sequence[int], leaves: Sequence[ArrayLeaf], arrays: Sequence[torch.Tensor], lazy: LazyPredicate | None
) -> list[list[int]]:
    """What can lie in one entry: of one dtype and device, copied at one time, with nodes that say the same."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for index in small:
        leaf, array = leaves[index], arrays[index]
        node = repr(leaf.node) if len(leaf.node) > 1 else ""
        key = (array.dtype, drafting.device_of(array), node, _is_lazy(leaf, array, lazy))
        found.setdefault(key, []).append(index)
    return list(found.values())


def _is_lazy(leaf: ArrayLeaf, array: torch.Tensor, lazy: LazyPredicate | None) -> bool:
    return lazy is not None and drafting.device_of(array).type == drafting.LAZY_ON and lazy(leaf.path)


def _packed(
    key: str,
    members: Sequence[int],
    leaves: Sequence[ArrayLeaf],
    arrays: Sequence[torch.Tensor],
    lazy: LazyPredicate | None,
    names: drafting.Names,
) -> tuple[EntrySource, Pack]:
    first, leaf = arrays[members[0]], leaves[members[0]]
    shapes: dict[torch.Size, int] = {}
    numbers = [shapes.setdefault(arrays[index].shape, len(shapes)) for index in members]
    dtype = drafting.dtype_name(first.dtype)
    node = {what: value for what, value in leaf.node.items() if what != "$"}
    counts = [shape.numel() for shape in shapes]
    sizes = np.array(counts, np.uint64)[numbers] * np.uint64(first.element_size())
    total = int(sizes.sum()) // first.element_size()
    name = names.unique((key, f"packed {dtype}"))
    draft = EntrySource(
        name,
        first.dtype,
        (total,),
        total * first.element_size(),
        members[0],
        None,
        _is_lazy(leaf, first, lazy),
        [leaf],
        drafting.device_of(first),
        members=PackMembers(np.array(members), sizes),
    )
    return draft, Pack(name, dtype, node, [tuple(shape) for shape in shapes], numbers)


def _numbered(node: Any, numbers: Mapping[int, int]) -> Any:
    """The tree with numbers in the place of the nodes that have one."""
    if isinstance(node, dict):
        number = numbers.get(id(node))
        return number if number is not None else {key: _numbered(child, numbers) for key, child in node.items()}
    return [_numbered(child, numbers) for child in node] if isinstance(node, list) else node
