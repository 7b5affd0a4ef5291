"""What people write first into a ckpt.yaml: each mistake is named, with what to write instead, and none passes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.config import load_config
from ckpt_engine.errors import ConfigError
from tests.cli.conftest import terminal

__all__ = ["terminal"]

NAMES = {
    "every_n_steps": "save_steps save_interval_steps every_n_train_steps every_steps interval save_interval save_every "
    "save_freq checkpoint_interval every every_n_epochs save_strategy save_on_train_epoch_end",
    "every_seconds": "train_time_interval",
    "last": "max_to_keep keep_last keep_last_n num_to_keep max_checkpoints save_total_limit total_limit save_last",
    "best": "save_top_k metric_for_best_model greater_is_better keep_best best",
    "keep.best": "monitor mode k",
    "tiers": "dirpath output_dir dir ckpt_dir checkpoint_dir save_dir root path folder directory location url",
    "codec": "compression compress",
    "endpoint_url": "endpoint endpoint_url",
    "overhead": "budget overhed overheads",
    "max_lost_work": "rpo max_lost_wrk",
    "grace": "grace_period",
    "signals": "signals",
    "given": "async async_save filename safe_serialization automatic_checkpoint_naming",
    "resume": "resume_from_checkpoint resum",
    "ckpt export": "save_weights_only save_only_model",
    "guard": "gaurd",
    "slots": "slot",
}
VALUES = {
    "keep: three": "such as {last: 3}",
    "keep: [1, 2]": "such as {last: 3}",
    "keep: {best: val_loss}": "such as {monitor: val_loss, mode: min}",
    "keep: {best: {mode: min}}": "monitor: missing",
    "keep: {best: {monitor: loss, mode: minimum}}": "did you mean 'min'",
    "keep: {last: 0}": "at least 1",
    "keep: {last: -1}": "at least 1",
    "keep: {last: all}": "whole number",
    "keep: {quota: 500}": "a unit, such as '500 GB'",
    "keep: {quota: 5%}": "must be a size",
    "keep: {quota: 500 Mb}": "must be a size",
    "keep: {min_free: 10}": "a unit, such as '10 GB'",
    "keep: {daily: yes}": "whole number",
    "overhead: 1": "for 1 percent write '1%'",
    "overhead: 5": "for 5 percent write '5%'",
    "overhead: 200%": "below 100%",
    "overhead: 0": "above 0%",
    "overhead: low": "a share such as '1%'",
    "max_lost_work: 10": "a unit, such as '10 min'",
    "max_lost_work: '10'": "a unit, such as '10 min'",
    "max_lost_work: 0.5": "a unit, such as '0.5 min'",
    "max_lost_work: ten minutes": "a duration such as '10 min'",
    "max_lost_work: 1h30": "a duration such as '10 min'",
    "max_lost_work: {node: 1 min}": "process, machine, site",
    "mtbf: often": "a duration such as '10 min'",
    "every_n_steps: 10 min": "whole number",
    "every_n_steps: 0": "at least 1",
    "every_seconds: -5": "above 0",
    "at_end: maybe": "true or false",
    "at_end: 1": "true or false",
    "guard: true": "'off' or 'nan'",
    "resume: true": "'auto' or 'off'",
    "resume: latest": "'auto' or 'off'",
    "on_error: ignore": "'raise_at_end' or 'raise' or 'warn'",
    "writer: threads": "did you mean 'thread'",
    "slots: 1000": "at most 64",
    "lazy: never": "'auto' or 'on' or 'off'",
    "log: off": "a mapping",
    "log: {loggers: none}": "'on' or 'full' or 'off'",
    "status: 8080": "a mapping",
    "status: {port: 99999}": "at most 65535",
    "preemption: SIGTERM": "a mapping",
    "preemption: {signals: TERMINATE}": "SIGTERM",
    "preemption: {grace: 0}": "above 0",
    "pickle: true": "a list of paths",
    "seal:": "remove it for a run that is not sealed",
    "seal: ~/ckpt.key": "such as {key: ~/ckpt.key}",
    "seal: {key: 3}": "the path of a key file, or a command as a list",
    "seal: {sign: {file: a}}": "the path of a key file, or a command as a list",
}
PLACES = {
    "$NOT_SET_ANYWHERE/run": "NOT_SET_ANYWHERE is not set",
    "${NOT_SET_ANYWHERE}/run": "NOT_SET_ANYWHERE is not set",
    "s3:/bucket/run": "s3://bucket/run",
    "s3//bucket/run": "s3://bucket/run",
    "file://data/run1": "three slashes",
    "~nobody-here/run": "no home folder",
    "[]": "must name a folder",
    "[memory]": "memory does not outlive the machine",
    "[/a, /a]": "the same place",
    "[/a, file:///a/]": "the same place",
    "[/a, {url: /b, seal: }]": "remove it for a run that is not sealed",
    "[/a, memory]": "comes first",
    "[{url: /a, parity: [4, 2]}]": "parity: must be a mapping such as {data: 8, parity: 2}",
    "[{url: /a, parity: {data: 25}}]": "parity.data: must be a whole number of at most 24",
    "[{url: /a, parity: 4}]": "another tier takes {data: 8, parity: 2}",
    "[{url: /a, every: 10 min}]": "the nearest tier takes every durable snapshot",
    "[/a, {url: /b, bandwidth: 200}]": "a unit, such as '200 MB/s'",
    "[/a, {url: /b, bandwidth: 200 MB}]": "a rate such as '200 MB/s'",
    "[/a, {url: /b, codec: gzip}]": "'raw' or 'zstd'",
    "[/a, {url: /b, codec: fp16}]": "lose bits",
    "[/a, {url: /b, kep: {}}]": "did you mean 'keep'",
    "[/a, {path: /b}]": "here it is url",
}
TEXTS = [
    *((f"{name}: 5\ntiers: /d", answer) for answer, names in NAMES.items() for name in names.split()),
    *((f"{text}\ntiers: /d", answer) for text, answer in VALUES.items()),
    *((f"tiers: {place}", answer) for place, answer in PLACES.items()),
    ("overhead: 1%", "tiers: missing"),
    ("- /data/run1", "must contain a mapping"),
    ("tiers: {url: s3://b/r, storage_options: {endpoint: x}}", "is called endpoint_url here"),
    ("tiers: {url: s3://b/r, storage_options: {secret_key: x}}", "secret_key in storage_options is called secret here"),
    ("tiers: {url: s3://b/r, storage_options: {region: eu}}", "client_kwargs: {region_name: ...}"),
    ("tiers: {url: gs://b/r, storage_options: {keyfile: x}}", "is called token here"),
    ("tiers: {url: az://b/r, storage_options: {account: x}}", "is called account_name here"),
    ("tiers: /d\ntiers: /e", "given twice"),
    ("tiers: /d\n\tslots: 2", "not valid YAML"),
]


def test_there_are_a_hundred() -> None:
    """As many as the list of plausible mistakes wants."""
    assert len(TEXTS) >= 100


@pytest.mark.parametrize(("text", "answer"), TEXTS)
def test_a_mistake_is_named_at_once(text: str, answer: str, tmp_path: Path, terminal: Callable[..., Any]) -> None:
    """The error has the key and what to write; in a terminal its first line has at most 80 characters."""
    file = tmp_path / "ckpt.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert answer in caught.value.message
    screen = terminal("ls", file)
    assert screen.code == 2
    assert screen.lines[0].startswith("ckpt: [CKPT100] ") and len(screen.lines[0]) <= 80, screen.lines


def test_an_empty_seal_of_a_tier_is_refused_in_a_mapping_too() -> None:
    """Who reads YAML for us gives None: nothing is trained in the clear for that."""
    with pytest.raises(ConfigError, match=r"tiers\.0\.seal: has no keys; remove it"):
        load_config(tiers=[{"url": "/d", "seal": None}])


def test_numbers_without_a_unit_are_of_python() -> None:
    """A keyword counts seconds and bytes; a duration may be a `timedelta`."""
    config = load_config("/d", max_lost_work=timedelta(minutes=10), every_seconds=90, keep={"quota": 5_000_000})
    assert (config.max_lost_work, config.every_seconds, config.keep.quota) == (600.0, 90.0, 5_000_000)
