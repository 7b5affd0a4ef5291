"""The parts of a replicator: when it tries again, and the gate that bytes pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckpt_engine.store.storage.base import Throttle, metered
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.replicate import PAUSES, CopyStoppedError, Gate


def test_attempts_become_rarer_up_to_a_limit() -> None:
    """Twice as long each time, and no overflow after weeks."""
    assert [PAUSES.seconds(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert PAUSES.seconds(10**9) == 60.0
    assert [PAUSES.after(seconds) for seconds in (1.0, 32.0, 60.0)] == [2.0, 60.0, 60.0]


def test_an_open_gate_asks_its_limit() -> None:
    """Every byte that passes is counted against the bandwidth."""
    now = [0.0]
    gate = Gate(Throttle(100.0, lambda: now[0]))
    assert [gate.wait(50), gate.wait(50), gate.wait(50)] == [0.0, 0.5, 1.0]
    assert Gate(None).wait(10**9) == 0.0


def test_a_dropped_copy_ends_at_its_next_slice(tmp_path: Path) -> None:
    """`drop` holds for one copy, `stop` for all."""
    gate = Gate(None)
    sink = metered(LocalStorage(tmp_path), lambda _: gate)
    gate.drop()
    with pytest.raises(CopyStoppedError):
        sink.put("a", [memoryview(b"1")])
    gate.reopen()
    sink.put("a", [memoryview(b"1")])
    gate.stop()
    gate.reopen()
    with pytest.raises(CopyStoppedError):
        sink.put("b", [memoryview(b"1")])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_copy_that_waits_for_its_turn_can_be_stopped() -> None:
    """A low bandwidth must not delay the end."""
    gate = Gate(Throttle(1.0))
    gate.wait(1000)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(CopyStoppedError):
            gate.pause(gate.wait(1))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    gate.stop()
    assert ended.wait(30)
    thread.join(30)
