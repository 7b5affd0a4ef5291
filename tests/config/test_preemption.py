"""The options of stopping in time."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from ckpt_engine.config import Config, load_config
from ckpt_engine.errors import ConfigError


def load(preemption: Any) -> Config:
    return load_config("/data/run1", preemption=preemption)


def test_sigterm_and_ctrl_c_leave_half_a_minute() -> None:
    """SIGUSR1 and SIGUSR2 belong to others until somebody asks."""
    options = load_config("/data/run1").preemption
    assert options.numbers() == (signal.SIGTERM, signal.SIGINT)
    assert (options.grace, options.sources) == (30.0, ())


def test_signals_are_written_in_any_way() -> None:
    """One or several, with SIG or without."""
    assert load({"signals": ["usr1", "SIGTERM", "TERM"]}).preemption.signals == ("SIGUSR1", "SIGTERM")
    assert load({"signals": "SIGUSR2"}).preemption.signals == ("SIGUSR2",)
    assert load({"signals": []}).preemption.numbers() == ()


def test_sources_are_files_pages_and_commands() -> None:
    """All three kinds are taken, and the options survive a round trip."""
    config = load(
        {
            "grace": "2 min",
            "sources": [
                {"file": "STOP"},
                {"http": "http://metadata/spot", "every": "1 s", "match": "TRUE", "headers": {"A": "b"}},
                {"command": ["./preempted.sh", ""], "grace": "1 min"},
            ],
        }
    )
    file, http, command = config.preemption.sources
    assert (file.file, file.every, file.grace) == ("STOP", 5.0, None)
    assert (http.http, http.every, http.headers) == ("http://metadata/spot", 1.0, {"A": "b"})
    assert (command.command, command.grace) == (("./preempted.sh", ""), 60.0)
    assert load_config(config.options()) == config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"signals": ["SIGKILL"]}, "preemption.signals: must be among SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP"),
        ({"grace": 0}, "preemption.grace: must be a duration above 0"),
        ({"grase": 1}, "preemption.grase: unknown key; did you mean 'grace'?"),
        ({"sources": [{"every": 1}]}, "preemption.sources.0: give one of file, http and command"),
        ({"sources": [{"file": "a", "http": "http://b"}]}, "preemption.sources.0: give one of file, http and command"),
        ({"sources": [{"file": "a", "match": "b"}]}, "preemption.sources.0: match and headers belong to http"),
        ({"sources": [{"http": "metadata/spot"}]}, "must be a URL that starts with http:// or https://"),
        ({"sources": [{"http": "http://b", "match": "("}]}, "must be a regular expression"),
        ({"sources": [{"command": "a b"}]}, "must be a list of a program and its arguments"),
        ({"sources": [{"command": ["a", 1]}]}, "put numbers in quotes"),
        ({"sources": [{"http": "http://b", "headers": "a"}]}, "must be a mapping of names to texts"),
        ({"sources": [{"fil": "a"}]}, "unknown key; did you mean 'file'?"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    """With the path of the key, and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert said in str(caught.value)


def test_headers_are_not_shown() -> None:
    """Headers may be secrets, so no text shows them."""
    config = load({"sources": [{"http": "http://b", "headers": {"Token": "hunter2"}}]})
    assert "hunter2" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        load({"sources": [{"http": "http://b", "headers": ["hunter2"]}]})
    assert "hunter2" not in str(caught.value)
