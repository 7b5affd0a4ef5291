"""What training draws at random does not depend on an object store, not even with the writer in its own process."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Event, TierDegraded
from tests.store.test_object_storage_secrets import options

WAIT_SECONDS = 60.0


@pytest.fixture
def dying() -> Iterator[tuple[str, list[int]]]:
    """A server that resets every connection, and the list that counts them."""
    met: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def reset() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            met.append(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()

    thread = threading.Thread(target=reset)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", met
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(WAIT_SECONDS)


class _Seen(list[Event]):
    """A sink that keeps the events."""

    def emit(self, event: Event) -> None:
        self.append(event)


def drawn() -> tuple[object, ...]:
    """Where the random streams of this process are."""
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


@pytest.mark.slow
def test_a_dying_tier_draws_nothing_from_the_streams_of_training(tmp_path: Path, dying: tuple[str, list[int]]) -> None:
    """The thread writer tries again and again, with jitter, until the tier is given up."""
    url, met = dying
    far = {"url": "s3://bucket/run", "storage_options": options(url, retry_seconds=1.0)}
    seen = _Seen()
    before = drawn()
    with Checkpointer(tiers=[str(tmp_path / "run"), far], writer="thread") as checkpointer:
        checkpointer.engine.events = seen
        for step in range(1, 10_000):
            checkpointer.save({"w": torch.zeros(1000)}, step=step).wait(WAIT_SECONDS)
            if any(isinstance(event, TierDegraded) for event in seen):
                break
    assert any(isinstance(event, TierDegraded) for event in seen)
    assert len(met) > 3
    assert drawn() == before
