"""The names of our options by what other libraries call them."""

from __future__ import annotations

OTHER_NAMES = {
    # What people write first
    "interval": "every_n_steps or every_seconds, or overhead",
    "save_interval": "every_n_steps or every_seconds, or overhead",
    "save_every": "every_n_steps or every_seconds, or overhead",
    "save_freq": "every_n_steps or every_seconds, or overhead",
    "checkpoint_interval": "every_n_steps or every_seconds, or overhead",
    "save_interval_steps": "every_n_steps",
    "every": "every_n_steps or every_seconds",
    "every_steps": "every_n_steps",
    "budget": "overhead",
    "rpo": "max_lost_work",
    "max_to_keep": "keep: {last: ...}",
    "num_to_keep": "keep: {last: ...}",
    "keep_last": "keep: {last: ...}",
    "keep_last_n": "keep: {last: ...}",
    "max_checkpoints": "keep: {last: ...}",
    "keep_best": "keep: {best: {monitor: ...}}",
    "best": "keep: {best: {monitor: ...}}",
    "compression": "tiers: [{url: ..., codec: zstd}]",
    "compress": "tiers: [{url: ..., codec: zstd}]",
    "dir": "tiers",
    "ckpt_dir": "tiers",
    "checkpoint_dir": "tiers",
    "save_dir": "tiers",
    "root": "tiers",
    "endpoint": "storage_options: {endpoint_url: ...}",
    "endpoint_url": "storage_options: {endpoint_url: ...}",
    "region": "storage_options: {client_kwargs: {region_name: ...}}",
    "grace_period": "preemption: {grace: ...}",
    "signals": "preemption: {signals: [...]}",
    "async": "given: snapshots are written behind training",
    # ModelCheckpoint
    "dirpath": "the first argument, or tiers",
    "filename": "given: `ckpt ls` lists the snapshots by step",
    "save_top_k": "keep: {best: {monitor: ..., k: ...}}",
    "save_last": "keep: {last: ...}",
    "every_n_train_steps": "every_n_steps",
    "train_time_interval": "every_seconds",
    "every_n_epochs": "on_validation_end, or every_n_steps",
    "save_on_train_epoch_end": "on_validation_end, or every_n_steps",
    "save_weights_only": "`ckpt export`",
    # Accelerate
    "output_dir": "the first option, or tiers",
    "total_limit": "keep: {last: ...}",
    "automatic_checkpoint_naming": "given: `ckpt ls` lists the snapshots by step",
    "safe_serialization": "given: data files are safetensors",
    # transformers
    "save_steps": "every_n_steps",
    "save_strategy": "every_n_steps, every_seconds or on_validation_end",
    "save_total_limit": "keep: {last: ...}",
    "save_only_model": "`ckpt export`",
    "metric_for_best_model": "keep: {best: {monitor: ...}}",
    "greater_is_better": "keep: {best: {mode: max}}",
    "resume_from_checkpoint": "resume",
    # torch.distributed.checkpoint
    "checkpoint_id": "the step that `save` is given",
    "async_save": "given: snapshots are written behind training",
    "storage_writer": "ckpt_engine.dcp.CkptWriter",
    "storage_reader": "ckpt_engine.dcp.CkptReader",
    # Under keep
    "tags": "`ckpt pin --tag`: what is pinned stays without a rule",
}
"""What options of others are called here."""
