"""Which parameters are frozen and which modules are in eval mode: a state that no `state_dict` has."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def dump_flags(module: torch.nn.Module) -> dict[str, list[str]]:
    """Names of frozen parameters and of modules in eval mode."""
    return {
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "eval": [name for name, m in module.named_modules() if not m.training],
    }


def restore_flags(module: torch.nn.Module, saved: Mapping[str, list[str]]) -> None:
    """Freeze, unfreeze and switch modes as saved."""
    frozen, evaluating = set(saved["frozen"]), set(saved["eval"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, submodule in module.named_modules():
        submodule.training = name not in evaluating
