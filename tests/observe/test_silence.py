"""Nothing is silent for long: a wait of a trainer, of a reader and of each verb says what it is for."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.cli import main, output
from ckpt_engine.observe import events
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire

WAIT_SECONDS = 60.0


class Heard:
    """What was said; `until` waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def until(self, pattern: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(re.search(pattern, line) for line in self.lines), WAIT_SECONDS), (
                pattern,
                self.lines,
            )


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Waits count as long at once."""
    found = Heard()
    monkeypatch.setattr(events, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(events, "announce", lambda _, text, **__: found.add(text))
    return found


def test_a_wait_is_said_once_it_is_long(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one is not, and one that has nothing to say stays silent."""
    with events.said_if_slow("waiting for the tide"):
        heard.until("the tide")
    monkeypatch.setattr(events, "TELL_SECONDS", WAIT_SECONDS)
    with events.said_if_slow("waiting for the moon"):
        pass
    monkeypatch.setattr(events, "TELL_SECONDS", 0.0)
    asked = threading.Event()
    with events.said_if_slow(lambda: asked.set()):  # type: ignore[func-returns-value]
        assert asked.wait(WAIT_SECONDS)
    assert heard.lines == ["waiting for the tide"]


def test_a_trainer_says_what_each_wait_for_its_storage_is_for(
    heard: Heard,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    wire: Wire,  # noqa: F811
) -> None:
    """Opening it, writing at the end, and reading: each time a request takes as long as the line does to come."""
    url = f"s3://{bucket}/run"
    options = {"tiers": [{"url": url, "storage_options": moto.options(wire.url, timeout_seconds=WAIT_SECONDS)}]}
    state = {"model": {"weight": torch.arange(300_000.0)}}

    def comes_before(method: str, path: str, pattern: str) -> None:
        wire.rule("pass", method, path, times=1, then=lambda: heard.until(pattern))

    comes_before("PUT", r"lease\.json", rf"^opening {url} for writing, up to ")
    comes_before("PUT", r"/data/", rf"^waiting for the last snapshots to be written to {url}, up to ")
    with Checkpointer(**options) as ckpt:
        handle = ckpt.save(state, step=1)
        assert ckpt.wait(WAIT_SECONDS)
        assert handle.error is None
    # A writer would read a piece of its snapshot too.
    comes_before("GET", r"/data/", rf"^reading \S+ \(1\.2 MB\) from {url}$")
    read = Checkpointer(**options).load()
    assert read is not None
    assert torch.equal(read["model"]["weight"], state["model"]["weight"])
    assert wire.waiting == 0


def test_a_verb_says_that_it_is_at_work(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds, and again later; what a progress bar knows takes the place of the time."""
    monkeypatch.setattr(output, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(output, "_LINES_SECONDS", 0.01)
    monkeypatch.setattr(output, "_SHOWN_SECONDS", 0.01)
    shown = ""

    def until(pattern: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, shown):
            assert time.monotonic() < deadline, (pattern, shown[-200:])
            shown += capfd.readouterr().err

    with output.at_work("ckpt verify"):
        until(r"ckpt verify: .* so far\nckpt verify: .* so far\n")
        with output.progress("verifying", 4_000_000, hidden=False) as advance:
            advance(1_000_000)
            until(r"verifying: 1 MB of 4 MB")
        shown = ""
        until(r"ckpt verify: .* so far\n")


@pytest.mark.parametrize("verb", sorted(set(main.VERBS) - main.SAY_THEMSELVES))
def test_no_verb_is_silent(verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that do not ask or draw by themselves are watched, from before their first request on."""
    seen: list[str] = []
    real = output.at_work

    def watched(what: str) -> Any:
        seen.append(what)
        return real(what)

    monkeypatch.setattr(main, "at_work", watched)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main.main([verb, "--no-such-option"])
    assert seen == [f"ckpt {verb}"]
