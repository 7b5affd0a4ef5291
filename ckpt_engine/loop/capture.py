"""The state of a run at one instant, as the tree that the engine stores.

`Capture` makes the tree. `Packer` puts what changes its structure from step to step (positions, metrics, logged
values) into one array of constant shape, because the engine reuses the plan of a snapshot while the structure stays
the same.

A snapshot of several ranks has the values of rank 0. `own_values` finds what this rank has otherwise (a metric,
averaged weights with batch norm statistics, a callback's counter), and `merged` puts it back. What is large is left
out: a digest shows at the resume whether it was different. `Elastic` is what another number of ranks goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_engine.audit.audit import Audit
from ckpt_engine.audit.values import PLAIN, address, digest, freeze
from ckpt_engine.copy.job import KeySkeleton
from ckpt_engine.data import rng, sample_assignment
from ckpt_engine.data.position import LoaderPosition
from ckpt_engine.data.rng import RngState, Teams, derive, repeat
from ckpt_engine.data.sample_assignment import Dealing
from ckpt_engine.errors import CorruptError, NewerFormatError, ResumeError
from ckpt_engine.loop.components import Components, made_by_script, managed, state_of
from ckpt_engine.loop.distributed_models import GradientOrder, is_flat
from ckpt_engine.loop.failing_loop import require_loadable
from ckpt_engine.observe.resume_report import NotRestored, resumed_by_others
from ckpt_engine.probe.replica_words import tables_of
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.load import Live, Loaded
from ckpt_engine.state.flatten import Flattener, problems
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.state.layout import ROOT_KEY, components_of
from ckpt_engine.state.module_names import canonical
from ckpt_engine.state.optimizers import StoredOrder
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.state.sharding import FlatPart, here, is_sharded, optimizer_shell
from ckpt_engine.store.manifest import OWN_KEY, Manifest
from ckpt_engine.store.replicas import REPLICAS, differing
from ckpt_engine.store.tree import check

OWN_VERSION = 1
_SMALLEST_BYTES = 16 << 10
_DEEPEST = 64
_NUMBERS = ("param_groups", "params")
"""Where an optimizer's state has the numbers of its parameters."""
MOST_BYTES = 16 << 20
"""Of all tensors that a rank keeps for itself."""
LARGE_BYTES = 1 << 18
"""A tensor that is larger is not kept."""
_COMMON = "ckpt_engine: as on rank 0"
"""Stands for a value that is left out: alone, before its digest, or in a dict as the key of those digests."""
_ABSENT: Any = object()
_DENSE = (torch.Tensor, torch.nn.Parameter)
_NOT_ALIKE = "it differed over the ranks, as within local SGD, and each rank wrote a part of it: this is a mixture"
DERIVE = "derive"
STRICT = "strict"


class Capture:
    """Makes the state tree of one run; also the predicate that says which of its leaves may be copied lazily.

    Args:
        parts: the components.
        audit: what it finds is part of the state.
        ranks: this one is one of them.
        wrappers: finds the models as DDP wraps them.

    Attributes:
        parts, audit: these.
        made: `components.made_by_script` of the components.
    """

    def __init__(
        self, parts: Components, audit: Audit, ranks: Ranks | None, wrappers: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self.parts = parts
        self.audit = audit
        self._wrappers = wrappers
        self._ranks = ranks
        self.made = made_by_script(parts.optimizers, parts.objects)
        require_loadable(parts.modules)
        if isinstance(ranks, ProcessGroupRanks):
            ranks.divide(alike(parts))
        self._packer = Packer(OWN_KEY)
        self._parameters = StoredOrder(parts)
        self._weights: Mapping[str, Any] = {}
        self._managed: frozenset[int] | None = None

    def state(
        self,
        own: Mapping[str, Any],
        gradients: Mapping[str, Any],
        before: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The whole state, with references to live tensors; draws nothing from any global random stream.

        Args:
            own: small values that an exact resume needs besides the components; with `before`, what a step changes too.
            gradients: those that wait for an optimizer step.
            before: makes of the components those of an earlier moment.
        """
        hidden, large = self.audit.for_snapshot()
        streams = rng.capture()
        state = self.parts.state()
        if rng.capture() != streams:
            rng.restore(streams)  # a state_dict of the user may draw; the run must not notice that it is captured
        if before is not None:
            state = before(state)
        self._weights = {key: one for key, one in state.items() if self.parts.owner((key, "")) is not None}
        self._managed = None
        values, tables = own_values(state, self._ranks)
        return state | {
            OWN_KEY: {
                "version": OWN_VERSION,
                **({REPLICAS: tables} if tables else {}),
                "gradients": dict(gradients),
                "hidden": large,
                "parameters": self._parameters.array(),
                "packed": self._packer.pack(
                    {
                        "rng": streams,
                        "buffer_syncs": self.gradient_order.syncs(),
                        **own,
                        "made": self.made,
                        "audit": hidden,
                        "gradient_order": self.gradient_order.state(),
                        "values": values,
                    }
                ),
            }
        }

    @cached_property
    def gradient_order(self) -> GradientOrder:
        """Of the models."""
        return GradientOrder(self._wrappers())  # models may be wrapped after this object was made

    def is_lazy(self, path: tuple[Any, ...]) -> bool:
        """Whether this leaf changes in an optimizer step only: an optimizer's parameter or state.

        Buffers change in forward, learning rates at the scheduler, and parameters that no optimizer manages whenever
        their owner likes (averaged weights, momentum encoders), so these are not lazy.
        """
        owner = self.parts.owner(path)
        if not isinstance(owner, nn.Module):
            return owner is not None
        tensor = self._weights[path[0]][path[1]]
        if not isinstance(tensor, torch.Tensor | FlatPart):
            return False
        if self._managed is None:
            self._managed = frozenset(here(p).data_ptr() for p in managed(self.parts.optimizers.values()))
        live = here(tensor)
        return live.numel() > 0 and live.data_ptr() in self._managed


@dataclass(eq=False)
class Packer:
    """Packs the trees of one run; the result never gets smaller, so that it seldom changes its shape.

    The array has 8 bytes (little endian, the length of the text), the text, the arrays, padding. The text is JSON,
    `{"tree": ..., "arrays": [...]}`: `tree` is typed as in a manifest (docs/format.md, "Tree"); its array leaves have
    as `entry` an index into `arrays`, each of which has a dtype, a shape and a range of bytes behind the text.

    Args:
        _root: where the tree sits in the state, for error messages.
    """

    _root: str
    _flattener: Flattener = field(default_factory=Flattener)
    _known: dict[str, tuple[Any, KeySkeleton]] = field(default_factory=dict)
    """By component of the last tree its form, and its skeleton."""
    _nbytes: int = _SMALLEST_BYTES
    _device: torch.device | None = None

    def pack(self, tree: Any) -> torch.Tensor:
        """The tree as a uint8 tensor; copies everything, so that later changes of the tree do not reach it.

        From the first array on a GPU on the tensor is there too: the host waits for no array.

        Raises:
            UnstorableLeafError: a leaf would need pickle; names it.
        """
        components = {ROOT_KEY: tree} if "$" in components_of(tree) else components_of(tree)
        places: dict[int, tuple[int, torch.Tensor]] = {}
        nodes = {key: self._node(key, one, places) for key, one in components.items()}
        live = [tensor for _, tensor in places.values()]
        self._device = next((array.device for array in live if array.is_cuda), self._device)
        arrays: list[dict[str, Any]] = [{} for _ in live]
        blocks: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        at = 0
        for index in sorted(range(len(live)), key=lambda one: live[one].is_cuda):
            array = live[index].detach()
            block = (array if array.is_cuda else array.cpu()).contiguous().reshape(-1).view(torch.uint8)
            dtype = str(array.dtype).removeprefix("torch.")
            arrays[index] = {"dtype": dtype, "shape": list(array.shape), "at": at, "nbytes": block.numel()}
            blocks[array.is_cuda].append(block)
            at += block.numel()
        text = json.dumps({"tree": nodes.get(ROOT_KEY, nodes), "arrays": arrays}, separators=(",", ":")).encode()
        self._nbytes = max(self._nbytes, _rounded(8 + len(text) + at))
        head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        return self._joined([head, *blocks[False]], blocks[True])

    def _joined(self, host: Sequence[torch.Tensor], device: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of the host, behind them those of GPUs, and zeros.

        Without torch's team of threads, as that waits for a core where something else uses one (decision 0006).
        """
        room, end = np.zeros(self._nbytes, np.uint8), sum(map(len, host))
        np.concatenate([block.numpy() for block in host], out=room[:end])
        packed = torch.from_numpy(room)
        if self._device is None:
            return packed
        # Only from page-locked memory the host does not wait for a copy to a device.
        packed = packed.pin_memory().to(self._device, non_blocking=True)
        if device:
            tail = torch.cat([block.to(self._device, non_blocking=True) for block in device])
            packed[end : end + len(tail)].copy_(tail)
        return packed

    def _node(self, key: str, component: Any, places: dict[int, tuple[int, torch.Tensor]]) -> Any:
        """The node of a component, whose arrays come behind those of the components before it.

        Most often values alone have changed, and describing a component takes longer than all the rest.

        Args:
            places: by the id of a tensor its index: one that comes twice is one tensor again.
        """
        path = (self._root, key) if key else (self._root,)
        scan = self._flattener.scan(component, path)
        indices = [places.setdefault(id(one), (len(places), one))[0] for one in scan.arrays]
        form = (
            indices,
            scan.signature,
            [(a.dtype, a.shape, a.layout, a.device, a.requires_grad) for a in scan.arrays],
        )
        if key not in self._known or self._known[key][0] != form:
            skeleton = self._flattener.describe(component, path)
            for index, leaf in zip(indices, skeleton.leaves, strict=True):
                leaf.node["entry"] = str(index)
            self._known[key] = (form, KeySkeleton(skeleton.tree))
        return self._known[key][1].fill(scan.values)


def unpack(packed: torch.Tensor) -> tuple[Any, list[str]]:
    """The tree, and notes about classes that came back as plain equivalents.

    Raises:
        CorruptError: these are not the bytes of `Packer.pack`.
        FormatError: as `state.rebuild.Rebuilder.node`.
    """
    data = packed.contiguous().numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    try:
        content = json.loads(data[8 : 8 + length])
        entries = {
            str(index): _tensor(data[8 + length + a["at"] : 8 + length + a["at"] + a["nbytes"]], a)
            for index, a in enumerate(content["arrays"])
        }
        tree = content["tree"]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as err:
        raise CorruptError(f"the packed part of the snapshot cannot be read: {err}") from err
    rebuilder = Rebuilder(entries)
    check({"packed": tree}, None)
    return rebuilder.node(tree, ()), rebuilder.notes


def _tensor(data: bytes, array: Any) -> torch.Tensor:
    dtype = dtype_of(array["dtype"])
    if not data:
        return torch.empty(array["shape"], dtype=dtype)
    # A copy of its own is aligned as torch aligns, which the last bit of a sum may depend on.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(array["shape"]).clone()


def _rounded(nbytes: int) -> int:
    """The next size in steps of an eighth to a quarter, so that small changes of the tree keep the size."""
    step = max(4096, 1 << (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def own_values(state: Mapping[str, Any], ranks: Ranks | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """For this rank's own component: what `merged` needs beside rank 0's `state`, and the tables of `replicas`."""
    if ranks is None:
        return {}, {}
    walk = _Walk(ranks)
    found = walk.kept({name: value for name, value in state.items() if name not in ranks.own}, ())
    return found if isinstance(found, dict) and ranks.rank else {}, tables_of(walk.alike)


def merged(state: dict[str, Any], own: Mapping[str, Any]) -> list[NotRestored]:
    """Put this rank's values into the state as it was read; returns those that are others' although they were not."""
    missing: list[NotRestored] = []
    if own:
        _merge(own, state, "", missing)
    return missing


def alike(parts: Components) -> Callable[[tuple[Any, ...]], bool]:
    """Which arrays of a run's components are the same on all ranks: parameters, and what optimizers know of them.

    All else, buffers too, may differ.
    """

    @cache
    def parameters(module: nn.Module) -> frozenset[str]:
        return frozenset(map(canonical(module), dict(module.named_parameters(remove_duplicate=False))))

    def is_alike(path: tuple[Any, ...]) -> bool:
        owner = parts.owner(path)
        return path[1] in parameters(owner) if isinstance(owner, nn.Module) else owner is not None

    return is_alike


@dataclass(eq=False)
class _Walk:
    _ranks: Ranks
    _left: int = MOST_BYTES
    _flattener: Flattener = field(default_factory=Flattener)
    alike: list[tuple[tuple[Any, ...], Any]] = field(default_factory=list)
    """Arrays, and what optimizers know of parameters, that are the same on all ranks."""

    def kept(self, value: Any, path: tuple[Any, ...]) -> Any:
        """The value without what is common to all ranks."""
        if path and self._ranks.divides(path):
            self.alike.append((path, value))
            return _COMMON
        if (self._ranks.rank == 0 and not isinstance(value, dict)) or len(path) > _DEEPEST or path[-3::2] == _NUMBERS:
            return _COMMON
        if isinstance(value, dict):
            return _dict_of({key: self.kept(one, (*path, key)) for key, one in value.items()})
        if type(value) in (list, tuple):
            found = [self.kept(one, (*path, index)) for index, one in enumerate(value)]
            return type(value)(found) if not found or any(one is not _COMMON for one in found) else _COMMON
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._kept_of_array(value)
        return value if type(value) in PLAIN or problems(value, path, self._flattener) is None else _COMMON

    def _kept_of_array(self, value: Any) -> Any:
        if type(value) not in (*_DENSE, np.ndarray) or (type(value) in _DENSE and value.numel() and not address(value)):
            return _COMMON  # each rank saves its part of it, or it has no memory of its own
        if value.nbytes > min(LARGE_BYTES, self._left):
            return _COMMON + digest(freeze(value))
        self._left -= value.nbytes
        return value


def _dict_of(found: dict[Any, Any]) -> Any:
    common = {key: one for key, one in found.items() if _is_common(one)}
    if not common:
        return found
    digests = {key: one.removeprefix(_COMMON) for key, one in common.items() if one is not _COMMON}
    if len(common) == len(found) and not digests:
        return _COMMON
    return {_COMMON: digests, **{key: one for key, one in found.items() if key not in common}}


def _merge(own: Any, there: Any, where: str, missing: list[NotRestored]) -> Any:
    if _is_common(own):
        expected = own.removeprefix(_COMMON)
        if there is _ABSENT or (expected and digest(freeze(there)) != expected):
            why = f"it was not the same on all ranks, and is larger than {LARGE_BYTES} bytes: it is that of rank 0 now"
            missing.append(NotRestored(where, why))
        return None if there is _ABSENT else there
    if isinstance(own, dict):
        return _merge_dict(own, there, where, missing)
    if type(own) in (list, tuple):
        others = there if isinstance(there, list | tuple) else ()
        pairs = ((one, others[index] if index < len(others) else _ABSENT) for index, one in enumerate(own))
        return type(own)(_merge(*pair, f"{where}/{index}", missing) for index, pair in enumerate(pairs))
    return own


def _merge_dict(own: dict[Any, Any], there: Any, where: str, missing: list[NotRestored]) -> Any:
    others = there if isinstance(there, dict) else {}
    digests = own.get(_COMMON)
    found = dict(others) if digests is not None or not where else {}
    own = {**{key: _COMMON + one for key, one in (digests or {}).items()}, **own}
    for key, one in own.items():
        if key != _COMMON:
            found[key] = _merge(one, others.get(key, _ABSENT), f"{where}/{key}".removeprefix("/"), missing)
    if not isinstance(there, dict):
        return found
    there.clear()  # it keeps its class
    there.update(found)
    return there


def _is_common(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_COMMON)


@dataclass(frozen=True, slots=True)
class Elastic:
    """A snapshot of other ranks than those of this run.

    Args:
        rank, size: of this run.
        own: what each of the saved ranks had of its own, in order.
        policy: the option `rng`.
        teams: which ranks share a model.
    """

    rank: int
    size: int
    own: Sequence[Mapping[str, Any]]
    policy: str
    teams: Teams | None = None

    @property
    def saved_size(self) -> int:
        """How many ranks took it."""
        return len(self.own)

    @property
    def streams(self) -> RngState:
        """The random streams of this rank."""
        saved = [own["rng"] for own in self.own]
        return (derive if self.policy == DERIVE else repeat)(saved, self.rank, self.teams)

    def position(self, position: LoaderPosition, saved: Sequence[Any]) -> dict[str, Any]:
        """The state of a loader's position for this rank.

        Args:
            position: of the loader of this rank.
            saved: the states of the saved ranks, in order.

        Raises:
            ResumeError: the rest of its epoch cannot be divided again.
        """
        return position.for_another_number(saved, self.rank, self.size, self.streams, self.own[0]["rng"])

    def gradients(
        self, saved: Sequence[Mapping[str, torch.Tensor]], module: torch.nn.Module
    ) -> tuple[dict[str, torch.Tensor], list[NotRestored]]:
        """Gradients that wait for a step, those of all saved ranks together: their mean, as DDP would make it.

        Args:
            saved: by name of the parameter, of each saved rank in order.
            module: whose they are.
        """
        name_of = canonical(module)
        whole = {name_of(name): p.shape for name, p in module.named_parameters() if here(p) is p}
        found = {name: [one[name] for one in saved] for name in saved[0] if all(name in one for one in saved)}
        divided = [
            name
            for name, parts in found.items()
            if any(not isinstance(part, torch.Tensor) or part.shape != whole.get(name) for part in parts)
        ]
        gone = [name for name in saved[0] if name not in found]
        why = "it is sparse, divided among the ranks, or not all have it: it is left out of the next step"
        missing = [NotRestored(f"gradient of {name!r}", why) for name in (*divided, *gone)]
        return {name: _mean(parts) for name, parts in found.items() if name not in divided}, missing

    def notes(self, dealings: Iterable[tuple[Dealing, int] | None]) -> list[str]:
        """What was done, as sentences for the report.

        Args:
            dealings: `LoaderPosition.dealt` of the loaders.
        """
        said = []
        for dealing, total in filter(None, dealings):
            said.append(_dealt(dealing, total))
            if dealing.size != self.size:
                said.append(
                    f"the loader divides its samples by {dealing.size}: that many of the ranks have different ones"
                )
        if self.policy == DERIVE:
            said.append("rng: derive: rank 0 has its random streams, those of other ranks are made from them")
        return [resumed_by_others(self.saved_size, self.size), *said]

    def not_restored(self, metrics: str) -> list[NotRestored]:
        """What is not as it was, apart from what `notes` says.

        Args:
            metrics: what of them there is, or "".
        """
        of_others = f"each rank has those of saved rank r mod {self.saved_size}"
        rows = [NotRestored(metrics, f"{of_others}, not of all batches so far")] if metrics else []
        if self.policy == DERIVE:
            return rows
        twins = f"; with more than {self.saved_size} several draw the same" if self.size > self.saved_size else ""
        return [NotRestored("random streams", f"rng: {self.policy}: {of_others}{twins}"), *rows]


def own_part(
    state: dict[str, Any], loaded: Loaded, ranks: tuple[int, int], policy: str
) -> tuple[dict[str, Any], list[str], Elastic | None, list[NotRestored]] | None:
    """Take what a snapshot has besides the components out of its state, and put this rank's values into the rest.

    Args:
        ranks: number of this rank, and how many there are.
        policy: the option `rng`.

    Returns:
        Our own entries, notes about them, what another number of ranks goes on with, and what is that of rank 0 now,
        although it was not. None: others have made the snapshot.

    Raises:
        NewerFormatError: this version cannot read it.
        CorruptError, FormatError: as `capture.unpack`.
    """
    own = state.pop(OWN_KEY, None)
    if own is None:
        return None
    if own["version"] > OWN_VERSION:
        raise NewerFormatError(
            f"snapshot {loaded.info.id} was written by a later version of ckpt-engine", hint="update ckpt-engine"
        )
    packed, notes = unpack(own["packed"])
    values = packed.pop("values", {})
    whole = {"hidden": {}, **own, **packed}
    apart = [NotRestored(name, _NOT_ALIKE) for name in differing(loaded.manifest)]
    if loaded.manifest.world_size == ranks[1]:
        return whole, notes, None, [*apart, *merged(state, values)]
    saved = [loaded.own[number][OWN_KEY] for number in sorted(loaded.own)] or [own]
    elastic = Elastic(*ranks, [{**one, **unpack(one["packed"])[0]} for one in saved], policy)
    return whole, notes, elastic, apart


def numbers_of(ranks: Ranks | None) -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)


def _dealt(dealing: Dealing, total: int) -> str:
    left = dealing.origin.samples - dealing.seen
    more = (
        sample_assignment.given(left, dealing.size, dealing.batch_size, dealing.tail, drop_last=dealing.drop_last)
        - left
    )
    said = f"{dealing.seen:,} samples of the epoch were seen, the other {left:,} come once"
    said += f"; batches for each rank: {total - dealing.first:,}"
    if more > 0:
        return f"{said}; {more:,} come{'s' * (more == 1)} twice, to fill the last batches"
    return f"{said}; the last {-more:,} are left out, as they fill no batch" if more else said


def _mean(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    first = gradients[0]
    if all(torch.equal(one, first) for one in gradients[1:]):
        return first
    wide = torch.promote_types(first.dtype, torch.float64)
    return torch.stack([one.to(wide) for one in gradients]).mean(0).to(first.dtype)


def live_of(parts: Components) -> Live | None:
    """None: no model is divided, and everything is put back by `load_state_dict`."""
    if not any_sharded(parts.modules.values()):
        return None

    def live(manifest: Manifest) -> Any:
        found: dict[str, Any] = {name: state_of(module, parts.flat) for name, module in parts.modules.items()}
        divided = {} if parts.flat is None else parts.flat.parts()
        return found | {
            name: optimizer_shell(optimizer, manifest.tree[name], manifest.entries, divided)
            for name, optimizer in parts.optimizers.items()
            if name in manifest.tree
        }

    return live


def require_whole_gradients(modules: Iterable[nn.Module], saved_size: int) -> None:
    """Raise where gradients of another number of ranks are parts that fit nowhere.

    Raises:
        ResumeError: a model is divided.
    """
    if any_sharded(modules):
        raise ResumeError(
            f"the snapshot was taken by {saved_size} ranks in the middle of gradient accumulation, and the "
            "gradients of a sharded model are stored as their parts",
            hint=f"start it with {saved_size} ranks, or load an older snapshot",
        )


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether ranks have parts of a model."""
    return any(is_flat(module) or any(map(is_sharded, module.parameters())) for module in modules)
