"""Notes in a snapshot what PEFT saves of the adapters of its models."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ckpt_engine.state.module_names import canonical

NOTE = "peft_adapters"
"""The note of a snapshot with PEFT models: a row for each."""
_LIGHTNING = "state_dict"
_TORCH_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes that the saved names of PEFT have where a block is wrapped; the base that is to get them is not."""
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()
"""By PEFT model, what its row follows from, and the row: to make one takes as long as its `state_dict`."""


def note_of_adapters(modules: Mapping[str, nn.Module], state: Container[str]) -> dict[str, Any]:
    """For the notes of a snapshot, with the PEFT models among its components and in them; empty: there are none.

    Args:
        modules: by component.
        state: the components as the snapshot calls them; Lightning has another name for its model.
    """
    if (peft := sys.modules.get("peft")) is None:
        return {}
    found = [
        {"component": component if component in state else _LIGHTNING, **_row(peft, module, path, model)}
        for component, module in modules.items()
        for path, model in module.named_modules()
        if isinstance(model, peft.PeftModel)
    ]
    return {NOTE: found} if found else {}


def _row(peft: Any, module: nn.Module, path: str, model: Any) -> dict[str, Any]:
    """The adapters of one PEFT model, and what trains in it that none of them has, by the names of the snapshot."""
    now = path, repr(model.peft_config), [weight.requires_grad for weight in model.parameters()]
    if _KNOWN.get(model, ((), {}))[0] != now:
        name, above, state = canonical(module), path and f"{path}.", model.state_dict()
        names = {id(value): name(above + key) for key, value in state.items()}
        adapters = {one: _adapter(peft, model, one, state, names) for one in model.peft_config}
        trained = {name(above + key) for key, weight in model.named_parameters() if weight.requires_grad}
        beside = trained.difference(*(one["weights"].values() for one in adapters.values()))
        _KNOWN[model] = now, {"adapters": adapters, "beside": sorted(beside)}
    return _KNOWN[model][1]


def _adapter(peft: Any, model: Any, adapter: str, state: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The configuration of an adapter, and by the name in its file each weight; "": PEFT computes it from others.

    What a prompt encoder saves is computed, which may draw random numbers, and AdaLoRA changes its live configuration
    once it has pruned: they are not asked.
    """
    config, weights, why = model.peft_config[adapter], dict[str, str](), ""
    plain = json.dumps(config.to_dict(), default=lambda one: sorted(one) if isinstance(one, set) else str(one))
    try:
        if not (config.is_prompt_learning or (config.peft_type == "ADALORA" and config.rank_pattern)):
            saved = peft.get_peft_model_state_dict(model, state, adapter, save_embedding_layers=False)
            weights = {
                ".".join(one for one in key.split(".") if one not in _TORCH_WRAPPERS): names.get(id(value), "")
                for key, value in saved.items()
            }
    except Exception as err:  # noqa: BLE001 - an export says it; it is no reason to lose the snapshot
        why = f"{type(err).__name__}: {err}"
    return {"config": json.loads(plain), "weights": weights, "why": why}
