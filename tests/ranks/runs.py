"""Several ranks as threads of one process, each with its own checkpointer: quick, and with real writers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import RanksError, WaitTimeoutError
from ckpt_engine.writer import commit_of_ranks

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
MOST_BYTES = 8 << 20
"""The server of torch's `TCPStore` takes no larger values."""


class SharedStore:
    """A store that the ranks of one process share."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        if len(value.encode()) > MOST_BYTES:
            raise RanksError(f"{key} is too large: the connection is reset")
        with self._changed:
            self._found[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        with self._changed:
            return self._found.get(key)

    def add(self, key: str) -> int:
        with self._changed:
            found = int(self._found.get(key, 0)) + 1
            self._found[key] = str(found)
            self._changed.notify_all()
            return found

    def remove(self, key: str) -> None:
        with self._changed:
            self._found.pop(key, None)

    def wait(self, key: str, timeout: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._found, min(timeout, PATIENCE_SECONDS)):
                raise WaitTimeoutError(f"no rank said {key}")
            return self._found[key]


class ThreadRanks:
    """One of several ranks in this process."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: SharedStore,
        own: Collection[str] = ("own",),
        wait_seconds: float = PATIENCE_SECONDS,
        alike: Callable[[tuple[Any, ...]], bool] = lambda path: True,
        node: str = "here",
    ) -> None:
        self.node, self.address = node, "127.0.0.1"
        self.rank, self.size, self.store = rank, size, store
        self.own = frozenset(own)
        self.wait_seconds = wait_seconds
        self._alike = alike

    def divides(self, path: tuple[Any, ...]) -> bool:
        return self._alike(path)


class Patience:
    """Of coordinators that wait for the parts of other ranks: as long as it takes, and none at all once it is over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.over = False
        self._ahead = 0.0
        patch.setattr(commit_of_ranks, "time", SimpleNamespace(monotonic=self._now))

    def _now(self) -> float:
        if self.over:
            self._ahead += 2 * PATIENCE_SECONDS  # each time somebody looks
        return time.monotonic() + self._ahead


def on_all(work: Callable[[int], T], size: int) -> list[T]:
    """What `work` returns for each rank, each on a thread of its own; raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as err:  # noqa: BLE001 - raised below
            errors.append(err)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def open_ranks(root: Any, size: int, *, wait_seconds: float = PATIENCE_SECONDS, **options: Any) -> list[Checkpointer]:
    """One checkpointer per rank, not started."""
    store = SharedStore()
    return [
        Checkpointer(root, ranks=ThreadRanks(rank, size, store, wait_seconds=wait_seconds), writer="thread", **options)
        for rank in range(size)
    ]
