"""`--endpoint-url` and `--storage-option`, of every verb that takes the URL of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import pytest

from ckpt_engine.cli.main import VERBS, commands
from ckpt_engine.store.storage import open_storage
from ckpt_engine.tools import stored_run

Ckpt = Callable[..., Any]


def test_every_verb_that_takes_a_run_has_them() -> None:
    """Those that take none have not."""
    for verb in VERBS:
        command = commands.get_command(click.Context(commands), verb)
        assert command is not None
        names = {name for parameter in command.params for name in parameter.opts}
        wants = verb not in ("init", "schema", "completion", "verify-resume", "demo", "keys")
        assert ({"--endpoint-url", "--storage-option"} <= names) is wants, verb


def test_they_reach_the_storage(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a URL; numbers stay texts, as they may be secrets, and JSON becomes values."""
    seen: list[tuple[str, Mapping[str, Any]]] = []

    def remember(url: str, options: Mapping[str, Any]) -> Any:
        seen.append((url, options))
        return open_storage("/nowhere")

    monkeypatch.setattr(stored_run, "open_storage", remember)
    options = ["--storage-option", "secret=123", "--storage-option", 'client_kwargs={"verify": false}']
    ckpt("ls", "s3://bucket/run", "--endpoint-url", "http://localhost:9", *options)
    (url, found), *_ = seen
    wanted = {"endpoint_url": "http://localhost:9", "secret": "123", "client_kwargs": {"verify": False}}
    assert (url, {name: found[name] for name in wanted}) == ("s3://bucket/run", wanted)


def test_a_folder_takes_none_and_nonsense_is_refused(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """A folder ignores options of storages, so that one command may name a folder and a bucket."""
    run_folder.add(1, arrays)
    assert ckpt("ls", run_folder.path, "--endpoint-url", "http://localhost:9").code == 0
    assert "is not NAME=VALUE" in ckpt("ls", run_folder.path, "--storage-option", "x").err
    assert "is no JSON" in ckpt("ls", run_folder.path, "--storage-option", "x={").err
