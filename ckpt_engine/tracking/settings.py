"""What the options of a run mean for its cadence."""

from __future__ import annotations

import torch

from ckpt_engine.config import Config
from ckpt_engine.frequency.settings import FrequencySettings
from ckpt_engine.snapshot.laziness import copies_lazily


def cadence_settings(config: Config) -> FrequencySettings:
    """The triggers and the budget that the user asked for."""
    return FrequencySettings.from_options(**config.frequency_options())


def prepare_share(config: Config, device: torch.device) -> float | None:
    """The share of a core that making the arena ready may take: the budget, where training pays for it.

    Args:
        device: where training computes.
    """
    training_pays = not copies_lazily("auto", device)
    budget_decides = cadence_settings(config).overhead is not None and config.max_lost_work is None
    return config.overhead if training_pays and budget_decides else None
