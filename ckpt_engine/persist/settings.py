"""What the options of a run mean for its writer."""

from __future__ import annotations

from ckpt_engine.config import Config, Tier
from ckpt_engine.persist.job import TierConfig, WriterConfig

LEASE_WAIT_SECONDS = 60.0
DRAIN_SECONDS = 600.0
"""How long a writer whose trainer is gone, or waits no more, may go on."""
REUNION_WAIT_SECONDS = 240.0
"""Writers of dead ranks may write several shares each, and wait for each other; less than ranks wait to start."""


def writer_config(config: Config, *, memory: bool, ranks: bool) -> WriterConfig:
    """How the writer of a run works.

    Args:
        memory: whether it holds the newest snapshot in memory.
        ranks: whether it is one of several.
    """
    nearest, *further = config.tiers
    return WriterConfig(
        url=nearest.url,
        storage_options=nearest.for_storage(),
        keep=config.root_keep_rules(),
        drain_seconds=DRAIN_SECONDS + config.wait_at_end,
        end_wait_seconds=config.wait_at_end,
        lease_wait_seconds=REUNION_WAIT_SECONDS if ranks and memory else LEASE_WAIT_SECONDS,
        tiers=tuple(_tier(config, tier) for tier in further),
        fatal=nearest.on_failure == "fail",
        memory=memory,
        linger_seconds=config.linger,
        codec=nearest.codec,
    )


def _tier(config: Config, tier: Tier) -> TierConfig:
    return TierConfig(
        url=tier.url,
        storage_options=tier.for_storage(),
        keep=config.keep_rules(tier),
        every_seconds=tier.every,
        every_n_steps=tier.every_n_steps,
        bandwidth_bytes_per_second=tier.bandwidth,
        fatal=tier.on_failure == "fail",
        codec=tier.codec,
    )
