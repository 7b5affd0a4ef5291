"""A container gives little to /dev/shm: the arena does not live there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SECONDS = 120.0
INSIDE = """
import json, os, sys
import torch
from ckpt_engine import Checkpointer

with Checkpointer(tiers=["memory", sys.argv[1]]) as ckpt:
    for step in range(1, 6):
        ckpt.save({"w": torch.full((1_250_000,), float(step))}, step=step, durable=step == 3).wait(60)
    arena, shm = ckpt.engine._pipeline.slots.nbytes(), os.statvfs("/dev/shm")
    used = (shm.f_blocks - shm.f_bfree) * shm.f_frsize
with Checkpointer(tiers=["memory", sys.argv[1]]) as ckpt:
    state = ckpt.load()
print(json.dumps({"arena": arena, "shm": shm.f_blocks * shm.f_frsize, "used": used, "last": float(state["w"][-1])}))
"""


@pytest.mark.long
def test_the_arena_needs_no_shared_memory_mount(tmp_path: Path) -> None:
    """Slots of 5 MB with 8 MB in /dev/shm: they are all there, and nothing of the mount is used."""
    namespace = ["unshare", "--mount", "--map-root-user", "--user"]
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" -c "$1" "$2"'
    try:
        probe = subprocess.run(
            [*namespace, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if probe.returncode != 0:
        pytest.skip("mount namespaces are forbidden here")
    done = subprocess.run(
        [*namespace, "bash", "-c", script, sys.executable, INSIDE, str(tmp_path / "run")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shm"] == 8 << 20
    assert found["arena"] > found["shm"]
    assert found["used"] == 0
    assert found["last"] == 5.0
