"""`ckpt cp` to a real S3 server and back, over a network that breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.copy import transfer
from ckpt_engine.store import names
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

Ckpt = Callable[..., Any]


@pytest.mark.long
def test_a_download_that_breaks_is_continued_within_the_file(
    ckpt: Ckpt,
    run_folder: Any,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command fetches only the ranges that are missing; every byte is right, and nothing is left over."""
    monkeypatch.setattr(transfer, "RANGE_BYTES", 100_000)
    rng = np.random.default_rng(0)
    snapshot = run_folder.add(1, {f"state_dict/w{i:02d}": rng.standard_normal(10_000) for i in range(30)})
    yaml = tmp_path / "s3.yaml"
    options = json.dumps(moto.options(wire.url, retry_seconds=0.2, timeout_seconds=60.0))
    yaml.write_text(f"tiers: [{{url: 's3://{bucket}/run', storage_options: {options}}}]")
    assert ckpt("cp", run_folder.path, yaml).code == 0

    target, data = tmp_path / "back", names.data_name(snapshot)
    wire.rule("refuse", "GET", "data/.*safetensors$", after=12)
    broken = ckpt("cp", yaml, target)
    assert broken.code == 2 and "[CKPT300]" in broken.err
    assert not (target / data).exists()
    wire.clear()
    wire.log.clear()
    done = ckpt("cp", yaml, target, "--json")
    assert done.code == 0, done.err
    size = run_folder.data_file(snapshot).stat().st_size
    assert 0 < done.json["sent_bytes"] < size * 0.8
    assert (target / data).read_bytes() == run_folder.data_file(snapshot).read_bytes()
    assert [path.name for path in (target / "data").iterdir()] == [Path(data).name]
    assert ckpt("verify", target).code == 0
