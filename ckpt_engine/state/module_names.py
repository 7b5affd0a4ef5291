"""Names the parts of a model as if nothing wrapped it.

`torch.compile`, DDP, FSDP1, activation checkpointing, Fabric and PEFT each put a module into one of their own, and its
attribute into all names below. Snapshots have the names without them: a run resumes with and without the wrapper.
Only the type of a live module says that it is a wrapper: an attribute `module` of another module keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from torch import nn

_T = TypeVar("_T")
_WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod",),
    "torch.nn.parallel.data_parallel.DataParallel": ("module",),
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module",),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": ("_checkpoint_wrapped_module",),
    "lightning.fabric.wrappers._FabricModule": ("_forward_module", "_original_module"),
    "lightning_fabric.wrappers._FabricModule": ("_forward_module", "_original_module"),
    "peft.peft_model.PeftModel": ("base_model",),
    "peft.tuners.tuners_utils.BaseTuner": ("model",),
    "peft.tuners.tuners_utils.BaseTunerLayer": ("base_layer",),
}
"""By class, the attributes under which a wrapper has what it wraps, most often one."""
_STORED = re.compile(
    r"(^module|^base_model\.model|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|"
    r"_forward_module|_original_module|base_layer))(\.|$)"
)
"""What earlier versions have stored of wrappers in a name."""


@cache
def _attributes(classes: tuple[type, ...]) -> tuple[str, ...]:
    """What a wrapper adds to names, by its class and the bases of that; empty: it is none."""
    names = (f"{one.__module__}.{one.__qualname__}" for one in classes)
    return next((_WRAPPERS[one] for one in names if one in _WRAPPERS), ())


def canonical(module: nn.Module) -> Callable[[str], str]:
    """What gives the name of a weight, buffer or module of `module` without wrappers; with them if two would be one."""
    if any(_attributes(kind.__mro__) for kind in set(map(type, module.modules()))):
        name = partial(_without_wrappers, module)
        names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        if len(set(map(name, names))) == len(names):
            return name
    return str


def _without_wrappers(module: Any, name: str) -> str:
    kept = []
    for part in name.split("."):
        # A wrapper may leave its own attribute out of names, as that of activation checkpointing does.
        while _attributes(type(module).__mro__) and part not in {
            **module._modules,
            **module._parameters,
            **module._buffers,
        }:
            module = module._modules[_attributes(type(module).__mro__)[0]]
        kept += [part] * (part not in _attributes(type(module).__mro__))
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def stored_name(module: nn.Module) -> Callable[[str], str]:
    """What gives the canonical name of what a snapshot has: earlier versions stored names as wrappers make them.

    A name that `module` has is taken as it is stored; else the first that it has without attributes of wrappers.
    """
    known = set(map(canonical(module), dict(module.named_modules(remove_duplicate=False))))

    def found(name: str) -> str:
        shorter = name
        while shorter not in known and shorter.rpartition(".")[0] not in known:
            if (match := _STORED.search(shorter)) is None:
                return name
            shorter = shorter[: match.start()] + shorter[match.end() :]
        return shorter

    return found


def renamed(values: Mapping[str, _T], name: Callable[[str], str]) -> Mapping[str, _T]:
    """The values by their other names; as they are where none has another one, or two would have the same."""
    found = values if name is str else {name(key): value for key, value in values.items()}
    return found if len(found) == len(values) else values


def for_live(module: nn.Module, saved: Mapping[str, _T]) -> Mapping[str, _T]:
    """Values of a snapshot by the names of the `state_dict` of a live module, which may be those of the user."""
    name, stored = canonical(module), stored_name(module)
    live = {name(key): key for key in module.state_dict()}
    known = renamed(saved, lambda key: key if key in live else stored(key))
    return renamed(known, lambda key: live.get(key, key))
