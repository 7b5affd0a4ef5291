"""The rules that `ckpt plan` compares with the policy that trains, by their names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from ckpt_engine.config.option_types import parse_duration_seconds
from ckpt_engine.errors import ConfigError
from ckpt_engine.frequency.intervals import optimal
from ckpt_engine.frequency.triggers import SnapshotTimer
from ckpt_engine.tools.simulate import Rule

_PUBLISHED: Mapping[str, Rule] = {
    "daly": lambda costs, rate: optimal(costs.cost_seconds, 1.0 / rate),
    # An overhead of 3.5 %, and never faster than the writer (FAST 2021).
    "checkfreq": lambda costs, _: max(costs.cost_seconds / 0.035, costs.latency_seconds),
}


def rule_of(name: str) -> Rule | type[SnapshotTimer]:
    """The rule of that name: from the costs of a snapshot and failures per second to seconds between snapshots.

    Or a class of its own timers, each made of settings, a clock and a sink.

    Raises:
        ConfigError: there is none.
    """
    if name in _PUBLISHED:
        return _PUBLISHED[name]
    module, colon, function = name.partition(":")
    if colon:
        if (here := str(Path.cwd())) not in sys.path:  # where a script is started, Python looks beside the script only
            sys.path.append(here)
        try:
            made: Rule | type[SnapshotTimer] = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as err:
            raise ConfigError(
                f"--compare {name}: {err}", hint="package.module:function, see docs/frequency.md"
            ) from err
        return made
    try:
        seconds = parse_duration_seconds(name)
    except ValueError as err:
        raise ConfigError(
            f"--compare {name!r} is no rule: {err}", hint="daly, checkfreq, 30min, or package.module:function"
        ) from err
    return lambda _costs, _rate: seconds
