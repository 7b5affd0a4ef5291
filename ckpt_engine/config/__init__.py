"""The one schema of all options: YAML files, keywords and nested mappings become the same frozen `Config`.

load_config("ckpt.yaml")                           # a YAML file
load_config("/data/run1", overhead="1%")           # a folder or storage URL, plus keywords
load_config({"tiers": "/data/run1"}, slots=1)      # a mapping; keywords win
"""

from ckpt_engine.config.load_config import load_config
from ckpt_engine.config.models import OPTION_NAMES, Config, Tier
from ckpt_engine.config.sections import Best, Keep, Preemption, parse_duration_seconds, parse_fraction

__all__ = [
    "OPTION_NAMES",
    "Best",
    "Config",
    "Keep",
    "Preemption",
    "Tier",
    "load_config",
    "parse_duration_seconds",
    "parse_fraction",
]
