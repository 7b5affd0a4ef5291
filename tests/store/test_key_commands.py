"""Keys that a command prints open and sign as those of files do, and nothing of what it prints is in an error."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.config import load_config
from ckpt_engine.errors import CkptError, ConfigError, StorageError
from ckpt_engine.store.storage import seal_keys
from ckpt_engine.store.storage.seal_keys import KeyPair
from tests.restore.test_sealed_run import ckpt, trained
from tests.store.test_sealed import key  # noqa: F401


def printing(text: str, then: str = "") -> list[str]:
    """A command that writes a text to both of its outputs."""
    return [
        sys.executable,
        "-c",
        f"import sys; [print({text!r}, file=f, flush=True) for f in (sys.stdout, sys.stderr)]{then}",
    ]


def secret_of(path: str) -> str:
    """The text of the key in a file."""
    return Path(path).read_text().splitlines()[-1]


def test_a_run_is_sealed_with_the_key_that_a_command_prints(tmp_path: Path, key: str) -> None:  # noqa: F811
    """Its writer process calls it too; who has the key as a file opens the same run, and the other way round."""
    seals = [{"key": ["cat", key]}, {"key": key}, {"key": printing(secret_of(key)), "sign": ["cat", key]}]
    for step, seal in enumerate(seals, 1):
        config = {"tiers": [str(tmp_path / "run")], "seal": seal}
        assert trained(config, step) == [f"from {step - 1}", f"durable {step}"]
    yaml = tmp_path / "ckpt.yaml"
    yaml.write_text(json.dumps({"tiers": str(tmp_path / "run"), "seal": seals[0]}))
    assert ckpt("verify", yaml) == 0


def test_the_path_of_a_key_is_relative_to_the_working_directory(
    tmp_path: Path,
    key: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer process, which works in another folder, finds it too."""
    monkeypatch.chdir(Path(key).parent)
    with Checkpointer({"tiers": str(tmp_path / "run"), "seal": {"key": Path(key).name}}) as checkpointer:
        checkpointer.save({"x": 1}, step=1).wait(60)
        assert [one.step for one in checkpointer.snapshots()] == [1]


@pytest.mark.long
@pytest.mark.parametrize("then", ["; sys.exit(3)", "; import time; time.sleep(600)"])
def test_a_command_that_fails_or_hangs_is_named_without_what_it_printed(
    key: str,  # noqa: F811
    then: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither the error, nor one that it followed, nor a log, nor an output has it."""
    monkeypatch.setattr(seal_keys, "_COMMAND_SECONDS", 3.0)
    with (
        caplog.at_level("DEBUG"),
        pytest.raises(ConfigError, match=r"gave no key: it failed, or took more than 3 s") as caught,
    ):
        KeyPair.read(printing(secret_of(key), then))
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + "".join(capfd.readouterr())
    assert secret_of(key) not in shown
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_other_output_is_refused_and_not_repeated(key: str) -> None:  # noqa: F811
    """A key that was cut off is still a secret."""
    for text in (secret_of(key)[:-1], secret_of(key) * 2, ""):
        with pytest.raises(ConfigError, match="copied whole") as caught:
            KeyPair.read(printing(text))
        assert secret_of(key)[20:60] not in "".join(traceback.format_exception(caught.value))


def test_a_command_that_is_not_there_and_options_that_are_none_are_named(tmp_path: Path) -> None:
    """The first is found when the place is opened, the others with the options."""
    with pytest.raises(StorageError, match="no-such-program"):
        KeyPair.read(["no-such-program"])
    for source in ([], [1], "", 5, [""]):
        with pytest.raises(ConfigError, match=r"seal\.key"):
            load_config({"tiers": str(tmp_path), "seal": {"key": source}})
    config = {"tiers": str(tmp_path / "run"), "seal": {"key": ["no-such-program"]}}
    with pytest.raises(CkptError, match="no-such-program"), Checkpointer(config) as run:
        run.load()
