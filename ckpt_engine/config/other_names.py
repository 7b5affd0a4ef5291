"""The names of our options by what other libraries call them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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

_S3 = ("endpoint_url", "key", "secret", "token", "anon", "profile", "use_ssl", "client_kwargs", "config_kwargs")
_GS = ("project", "access", "token", "consistency", "requester_pays", "session_kwargs", "endpoint_url", "location")
_AZ = ("account_name", "account_key", "connection_string", "credential", "sas_token", "client_id", "tenant_id", "anon")
_OURS = ("part_bytes", "concurrency", "timeout_seconds", "retry_seconds", "verify", "stale_upload_seconds", "transport")
STORAGE_NAMES = {
    **dict.fromkeys(("s3", "s3a"), (*_S3, *_OURS)),
    **dict.fromkeys(("gs", "gcs"), (*_GS, *_OURS)),
    **dict.fromkeys(("az", "abfs", "abfss"), (*_AZ, *_OURS)),
}
"""By scheme, `storage_options` that people use; libraries take more."""
OTHER_STORAGE_NAMES = {
    "access_key": "key",
    "access_key_id": "key",
    "aws_access_key_id": "key",
    "secret_key": "secret",
    "secret_access_key": "secret",
    "aws_secret_access_key": "secret",
    "session_token": "token",
    "aws_session_token": "token",
    "region": "client_kwargs: {region_name: ...}",
    "region_name": "client_kwargs: {region_name: ...}",
    "aws_region": "client_kwargs: {region_name: ...}",
    "keyfile": "token",
    "credentials": "token",
    "account": "account_name",
    "sas": "sas_token",
}
"""What these are called elsewhere."""


def misnamed_storage_option(scheme: str, names: Iterable[str]) -> str:
    """Of `storage_options`, the first that has another name in the library of this scheme, and that name; or ""."""
    known = STORAGE_NAMES.get(scheme, ())
    for name in names if known else ():
        near = [one for one in (OTHER_STORAGE_NAMES.get(name, ""),) if one.partition(":")[0] in known]
        near += difflib.get_close_matches(name, known, 1, 0.75)
        if name not in known and near:
            return f"{name} in storage_options is called {near[0]} here"
    return ""
