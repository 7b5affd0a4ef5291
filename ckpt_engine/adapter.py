"""All that adapters of trainers import of the engine (docs/adapters.md shows how).

Names are imported on first use, so that the class of a callback is there before the engine is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_engine.audit.attributes import DerivedObject as DerivedObject
    from ckpt_engine.audit.attributes import Variables as Variables
    from ckpt_engine.config import Config as Config
    from ckpt_engine.config import Options as Options
    from ckpt_engine.config import load_config as load_config
    from ckpt_engine.data.exactness import OnChange as OnChange
    from ckpt_engine.data.position import LoaderPosition as LoaderPosition
    from ckpt_engine.data.position import attach as attach
    from ckpt_engine.data.private_names import PrivateName as PrivateName
    from ckpt_engine.data.private_names import Replaced as Replaced
    from ckpt_engine.data.private_names import require as require_names
    from ckpt_engine.engine import Engine as Engine
    from ckpt_engine.errors import CkptError as CkptError
    from ckpt_engine.errors import ConfigError as ConfigError
    from ckpt_engine.errors import ResumeError as ResumeError
    from ckpt_engine.interop.trainer_folders import write_streams as write_streams
    from ckpt_engine.loop.boundary import RunInstant as RunInstant
    from ckpt_engine.loop.components import Counters as Counters
    from ckpt_engine.loop.components import NamedParts as NamedParts
    from ckpt_engine.loop.components import Surroundings as Surroundings
    from ckpt_engine.loop.failing_loop import BoundaryRecord as BoundaryRecord
    from ckpt_engine.loop.live_model import LiveModel as LiveModel
    from ckpt_engine.loop.loader_source import LoaderSource as LoaderSource
    from ckpt_engine.loop.taking_over import TrainerResume as TrainerResume
    from ckpt_engine.loop.tracker import Tracker as Tracker
    from ckpt_engine.loop.trainer_run import TrainerRun as TrainerRun
    from ckpt_engine.observe.curves import Curves as Curves
    from ckpt_engine.observe.curves import EventFiles as EventFiles
    from ckpt_engine.observe.curves import TrackedRun as TrackedRun
    from ckpt_engine.observe.curves import WriterCurve as WriterCurve
    from ckpt_engine.observe.resume_report import NotRestored as NotRestored
    from ckpt_engine.observe.resume_report import Restored as Restored
    from ckpt_engine.observe.run_times import hook_time as hook_time
    from ckpt_engine.ranks.process_group import ProcessGroupRanks as ProcessGroupRanks
    from ckpt_engine.state.flatten import problems as problems
    from ckpt_engine.state.sharding import parts_of as parts_of
    from ckpt_engine.store.manifest import Manifest as Manifest
    from ckpt_engine.undo import on_failure as on_failure
    from ckpt_engine.whose_code import of_framework as of_framework

_HOMES = {
    "BoundaryRecord": "ckpt_engine.loop.failing_loop",
    "CkptError": "ckpt_engine.errors",
    "Config": "ckpt_engine.config",
    "ConfigError": "ckpt_engine.errors",
    "Counters": "ckpt_engine.loop.components",
    "Curves": "ckpt_engine.observe.curves",
    "DerivedObject": "ckpt_engine.audit.attributes",
    "Engine": "ckpt_engine.engine",
    "EventFiles": "ckpt_engine.observe.curves",
    "LiveModel": "ckpt_engine.loop.live_model",
    "LoaderPosition": "ckpt_engine.data.position",
    "LoaderSource": "ckpt_engine.loop.loader_source",
    "Manifest": "ckpt_engine.store.manifest",
    "NamedParts": "ckpt_engine.loop.components",
    "NotRestored": "ckpt_engine.observe.resume_report",
    "OnChange": "ckpt_engine.data.exactness",
    "Options": "ckpt_engine.config",
    "PrivateName": "ckpt_engine.data.private_names",
    "ProcessGroupRanks": "ckpt_engine.ranks.process_group",
    "Replaced": "ckpt_engine.data.private_names",
    "Restored": "ckpt_engine.observe.resume_report",
    "ResumeError": "ckpt_engine.errors",
    "RunInstant": "ckpt_engine.loop.boundary",
    "Surroundings": "ckpt_engine.loop.components",
    "TrackedRun": "ckpt_engine.observe.curves",
    "Tracker": "ckpt_engine.loop.tracker",
    "TrainerResume": "ckpt_engine.loop.taking_over",
    "TrainerRun": "ckpt_engine.loop.trainer_run",
    "Variables": "ckpt_engine.audit.attributes",
    "WriterCurve": "ckpt_engine.observe.curves",
    "attach": "ckpt_engine.data.position",
    "hook_time": "ckpt_engine.observe.run_times",
    "load_config": "ckpt_engine.config",
    "of_framework": "ckpt_engine.whose_code",
    "on_failure": "ckpt_engine.undo",
    "parts_of": "ckpt_engine.state.sharding",
    "problems": "ckpt_engine.state.flatten",
    "require_names": "ckpt_engine.data.private_names:require",
    "write_streams": "ckpt_engine.interop.trainer_folders",
}

__all__ = [
    "BoundaryRecord",
    "CkptError",
    "Config",
    "ConfigError",
    "Counters",
    "Curves",
    "DerivedObject",
    "Engine",
    "EventFiles",
    "LiveModel",
    "LoaderPosition",
    "LoaderSource",
    "Manifest",
    "NamedParts",
    "NotRestored",
    "OnChange",
    "Options",
    "PrivateName",
    "ProcessGroupRanks",
    "Replaced",
    "Restored",
    "ResumeError",
    "RunInstant",
    "Surroundings",
    "TrackedRun",
    "Tracker",
    "TrainerResume",
    "TrainerRun",
    "Variables",
    "WriterCurve",
    "attach",
    "hook_time",
    "load_config",
    "of_framework",
    "on_failure",
    "parts_of",
    "problems",
    "require_names",
    "write_streams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)
