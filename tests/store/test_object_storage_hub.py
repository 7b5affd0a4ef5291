"""The Hugging Face Hub is a place for snapshots: its repositories keep the storage contract, by way of its own client.

A stand-in for the Hub answers; Xet, by which the real one takes large files, is off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import StorageError, StorageMissingError
from ckpt_engine.store.storage import open_storage
from ckpt_engine.testing import StorageContract, listed, put
from tests.real.cycle import Life, assert_survives
from tests.servers.hub import SMALL_BYTES, TOKEN, Hub, running

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside the client
constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    server.ignored.clear()
    server.refusals.clear()
    server.requests.clear()
    return server


def opened(hub: Hub, url: str, **options: Any) -> Any:
    return open_storage(url, {"endpoint": hub.url, "token": TOKEN, **options})


@pytest.fixture
def url(hub: Hub) -> str:
    """Of a root in a new repository."""
    return f"{hub.create(f'me/run-{uuid.uuid4().hex[:12]}')}/runs/one"


class TestHub(StorageContract):
    @pytest.fixture
    def storage(self, hub: Hub, url: str) -> Any:
        return opened(hub, url)

    def test_of_several_exclusive_puts_at_once_one_wins_whole(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("the Hub's client creates on no condition: what is there is looked at before")

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its options beside the URL")


def test_what_another_process_has_written_is_seen(hub: Hub, url: str) -> None:
    """Its client remembers listings for ever: what is asked is asked of the Hub."""
    mine, others = opened(hub, url), opened(hub, url)
    assert listed(mine) == []
    put(others, "manifests/a", b"one")
    assert [item.name for item in listed(mine)] == ["manifests/a"]
    assert mine.get("manifests/a") == b"one"
    put(others, "manifests/a", b"longer", exclusive=False)
    assert mine.get("manifests/a") == b"longer"
    others.delete("manifests/a")
    assert listed(mine) == []
    with pytest.raises(StorageMissingError):
        mine.get("manifests/a")


def test_a_commit_that_the_hub_refuses_for_now_is_tried_again(hub: Hub, url: str) -> None:
    """Too many requests, or another commit that came first."""
    hub.refusals.extend([429, 503])
    storage = opened(hub, url)
    put(storage, "data/a", b"one")
    assert storage.get("data/a") == b"one"


def test_a_file_that_the_repository_ignores_is_not_taken_for_written(hub: Hub, url: str) -> None:
    """The Hub leaves it out of the commit and reports success."""
    hub.ignored.append("*/data/*")
    with pytest.raises(StorageError, match=r"has nothing of.*gitignore"):
        put(opened(hub, url), "data/a", b"one")


def test_what_another_process_replaces_at_the_same_moment_is_no_error(hub: Hub, url: str) -> None:
    """Leases and catalogs are replaced: what is there right after a write may be of another size."""

    def replace(length: int) -> None:
        storage = opened(hub, url)
        for _ in range(20):
            put(storage, "lease.json", b"x" * length, exclusive=False)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(replace, [10, 20, 30]))


@pytest.mark.parametrize(("token", "said"), [(TOKEN, "repository first"), ("hf_wrong_secret", "check the credentials")])
def test_a_repository_that_is_not_there_is_named_and_no_token(hub: Hub, token: str, said: str) -> None:
    """None is ever created."""
    storage = opened(hub, "hf://me/none/runs", token=token)
    with pytest.raises(StorageError, match=said) as caught:
        put(storage, "data/a", b"one")
    assert "hf://me/none/runs" in str(caught.value)
    assert token not in str(caught.value)


def test_large_files_are_uploaded_before_the_commit_that_names_them(hub: Hub, url: str) -> None:
    """One commit for each object, and none is renamed: a history has each once."""
    data = bytes(range(256)) * (SMALL_BYTES // 128)
    storage = opened(hub, url)
    put(storage, "data/big", data)
    assert storage.get("data/big") == data
    assert [path.split("/")[5] for method, path in hub.requests if method == "POST" and "/api/" in path] == [
        "preupload",
        "commit",
    ]


@pytest.mark.long
def test_a_run_is_written_and_read(hub: Hub, url: str) -> None:
    """By the writer process, with the lease on the Hub; retention removes the older ones."""
    given = {"url": url, "storage_options": {"endpoint": hub.url, "token": TOKEN}}
    with Checkpointer(tiers=[given], keep={"last": 1}) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"weight": torch.arange(1000.0) * step}, step=step).wait(60)
    with Checkpointer(tiers=[given]) as another:
        state = another.load()
        assert state is not None
        assert torch.equal(state["weight"], torch.arange(1000.0) * 2)
        assert [info.step for info in another.snapshots()] == [2]


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(hub: Hub, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is the only place: killed twice, once with its writer, and resumed each time, bit for bit."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    tier = {"url": url, "storage_options": {"endpoint": hub.url, "token": TOKEN}}
    config = tmp_path / "ckpt.yaml"
    config.write_text(json.dumps({"tiers": [tier], "keep": {"last": 3}, "on_error": "raise"}))
    lives = [Life(config, 3), Life(config, 3, with_writer=True), Life(config)]
    began = assert_survives(tmp_path, lives, 60)
    assert began[0] == 0 < began[1] < began[2]
