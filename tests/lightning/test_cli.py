"""LightningCLI: the callback in YAML, `--ckpt_path auto`, `ckpt_path: auto`, and restarts into the same log folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from ckpt_engine.config import OPTION_NAMES
from ckpt_engine.errors import ConfigError
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning import cli_app

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*seed.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is called with arguments of its own, not with those of pytest."""
    monkeypatch.setattr(sys, "argv", ["cli_app"])


def config(folder: Path, *, at: Path | None = None, **more: Any) -> Path:
    """A YAML file of the program, with the callback as `class_path` and `init_args`."""
    init_args = {"tiers": [{"url": str(folder / "run"), "keep": {"last": 3}}], "every_n_steps": 1, "writer": "thread"}
    if at is not None:
        init_args = {"config": str(at)}
    document = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "default_root_dir": str(folder),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "lightning_ckpt.AdaptiveCheckpoint", "init_args": init_args}],
        },
        **more,
    }
    path = folder / "input.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def crash(*arguments: str) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        cli_app.run(*arguments, "--model.crash_at=8")


@pytest.mark.long
@pytest.mark.parametrize("where", ["command line", "yaml"])
def test_a_restarted_command_continues_exactly(where: str, tmp_path: Path) -> None:
    """The same command again, in the same log folder, ends in the run that never crashed."""
    reference_folder, folder = tmp_path / "a", tmp_path / "b"
    reference_folder.mkdir()
    folder.mkdir()
    reference = cli_app.run("fit", f"--config={config(reference_folder)}").model
    more = {"ckpt_path": "auto"} if where == "yaml" else {}
    arguments = ["fit", f"--config={config(folder, **more)}"]
    if where == "command line":
        arguments.append("--ckpt_path=auto")
    crash(*arguments)
    assert (folder / "config.yaml").exists(), "the first start saves its configuration"
    resumed = cli_app.run(*arguments).model
    assert resumed.seen
    assert resumed.seen == reference.seen  # what the model wrote down before the crash is there too
    assert yaml.safe_load((folder / "config.yaml").read_text())["ckpt_path"] == "auto"


def test_a_restart_logs_into_the_same_folder(tmp_path: Path) -> None:
    """With the version left to Lightning, which by itself makes another folder at each start."""
    logger = ("--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}")
    arguments = ("fit", f"--config={config(tmp_path, ckpt_path='auto')}", *logger)
    crash(*arguments)
    cli = cli_app.run(*arguments)
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    assert cli.trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert (tmp_path / "lightning_logs" / "version_0" / "config.yaml").exists()


def test_a_run_that_crashed_before_its_first_snapshot_restarts_too(tmp_path: Path) -> None:
    """There is no snapshot, but the saved configuration of the first start is in the way."""
    arguments = ("fit", f"--config={config(tmp_path, ckpt_path='auto')}")
    with pytest.raises(RuntimeError, match="crash"):
        cli_app.run(*arguments, "--model.crash_at=0", "--trainer.callbacks.every_n_steps=1000")
    assert len(cli_app.run(*arguments).model.seen) == 12


def test_without_auto_lightning_still_protects_the_folder(tmp_path: Path) -> None:
    """A first start that is no restart must not overwrite another run's configuration."""
    path = config(tmp_path)
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(RuntimeError, match="to NOT exist"):
        cli_app.run("fit", f"--config={path}")
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_a_separate_yaml_file_holds_the_options(tmp_path: Path) -> None:
    """`init_args: {config: ckpt.yaml}`, and single options on top from the command line."""
    options = tmp_path / "ckpt.yaml"
    options.write_text(f"tiers: {tmp_path / 'run'}\nevery_n_steps: 5\nwriter: thread\n")
    arguments = ("fit", f"--config={config(tmp_path, at=options)}", "--trainer.callbacks.keep={last: 1}")
    cli = cli_app.run(*arguments)
    callback = next(c for c in cli.trainer.callbacks if isinstance(c, AdaptiveCheckpoint))
    assert callback.config.every_n_steps == 5
    assert callback.config.keep.last == 1
    assert len(list((tmp_path / "run" / "snapshots").iterdir())) == 1


def test_a_misspelt_option_is_named(tmp_path: Path) -> None:
    """Inside of a nested option our own error names key and nearest match."""
    path = config(tmp_path)
    with pytest.raises(ValueError, match=r"keep\.lst: unknown key; did you mean 'last'"):
        cli_app.run("fit", f"--config={path}", "--trainer.callbacks.keep={lst: 1}")
    with pytest.raises(ConfigError, match=r"keep\.lst.*did you mean 'last'"):
        AdaptiveCheckpoint(str(tmp_path), keep={"lst": 1})


def test_an_unquoted_off_is_the_word_and_keep_a_number(tmp_path: Path) -> None:
    """The YAML of LightningCLI makes a boolean of it."""
    words = "guard: off, resume: off, hidden: off, log: {bar: off}"
    made = of_yaml(tmp_path, f"tiers: /run, keep: 3, {words}").config
    assert [made.guard, made.resume, made.hidden, made.log.bar] == ["off"] * 4
    assert made.keep.last == 3


@pytest.mark.parametrize(("text", "sealed"), [("", False), ("seal: false", False), ("seal: {key: a}", True)])
def test_a_run_is_sealed_where_its_yaml_says_so(tmp_path: Path, text: str, sealed: bool) -> None:
    """And not otherwise, also as the file that LightningCLI writes has it."""
    made = of_yaml(tmp_path, f"tiers: /run, {text}")
    assert (made.config.seal is not None) is sealed


@pytest.mark.parametrize("text", ["seal: , tiers: /run", "tiers: [{url: /run, seal: }]"])
def test_an_empty_seal_is_refused(tmp_path: Path, text: str) -> None:
    """Somebody has commented its keys out: the run would be written in the clear."""
    with pytest.raises(ConfigError, match=r"seal: has no keys.*remove it"):
        of_yaml(tmp_path, text)


def of_yaml(folder: Path, options: str) -> AdaptiveCheckpoint:
    """The callback of these options in the YAML of LightningCLI."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AdaptiveCheckpoint, "ckpt")
    (folder / "cli.yaml").write_text(f"ckpt: {{{options}}}\n")
    made: AdaptiveCheckpoint = parser.instantiate_classes(parser.parse_path(folder / "cli.yaml")).ckpt
    return made


def test_keywords_are_exactly_the_options() -> None:
    """No option is missing from the signature and none is invented there."""
    import inspect

    parameters = inspect.signature(AdaptiveCheckpoint.__init__).parameters
    assert set(parameters) - {"self", "config", "unknown"} == set(OPTION_NAMES)


def test_making_a_callback_touches_nothing(tmp_path: Path) -> None:
    """No folder, thread or process before a run is set up; it can be pickled and copied."""
    import copy
    import pickle
    import threading

    threads = threading.active_count()
    callback = AdaptiveCheckpoint(str(tmp_path / "run"))
    assert pickle.loads(pickle.dumps(callback)).config == callback.config
    assert copy.deepcopy(callback).config == callback.config
    assert not (tmp_path / "run").exists()
    assert threading.active_count() == threads
