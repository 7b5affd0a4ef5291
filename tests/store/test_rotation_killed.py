"""`ckpt keys rotate`, killed with SIGKILL before each call that writes, loses nothing, and the same command ends it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import SealError
from ckpt_engine.store.repository import RunRecord, encode_record
from ckpt_engine.store.storage.seal_keys import KeyPair
from tests.store.test_sealed import OBJECTS, accepted, filled, key, sealed  # noqa: F401

WAIT_SECONDS = 60
PUT = {**OBJECTS, "ckpt.json": encode_record(RunRecord("run", 1.0))}
MORTAL = """
import os, signal, sys
from ckpt_engine.cli.main import main

left = int(sys.argv[1])

def deadly(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

for name in ("write", "writev", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "link", "rename", "replace",
             "unlink", "remove", "mkdir"):
    setattr(os, name, deadly(getattr(os, name)))
main(["keys", "rotate", sys.argv[2]])
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rotate(yaml: Path, call: int) -> int:
    """Rotate in a process that dies before its writing call of this number; 0: it does not. Returns its status."""
    command = [sys.executable, "-c", MORTAL, str(call), str(yaml)]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


def files(root: Path) -> dict[str, bytes]:
    """The bytes of all files with a name but the lease."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if name != "lease.json"}


def opened(root: Path, **options: Any) -> set[str]:
    """The objects that these keys open, each as it was put."""
    found = accepted(sealed(root, **options))
    assert found.items() <= PUT.items()
    return set(found)


def test_a_rotation_that_is_killed_loses_nothing_and_is_ended_by_the_same_command(
    tmp_path: Path,
    key: str,  # noqa: F811
) -> None:
    """Each key is the old one or the new one, whole; each object is opened by one of both, and by no stranger."""
    root, was, yaml = tmp_path / "run", tmp_path / "was", tmp_path / "ckpt.yaml"
    new, stranger = str(tmp_path / "new-key"), str(tmp_path / "stranger")
    signers = [KeyPair.read(key).recipient, KeyPair.make(new).recipient]
    KeyPair.make(stranger)
    filled(was, key=key).put("ckpt.json", [memoryview(PUT["ckpt.json"])], exclusive=False)
    seal = {"key": key, "to": signers[1:], "sign": new, "signed_by": signers[:1]}
    yaml.write_text(json.dumps({"tiers": str(root), "seal": seal}))
    before, call, changed = files(was), 0, set[int]()
    while True:
        call += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(was, root)
        status = rotate(yaml, call)
        there = files(root)
        wrapped = {name for name in before if there[name] != before[name]}
        changed.add(len(wrapped))
        assert all(name.startswith("keys/") and not name.startswith("keys/root") for name in wrapped)
        by_old, by_new = opened(root, key=key), opened(root, key=new)
        assert by_old | by_new == PUT.keys()
        assert not by_old & by_new or len(wrapped) % 2, "of the two copies of a key one is for the old, one for the new"
        assert not opened(root, key=stranger, signed_by=signers)
        assert opened(root, key=new, signed_by=signers) == by_new
        if status == 0:
            break
        assert rotate(yaml, 0) == 0
        assert opened(root, key=new) == PUT.keys() and not opened(root, key=key)
        after = files(root)
        assert {name: after[name] for name in before if not name.startswith("keys/")} == {
            name: text for name, text in before.items() if not name.startswith("keys/")
        }
        with pytest.raises(SealError, match="not signed by"):
            sealed(root, key=key, signed_by=signers[:1]).get("ckpt.json")
    assert changed == {0, 1, 2, 3, 4}, "there are kills before, between and after both copies of two keys"
    assert call > 6
