"""Azurite, Microsoft's own emulator of its blob store, keeps the storage contract through obstore."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from ckpt_engine import Checkpointer
from ckpt_engine.errors import StorageExistsError
from ckpt_engine.store.storage.objects_obstore import ObstoreStorage
from ckpt_engine.testing import StorageContract, listed, put
from tests.servers.s3 import free_port, listens

pytestmark = pytest.mark.slow
PROGRAM = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has, as its documentation says."""
START_SECONDS = 60.0
BIG = os.urandom(11 << 20)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one."""
    if PROGRAM is None:
        pytest.skip("azurite-blob is not installed")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    command = [PROGRAM, "--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + START_SECONDS
    while not listens("127.0.0.1", port) and time.monotonic() < end:
        time.sleep(0.05)
    yield port
    process.kill()
    process.wait(START_SECONDS)


@pytest.fixture
def container(azurite: int) -> str:
    """A new one."""
    name, date = f"c{uuid.uuid4().hex[:12]}", formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    mac = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    connection = http.client.HTTPConnection("127.0.0.1", azurite, timeout=START_SECONDS)
    path = f"/{ACCOUNT}/{name}?restype=container"
    connection.request("PUT", path, headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{mac}"})
    assert connection.getresponse().status == 201
    connection.close()
    return name


@pytest.fixture
def options(azurite: int) -> dict[str, Any]:
    """storage_options with which `az://` is that server."""
    endpoint = f"http://127.0.0.1:{azurite}/{ACCOUNT}"
    return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint, "verify": "never"}


class TestAzure(StorageContract):
    @pytest.fixture
    def storage(self, container: str, options: dict[str, Any]) -> ObstoreStorage:
        return ObstoreStorage(f"az://{container}/runs/one", {**options, "part_bytes": 5 << 20})

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its options beside the URL")


def test_big_objects_and_conditional_replacement(container: str, options: dict[str, Any]) -> None:
    """Parts, and what a lease is made of."""
    storage = ObstoreStorage(f"az://{container}/run", {**options, "part_bytes": 5 << 20})
    put(storage, "data/big", BIG)
    assert storage.get("data/big") == BIG
    assert [item.nbytes for item in listed(storage)] == [len(BIG)]
    storage.replace("lease.json", b"1", None)
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"2", None)
    there = storage.read_versioned("lease.json")
    assert there is not None
    storage.replace("lease.json", b"3", there[1])
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"4", there[1])
    assert storage.get("lease.json") == b"3"


def test_a_run_is_written_and_read(container: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The writer process writes it, with the lease on the store."""
    import torch

    given = {"url": f"az://{container}/run", "storage_options": {**options, "transport": "obstore"}}
    with Checkpointer(tiers=[given]) as checkpointer:
        checkpointer.save({"weight": torch.arange(1000.0)}, step=3).wait(60)
    state = Checkpointer(tiers=[given]).load()
    assert state is not None
    assert torch.equal(state["weight"], torch.arange(1000.0))
