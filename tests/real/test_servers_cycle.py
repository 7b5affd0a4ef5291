"""A whole run on rclone and on OpenStack Swift: saved, killed, resumed, bit for bit the run without a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.real.cycle import Life, assert_survives
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 60


def _config(path: Path, tiers: list[Any], **more: Any) -> Path:
    path.write_text(json.dumps({"tiers": tiers, "keep": {"last": 3}, **more}))
    return path


def _steps(url: str, options: dict[str, Any]) -> list[int]:
    return [info.step for info in Repository(open_storage(url, options)).list()]


def test_a_killed_run_on_a_server_goes_on_exactly(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """The server is the only place: killed twice, once with its writer, and resumed each time."""
    place = {"url": f"s3://{bucket}/run", "storage_options": server.options()}
    config = _config(tmp_path / "ckpt.yaml", [place], on_error="raise")
    lives = [Life(config, 3), Life(config, 3, with_writer=True), Life(config)]
    began = assert_survives(tmp_path, lives, STEPS)
    print(f"{server.kind}: began at steps {began} of {STEPS}")
    assert began[0] == 0 < began[1] < began[2]
    steps = _steps(place["url"], place["storage_options"])
    assert len(steps) == 3
    assert steps[-1] == STEPS


def test_a_run_whose_disk_is_gone_goes_on_from_the_server(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """A disk and a server: the machine vanishes with its disk, and another one goes on with what the server has."""
    far: dict[str, Any] = {"url": f"s3://{bucket}/run", "storage_options": server.options(), "keep": {"last": 2}}
    near = tmp_path / "near"
    config = _config(tmp_path / "ckpt.yaml", [str(near), far], on_error="raise")

    def copied() -> list[int]:
        return _steps(far["url"], far["storage_options"])

    lives = [
        Life(config, 20, with_writer=True, ready=copied),
        Life(config, 5, before=lambda: shutil.rmtree(near)),
        Life(config),
    ]
    began = assert_survives(tmp_path, lives, STEPS, resumes_at_acknowledged=False)
    print(f"{server.kind}: began at steps {began} of {STEPS}")
    assert began[0] == 0 < began[1]
    assert copied()[-1] == STEPS
