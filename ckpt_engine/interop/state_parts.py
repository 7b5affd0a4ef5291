"""Finds in a state what other programs keep by kind: models, optimizers, schedulers, loaders, random streams.

Every adapter, and every user of `Checkpointer`, names its parts as they like, but the forms are torch's own: the state
dict of an optimizer has `state` and `param_groups` under any name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch

from ckpt_engine.grouping import grouped
from ckpt_engine.loop.capture import unpack
from ckpt_engine.store.manifest import OWN_KEY

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
    of_modules, own = {where: node for where, node in models.items() if hasattr(node, "_metadata")}, _own(state)
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
    is_list = isinstance(node, list | tuple)
    for key, child in node.items() if isinstance(node, Mapping) else enumerate(node) if is_list else ():
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
    if not isinstance((own := state.get(OWN_KEY)), Mapping):
        return {}
    packed = own.get("packed")
    more = unpack(packed)[0] if isinstance(packed, torch.Tensor) else {}
    return {**own, **more} if isinstance(more, Mapping) else own


def _of_trainer(own: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, dict[str, bytes]]:
    """The state and files of a transformers Trainer, as its adapter keeps them: texts of JSON files."""
    if not isinstance((around := own.get(SURROUNDINGS)), Mapping):
        return None, {}
    state, files = around.get("state"), around.get(FILES)
    texts = {name: text.encode() for name, text in files.items()} if isinstance(files, Mapping) else {}
    if not isinstance(state, str):
        return None, _files(texts)
    return {**json.loads(state), "stateful_callbacks": _callbacks(around.get("callbacks"))}, _files(texts)


def _callbacks(saved: Any) -> dict[str, Any]:
    """Names and texts of states in the form of transformers: several of a name as a list."""
    found = grouped((name, json.loads(text)) for name, text in (saved if isinstance(saved, list) else ()))
    return {name: states if len(states) > 1 else states[0] for name, states in found.items()}


def looks_recorded(node: Any) -> bool:
    """Whether a value has the form of `data.rng.capture()`."""
    return isinstance(node, Mapping) and {"python", "numpy", "torch"} <= node.keys()
