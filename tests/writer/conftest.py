"""Writers that are gone when a test ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.writer import persister, replicate, secondary_tiers
from ckpt_engine.writer.client import WriterClient
from ckpt_engine.writer.launch import ProcessWriter, ThreadWriter, completed
from tests.support import interpreters
from tests.writer.staged import WAIT_SECONDS, Stage
from tests.writer.tiered import Run


class Writers:
    """Starts writers of one kind on one run."""

    def __init__(self, kind: type[ProcessWriter] | type[ThreadWriter], root: Path) -> None:
        self.kind = kind
        self.root = root
        self._started: list[WriterClient] = []

    def start(self, **changes: Any) -> Any:
        config = completed(WriterConfig(**{"url": str(self.root), "drain_seconds": 30.0, **changes}))
        client = self.kind.start(config)
        self._started.append(client)
        return client

    def close(self) -> None:
        for client in self._started:
            assert client.close(WAIT_SECONDS)


@pytest.fixture(params=[ProcessWriter, ThreadWriter], ids=["process", "thread"])
def writers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writers]:
    """Each kind of writer in turn."""
    kept = Writers(request.param, tmp_path / "run")
    yield kept
    kept.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Writers]:
    """Writer processes."""
    kept = Writers(ProcessWriter, tmp_path / "run")
    yield kept
    kept.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A small slot."""
    found = Stage()
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run that tries a failing tier again at once."""
    made = Run(tmp_path, stage)
    monkeypatch.setattr(secondary_tiers, "open_storage", made.open_storage)
    monkeypatch.setattr(persister, "open_storage", made.open_storage)
    monkeypatch.setattr(replicate, "PAUSES", GrowingPauses(0.01, 0.02))
    yield made
    for weather in made.weather.values():
        weather.up()
    made.close()


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    """Whatever a test opens is closed when its fixtures are."""
    interpreters.server(interpreters.ENGINE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    deadline = time.monotonic() + WAIT_SECONDS
    while (after := len(list(Path("/proc/self/fd").iterdir()))) > before and time.monotonic() < deadline:
        time.sleep(0.01)  # threads that are not joined may be about to end
    assert after <= before, f"{after - before} descriptors more than before"
