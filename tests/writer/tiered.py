"""A run with several tiers, each of which a test can make fail, hang or slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.copy.job import TierConfig, WriterConfig
from ckpt_engine.observe.events import (
    SnapshotReplicated,
)
from ckpt_engine.store import names
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.client import Message
from ckpt_engine.writer.launch import ThreadWriter, completed
from ckpt_engine.writer.run_records import TierStatus, read_status
from tests.writer.faulty import Faulty, Weather
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome, settle


class Run:
    """A writer thread on a nearest folder and two further ones, each with its own faults."""

    def __init__(self, root: Path, stage: Stage) -> None:
        self.near, self.far, self.third = root / "near", root / "far", root / "third"
        self.weather = {path: Weather() for path in (self.near, self.far, self.third)}
        self.stage = stage
        self.heard: list[Message] = []
        self.client: ThreadWriter | None = None

    def open_storage(self, url: Any, options: Any = None) -> Any:
        path = Path(str(url).removeprefix("file://"))
        return Faulty(path, self.weather[path]) if path in self.weather else open_storage(url, options or {})

    def start(self, *tiers: TierConfig, **changes: Any) -> ThreadWriter:
        fields: dict[str, Any] = {"url": str(self.near), "drain_seconds": 30.0, "tiers": tiers or (self.tier(),)}
        self.client = ThreadWriter.start(completed(WriterConfig(**{**fields, **changes})))
        self.stage.share(self.client)
        return self.client

    def tier(self, path: Path | None = None, **changes: Any) -> TierConfig:
        return TierConfig(str(path or self.far), **changes)

    def save(self, step: int, *, ok: bool = True, **changes: Any) -> str | None:
        assert self.client is not None
        job = self.stage.job(step, **changes)
        self.client.submit(job)
        done = outcome(self.client, job.job, self.heard)
        assert done.ok is ok, done
        settle(self.client)  # retention too
        return done.snapshot_id

    def until(self, found: Callable[[Message], bool]) -> Message:
        """Wait until something like this was heard since the start or the last `forget`."""
        assert self.client is not None
        seen, deadline = 0, time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for message in self.heard[seen:]:
                if found(message):
                    return message
            seen = len(self.heard)
            self.client.wait(1.0)
            self.heard += self.client.poll()
        raise AssertionError(f"never heard; only {self.heard}")

    def until_copied(self, step: int, path: Path | None = None) -> SnapshotReplicated:
        url = f"file://{path or self.far}"
        found = self.until(lambda m: isinstance(m, SnapshotReplicated) and m.step == step and m.tier == url)
        assert isinstance(found, SnapshotReplicated)
        return found

    def until_rest(self, path: Path | None = None) -> None:
        """Wait until a further tier wants nothing and is not asked for anything."""
        assert self.client is not None
        fleet, deadline = self.client._queue.persister.secondary, time.monotonic() + WAIT_SECONDS
        assert fleet is not None
        (found,) = (one for one in fleet.replicators if one.tier.url == f"file://{path or self.far}")
        while not found.idle:
            assert time.monotonic() < deadline, f"{found.tier.url} does not come to rest"
            time.sleep(0.005)

    def state_of(self, path: Path, state: str, *, copying: bool = False) -> TierStatus:
        """What the status file says of a tier, once it says this of it; it is written on a thread of its own."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            status = read_status(LocalStorage(self.near))
            for tier in status.tiers if status else ():
                if (tier.url, tier.state) == (f"file://{path}", state) and (tier.copying is not None or not copying):
                    return tier
            assert time.monotonic() < deadline, f"{path} is never said to be {state}: {status}"
            time.sleep(0.01)

    def all(self, kind: type) -> list[Any]:
        if self.client is not None:
            self.heard += self.client.poll()
        return [message for message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        if self.client is not None:
            for weather in self.weather.values():
                weather.gate.set()
            assert self.client.close(WAIT_SECONDS)
            self.heard += self.client.poll()
            self.client._queue.join(WAIT_SECONDS)
            assert not self.client._queue.is_alive()
            self.client = None


def steps(root: Path) -> list[int]:
    return [info.step for info in check_all(root)]


def same_files(one: Path, other: Path, names: list[str]) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def sent(run: Run) -> list[int]:
    """The steps of all manifests put to the far tier, in order."""
    parsed = [names.manifest_id(name) for name in run.weather[run.far].puts]
    return [one.step for one in parsed if one]
