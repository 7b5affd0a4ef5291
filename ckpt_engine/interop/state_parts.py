"""What a state consists of as other programs keep it: models, optimizers, schedulers, random streams, weight files.

Every adapter, and every user of `Checkpointer`, names its parts as they like, but the forms are torch's own: the state
dict of an optimizer has `state` and `param_groups` under any name. `to_legacy` and `from_legacy` convert random
streams between `data.rng` and the tuples of Accelerate and transformers. `write` and `read` keep weights as
`safetensors.torch.save_model` does: tied tensors once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckpt_engine.data import rng
from ckpt_engine.errors import CorruptError, MismatchError, StorageMissingError
from ckpt_engine.interop import safe_load
from ckpt_engine.interop.safe_load import Advance
from ckpt_engine.loop.capture import unpack
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.read import read_entries, require_room
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.state.wrapped import as_plain
from ckpt_engine.store.container import DTYPES
from ckpt_engine.store.manifest import OWN_KEY, Manifest
from ckpt_engine.store.tree import entries_in

AVERAGED = "current_model_state"
"""In Lightning snapshots with averaged weights: those that train. `state_dict` then has the averages."""
CUSTOM = "custom_checkpoint_"
"""How the keys of objects registered with Accelerate begin; a number follows, as in the names of its files."""
LOADERS = "loaders"
FILES = "files"
TRAINER_STATE = "trainer_state"
STREAMS = "rng"
SURROUNDINGS = "surroundings"
"""Where the adapter for transformers keeps texts: `state` (trainer_state.json), `callbacks`, and `files` by name."""
_DEPTH = 2
_KEPT_SUFFIXES = (".json", ".txt", ".jinja", ".model")

Found = Mapping[str, Any]
"""By where it is in the state: its keys joined by "/"."""


@dataclass(frozen=True, slots=True)
class StateParts:
    """The recognised parts of one state, in its order.

    Args:
        custom: states of objects registered with Accelerate, in order.
        loaders: of stateful loaders, in order.
        streams: as `data.rng.capture` returns them, or None.
        trainer_state: of a transformers Trainer, or None.
        files: small files by name that go with the weights (`config.json`, tokenizer).
    """

    models: Found = field(default_factory=dict)
    optimizers: Found = field(default_factory=dict)
    schedulers: Found = field(default_factory=dict)
    scalers: Found = field(default_factory=dict)
    custom: tuple[Any, ...] = ()
    loaders: tuple[Any, ...] = ()
    streams: Mapping[str, Any] | None = None
    trainer_state: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def sources(self) -> str:
        """What was taken for what, for people: `models: model, ema; optimizers: optimizer`."""
        kinds = ("models", "optimizers", "schedulers", "scalers")
        return "; ".join(f"{kind}: {', '.join(getattr(self, kind))}" for kind in kinds if getattr(self, kind))


def recognise(state: Any) -> StateParts:
    """Sort a state by form.

    Raises:
        CorruptError, FormatError: the packed part of a snapshot cannot be read.
    """
    if not isinstance(state, Mapping):
        return StateParts()
    custom = {key: node for key, node in state.items() if str(key).startswith(CUSTOM)}
    skipped = {OWN_KEY, LOADERS, FILES, TRAINER_STATE, STREAMS, *custom}
    if AVERAGED in state:
        skipped.add("state_dict")
    nodes = [pair for key, node in state.items() if key not in skipped for pair in _nodes(node, str(key), _DEPTH)]
    models = {where: node for where, node in nodes if is_model(node)}
    of_modules = {where: node for where, node in models.items() if hasattr(node, "_metadata")}
    own = _own(state)
    trainer_state, files = _of_trainer(own)
    return StateParts(
        models=of_modules or models,
        optimizers={where: node for where, node in nodes if is_optimizer(node)},
        schedulers={where: node for where, node in nodes if is_scheduler(node)},
        scalers={where: node for where, node in nodes if is_scaler(node)},
        custom=tuple(custom.values()),
        loaders=tuple(loaders) if isinstance(loaders := state.get(LOADERS), list | tuple) else (),
        streams=next(filter(looks_recorded, (state.get(STREAMS), own.get(STREAMS))), None),
        trainer_state=state.get(TRAINER_STATE, trainer_state),
        files=files | _files(state.get(FILES)),
    )


def is_model(node: Any) -> bool:
    """A state dict of a module: tensors by name; what a module of torch has made may hold other values too."""
    if not isinstance(node, Mapping) or not node or not all(isinstance(key, str) for key in node):
        return False
    tensors = [isinstance(value, torch.Tensor) for value in node.values()]
    return any(tensors) if hasattr(node, "_metadata") else all(tensors)


def is_optimizer(node: Any) -> bool:
    """A state dict of a `torch.optim.Optimizer`."""
    return isinstance(node, Mapping) and {"state", "param_groups"} <= node.keys()


def is_scheduler(node: Any) -> bool:
    """A state dict of a learning rate scheduler."""
    return isinstance(node, Mapping) and "last_epoch" in node and ("_last_lr" in node or "_schedulers" in node)


def is_scaler(node: Any) -> bool:
    """A state dict of a `GradScaler`."""
    return isinstance(node, Mapping) and {"scale", "growth_factor", "_growth_tracker"} <= node.keys()


def _nodes(node: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    yield where, node
    if depth == 0 or is_optimizer(node) or is_scheduler(node) or is_model(node):
        return
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    for key, child in children:
        yield from _nodes(child, f"{where}/{key}", depth - 1)


def is_kept_file(name: str) -> bool:
    """Whether a file that lies beside the weights belongs to the state: configuration and tokenizer, no code."""
    return PurePath(name).name == name and PurePath(name).suffix in _KEPT_SUFFIXES


def _files(node: Any) -> dict[str, bytes]:
    if not isinstance(node, Mapping):
        return {}
    # Names come from a snapshot: one with a separator would be written outside of the folder.
    return {name: data for name, data in node.items() if isinstance(data, bytes) and is_kept_file(str(name))}


def _own(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an adapter needs besides the components, packed or not."""
    own = state.get(OWN_KEY)
    if not isinstance(own, Mapping):
        return {}
    packed = own.get("packed")
    more = unpack(packed)[0] if isinstance(packed, torch.Tensor) else {}
    return {**own, **more} if isinstance(more, Mapping) else own


def _of_trainer(own: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, dict[str, bytes]]:
    """The state and files of a transformers Trainer, as its adapter keeps them: texts of JSON files."""
    around = own.get(SURROUNDINGS)
    if not isinstance(around, Mapping):
        return None, {}
    state, files = around.get("state"), around.get(FILES)
    texts = {name: text.encode() for name, text in files.items()} if isinstance(files, Mapping) else {}
    if not isinstance(state, str):
        return None, _files(texts)
    return {**json.loads(state), "stateful_callbacks": _callbacks(around.get("callbacks"))}, _files(texts)


def _callbacks(saved: Any) -> dict[str, Any]:
    """Names and texts of states in the form of transformers: several of a name as a list."""
    found: dict[str, list[Any]] = {}
    for name, text in saved if isinstance(saved, list) else ():
        found.setdefault(name, []).append(json.loads(text))
    return {name: states if len(states) > 1 else states[0] for name, states in found.items()}


SMALL_BYTES = 16 << 20
"""Entries up to this size are read for `outline` too: what decides what a state is sits in small ones."""


def foreign_tree(manifest: Manifest) -> dict[str, Any]:
    """The state tree without our own key."""
    return {key: node for key, node in manifest.tree.items() if key != OWN_KEY}


def entries_of(tree: Mapping[str, Any]) -> list[str]:
    """The entries that a tree refers to, each once."""
    return list(dict.fromkeys(entries_in(tree)))


def rebuild(sources: Sources, manifest: Manifest, tree: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The objects of `tree`, every byte verified, and notes on what could not be rebuilt as it was.

    Raises:
        CorruptError, FormatError: the snapshot is damaged, or has leaves stored with pickle.
        StorageError: it cannot be read.
    """
    rebuilder = Rebuilder(read_entries(sources, manifest, entries_of(tree)))
    state = as_plain(rebuilder.state(tree))
    return state, tuple(rebuilder.notes)


def outline(sources: Sources, manifest: Manifest, tree: Mapping[str, Any]) -> Any:
    """The objects of `tree` with the values of large tensors undefined: enough to see what it consists of.

    Raises:
        CorruptError, FormatError, StorageError: as `rebuild`.
    """
    names = entries_of(tree)
    require_room(sum([manifest.entries[name].nbytes for name in names]))
    read = read_entries(sources, manifest, [name for name in names if manifest.entries[name].nbytes <= SMALL_BYTES])
    rest = {
        name: torch.empty(manifest.entries[name].shape, dtype=dtype_of(manifest.entries[name].dtype))
        for name in names
        if name not in read
    }
    return Rebuilder({**read, **rest}).state(tree)


Legacy = tuple[tuple[Any, ...], Any, torch.Tensor, Sequence[torch.Tensor]]
"""What `random.getstate()`, `np.random.get_state()` and torch's `get_rng_state` functions return; the last ones are of
the devices that were in use."""


def to_legacy(state: Mapping[str, Any]) -> Legacy:
    """The foreign form of recorded streams.

    Raises:
        MismatchError: numpy's global generator is not the usual one, which these formats cannot hold.
    """
    python, numpy = random.Random(), np.random.RandomState()
    rng.decode_python(python, state["python"])
    try:
        numpy.set_state(rng.decode_numpy(state["numpy"]))
    except (TypeError, ValueError) as err:
        raise MismatchError(f"numpy's random stream has no form that others read: {err}") from err
    cuda = list(map(rng.bytes_tensor, state.get("cuda") or ()))
    return python.getstate(), numpy.get_state(), rng.bytes_tensor(state["torch"]), cuda


def from_legacy(legacy: Legacy) -> rng.RngState:
    """Our form of what another library recorded.

    Raises:
        TypeError, ValueError: these are no states of random streams.
    """
    (version, words, gauss), of_numpy, cpu, cuda = legacy
    python, numpy = random.Random(), np.random.RandomState()
    python.setstate((version, tuple(words), gauss))
    numpy.set_state(of_numpy)
    torch.Generator().set_state(cpu)  # refuses what is none
    recorded: Any = numpy.get_state(legacy=False)
    state: rng.RngState = {
        "python": rng.encode_python(python),
        "numpy": rng.encode_numpy(recorded),
        "torch": cpu.numpy().tobytes(),
    }
    if cuda:
        state["cuda"] = [one.cpu().numpy().tobytes() for one in cuda]
    return state


def looks_recorded(node: Any) -> bool:
    """Whether a value has the form of `data.rng.capture()`."""
    return isinstance(node, Mapping) and {"python", "numpy", "torch"} <= node.keys()


def write(state_dict: Mapping[str, Any], folder: Path, name: str, torch_name: str) -> tuple[str, ...]:
    """Write the weights as `name`, or as `torch_name` where safetensors has no such dtype or value; returns notes."""
    values = [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
    odd = sorted({str(v.dtype) for v in values if str(v.dtype).removeprefix("torch.") not in DTYPES})
    if odd or len(values) < len(state_dict):
        torch.save(dict(state_dict), folder / torch_name)
        why = f"safetensors has no {', '.join(odd)}" if odd else "they hold values that are no tensors"
        return (f"weights are in {torch_name}: {why}",)
    apart, tied = untied(state_dict)
    save_file(apart, folder / name, metadata={"format": "pt", **tied})
    return (f"tied weights stored once: {', '.join(f'{a} = {b}' for a, b in tied.items())}",) if tied else ()


def untied(state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Contiguous tensors that share no memory, and for each name left out the name of the same tensor."""
    apart: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    memory: set[int] = set()
    for name, tensor in state_dict.items():
        where = tensor.untyped_storage().data_ptr()
        key = (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        plain = tensor.detach().contiguous()
        apart[name] = plain.clone() if tensor.numel() and where in memory else plain
        memory.add(where)
    return apart, tied


def read(folder: Path, name: str, torch_name: str, advance: Advance) -> dict[str, Any] | None:
    """The weights that lie in `folder` under either name, whole or in parts with an index; None if there are none.

    Raises:
        CorruptError: a file is damaged.
        StorageMissingError: the index names a file that is not there.
        UnstorableLeafError, ForeignError: as `safe_load.load`.
    """
    for one, reader in ((name, _read_safetensors), (torch_name, _read_torch)):
        files = _parts(folder, one)
        if files:
            state_dict: dict[str, Any] = {}
            for file in files:
                state_dict |= reader(file, advance)
            return state_dict
    return None


def _parts(folder: Path, name: str) -> list[Path]:
    if (folder / name).exists():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.exists():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [folder / Path(one).name for one in names]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptError(f"{index} is not an index of weights: {err}") from err
    for file in files:
        if not file.exists():
            raise StorageMissingError(f"{file}, a part of the weights, is missing")
    return files


def _read_safetensors(file: Path, advance: Advance) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
            tied = opened.metadata() or {}
    except SafetensorError as err:
        raise CorruptError(f"{file} is not a whole safetensors file: {err}") from err
    advance(file.stat().st_size)
    return tensors | {name: tensors[same] for name, same in tied.items() if same in tensors and name not in tensors}


def _read_torch(file: Path, advance: Advance) -> dict[str, Any]:
    value = safe_load.load(file, advance).value
    if not isinstance(value, dict):
        raise CorruptError(f"{file} holds a {type(value).__name__} instead of weights by name")
    return value
