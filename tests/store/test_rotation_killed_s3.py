"""`ckpt keys rotate` on an S3 server, killed with SIGKILL at each of its requests, loses nothing and is continued."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import SealError
from ckpt_engine.store import names
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.seal_keys import KEYS, KeyPair, KeyRing
from ckpt_engine.store.storage.sealed import SealedStorage
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.store.test_rotation_killed import PUT
from tests.store.test_sealed import accepted, key  # noqa: F401 - a fixture

Ckpt = Callable[..., Any]
WAIT_SECONDS = 60
WRITERS = 4
"""Processes that have written the run, each with a key of its own."""
ROTATE = "import sys; from ckpt_engine.cli.main import main; main(['keys', 'rotate', sys.argv[1]])"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Place:
    """A sealed run on a server, and the objects that it had before."""

    def __init__(self, url: str, options: dict[str, Any], key: str) -> None:
        self.plain = open_storage(url, options)
        for number in range(WRITERS):
            self.sealed(key=key).put(f"pins/0000000{number}-s0000000001-aaaaaaaa.json", [memoryview(b"{}")])
        writer = self.sealed(key=key)
        for name, text in PUT.items():
            writer.put(name, [memoryview(text)], exclusive=False)
        self.was = self.objects()

    def sealed(self, **options: Any) -> SealedStorage:
        return SealedStorage(self.plain, KeyRing(**options))

    def objects(self) -> dict[str, bytes]:
        listed = [item for item in self.plain.list("") if item.name != names.LEASE]
        return {item.name: self.plain.get(item.name, 0, item.nbytes) for item in listed}

    def reset(self) -> None:
        for name, data in self.was.items():
            if name.startswith(KEYS):
                self.plain.put(name, [memoryview(data)], exclusive=False)

    def opened(self, **options: Any) -> set[str]:
        """The objects that these keys open, each as it was put."""
        found = accepted(self.sealed(**options))
        assert found.items() <= PUT.items()
        return set(found)


def rotated(yaml: Path, wire: Wire, action: str, request: int) -> int:
    """Rotate in a process that is killed at its request of this number, before or after the server has acted."""
    with subprocess.Popen([sys.executable, "-c", ROTATE, str(yaml)], stderr=subprocess.PIPE) as process:
        wire.rule(action, times=1, after=request, then=lambda: os.kill(process.pid, signal.SIGKILL))
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    wire.clear()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode


@pytest.mark.parametrize("action", ["refuse", "lost"])
def test_a_rotation_that_is_killed_on_a_server_loses_nothing_and_is_ended_by_the_same_command(
    ckpt: Ckpt, tmp_path: Path, key: str, moto: S3Server, bucket: str, wire: Wire, action: str
) -> None:
    """Each key is the old one or the new one, whole, whether the server has carried out the request or not."""
    new, yaml, url = str(tmp_path / "new-key"), tmp_path / "ckpt.yaml", f"s3://{bucket}/run"
    signers = [KeyPair.read(key).recipient, KeyPair.make(new).recipient]
    place = Place(url, moto.options(), key)
    seal = {"key": key, "to": signers[1:], "sign": new, "signed_by": signers[:1]}
    tier = {"url": url, "storage_options": moto.options(wire.url)}
    yaml.write_text(json.dumps({"tiers": [tier], "seal": seal}))
    kills, changed = 0, set[int]()
    for request in range(1000):
        place.reset()
        status = rotated(yaml, wire, action, request)
        there = place.objects()
        wrapped = {name for name in place.was if there[name] != place.was[name]}
        changed.add(len(wrapped))
        assert there.keys() == place.was.keys()
        assert all(name.startswith(KEYS) and not name.startswith(f"{KEYS}root") for name in wrapped)
        by_old, by_new = place.opened(key=key), place.opened(key=new)
        assert by_old | by_new == PUT.keys()
        assert not by_old & by_new or len(wrapped) % 2, "of the two copies of a key one is for the old, one for the new"
        if status == 0:
            break
        kills += 1
        (tmp_path / "kills").write_text(str(kills))
        assert ckpt("keys", "rotate", yaml).code == 0
        assert place.opened(key=new) == PUT.keys() and not place.opened(key=key)
        with pytest.raises(SealError, match="not signed by"):
            place.sealed(key=key, signed_by=signers[:1]).get("ckpt.json")
    assert len(changed) > 2 and kills > 10, (changed, kills)
