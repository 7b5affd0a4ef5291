"""Sixty plausible mistakes: each is answered, and the answer says what is wrong, where, and what to do next.

The first ones are those that the documentation speaks of (docs/troubleshooting.md, docs/errors.md, docs/migrate.md).
"""

from __future__ import annotations

import re
import shlex
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

from ckpt_engine import Checkpointer, CkptError
from ckpt_engine.cli.main import VERBS, commands, main
from ckpt_engine.config import load_config
from tests.cli.conftest import RunFolder

pytestmark = pytest.mark.timeout(60)


@dataclass
class Place:
    """What a user has before the mistake: a run of two snapshots, and an empty folder to work in."""

    run: Path
    folder: Path
    said: Callable[[], str]
    open: list[Checkpointer] = field(default_factory=list)

    def ckpt(self, line: str) -> None:
        """A command; it has to fail."""
        with pytest.raises(SystemExit) as end:
            main(shlex.split(line.format(run=self.run, folder=self.folder)))
        assert end.value.code == 2
        raise CkptError(self.said())

    def new(self, root: Any = None, **options: Any) -> Checkpointer:
        """Begin a run."""
        options = {"writer": "thread", **options}
        self.open.append(Checkpointer(self.folder / "new" if root is None else root, **options))
        return self.open[-1]

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


@pytest.fixture
def place(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    run = RunFolder(tmp_path / "run")
    for step in (100, 200):
        run.add(step, {"model/w": np.ones((2, 2), "float32"), "optimizer/m": np.ones(2, "float32")})
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    made = Place(run.path, tmp_path / "place", lambda: capfd.readouterr().err)
    yield made
    for one in made.open:
        one.close()


Do = Callable[[Place], Any]


def ckpt(line: str) -> Do:
    return lambda place: place.ckpt(line)


def options(root: str | None = "{folder}/new", **given: Any) -> Do:
    return lambda place: load_config(root and root.format(folder=place.folder), **given)


def yaml(text: str) -> Do:
    return lambda place: load_config(place.file("ckpt.yaml", text))


def save(value: Any, step: Any = 1, **more: Any) -> Do:
    return lambda place: place.new().save(value, step=step, **more).wait(30)


def run_in_a_file(place: Place) -> None:
    place.new(place.file("text", "hello")).save({"a": 1}, step=1).wait(30)


def run_beside_others(place: Place) -> None:
    place.file("data.csv", "1,2")
    place.new(place.folder).save({"a": 1}, step=1).wait(30)


def after_close(place: Place) -> None:
    ckpt = place.new()
    ckpt.close()
    ckpt.save({"a": 1}, step=1)


def another_model(place: Place) -> None:
    into = {"model": {"w": torch.ones(3, 3)}, "optimizer": {"m": torch.ones(2)}}
    place.new(place.run).load(into=into)


def damaged_everywhere(place: Place) -> None:
    for path in (place.run / "data").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    place.new(place.run).load()


def a_loop(place: Place, **parts: Any) -> None:
    model = torch.nn.Linear(2, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **parts}
    with place.new().track(**given):
        pass


def no_optimizer(place: Place) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))  # type: ignore[arg-type]
    with place.new() as ckpt:
        ckpt.track(model=model, loader=loader)
        for x in loader:
            model(x).sum().backward()
            optimizer.step()


def lightning(*callbacks: dict[str, Any], **fit: Any) -> Do:
    def do(place: Place) -> None:
        import lightning as L
        from lightning.pytorch.demos.boring_classes import BoringModel

        from lightning_ckpt import AdaptiveCheckpoint

        ours = [AdaptiveCheckpoint(place.folder / "new", writer="thread", **one) for one in callbacks]
        given = {name: str(value).format(run=place.run) for name, value in fit.items()}
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_steps=2, accelerator="cpu", callbacks=ours, enable_checkpointing=False, **quiet)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(BoringModel(), **given)

    return do


def accelerate(way: str) -> Do:
    def do(place: Place) -> None:
        from accelerate import Accelerator

        from accelerate_ckpt import AdaptiveCheckpoint

        accelerator = Accelerator(cpu=True)
        if way == "swapped":
            AdaptiveCheckpoint(str(place.folder / "new"), accelerator)  # type: ignore[arg-type]
        else:
            AdaptiveCheckpoint(accelerator, place.folder / "new", writer="thread")

    return do


def existing(name: str, line: str) -> Do:
    def do(place: Place) -> None:
        place.file(name, "mine")
        place.ckpt(line)

    return do


def nowhere(place: Place) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b"}
    place.new({"tiers": {"url": "s3://bucket/run", "storage_options": options}}).load()


ONE = {"a": 1}
SCHEMA = "`ckpt schema` prints every option"
RUN = "check the path; a run starts with its first snapshot"
MISTAKES: dict[str, tuple[Do, str, str, str]] = {
    # The mistake: what is done; and what the answer says: what is wrong, where, what to do. First those of the docs.
    "an option is misspelt": (options(overhed="1%"), "unknown key", "overhed", "did you mean 'overhead'"),
    "an option of a section at the top": (options(monitor="l"), "unknown key", "monitor", "belongs under 'keep.best'"),
    "an option of ModelCheckpoint": (options(save_top_k=3), "unknown key", "save_top_k", "keep: {best: {monitor"),
    "an option of transformers": (options(save_total_limit=3), "unknown key", "save_total_limit", "here it is keep"),
    "no unit": (options(overhead="much"), "must be a share such as '1%'", "overhead", SCHEMA),
    "a misspelt section": (yaml("tiers: /d\nkep: {last: 3}\n"), "unknown key", "line 2: kep", "did you mean 'keep'"),
    "a misspelt rule": (options(keep={"lst": 1}), "unknown key", "keep.lst", "did you mean 'last'"),
    "a folder with other files": (run_beside_others, "not of ckpt-engine", "such as data.csv", "such as .*/ckpt"),
    "a file as the folder": (run_in_a_file, "Not a directory", "place/text", "give the path of a folder"),
    "a place that takes no folder": (
        lambda place: place.new("/proc/run1").save(ONE, step=1).wait(30),
        "cannot make the folder",
        "/proc/run1",
        "where this user may make one",
    ),
    "a package is missing": (
        lambda place: place.new("gs://bucket/run").load(),
        "a package that is not installed",
        "gs://",
        "install gcsfs",
    ),
    "a scheme that does not exist": (lambda place: place.new("foo://b/run").load(), "no storage", "foo://", "s3://"),
    "a web server as a store": (
        lambda place: place.new("https://example.invalid/run").load(),
        "cannot be written",
        "https://example.invalid/run",
        "endpoint_url",
    ),
    "a store that is not there": (nowhere, "Could not connect", "s3://bucket/run", "check the endpoint"),
    "a password in the URL": (options("s3://key:no@b/r"), "must not contain a password", "tiers", "in storage_options"),
    "an object in the state": (
        save({"model": {"f": object()}}),
        "object of type builtins.object",
        "model/f",
        "plain data instead",
    ),
    "the module in place of its state": (
        save(torch.nn.Linear(1, 1)),
        "torch.nn.modules.linear.Linear",
        "root",
        r"result of state_dict\(\)",
    ),
    "another model": (another_model, "does not fit this state", r"model/w: \[2, 2\] saved, \[3, 3\]", "use the state"),
    "a step that was not saved": (
        lambda place: place.new(place.run).load(step=150),
        "no snapshot of step 150",
        "/run",
        "`ckpt ls",
    ),
    "everything is damaged": (damaged_everywhere, "none of the 2 snapshots", "data/.*safetensors", "`ckpt verify"),
    "a save after the end": (after_close, "is closed", "place/new", "make a new one"),
    "Lightning: our folder as ckpt_path": (
        lightning({}, ckpt_path="{run}"),
        "is a folder of snapshots",
        "ckpt_path: .*/run",
        "ckpt_path='auto'",
    ),
    "Lightning: two callbacks of a folder": (lightning({}, {}), "two AdaptiveCheckpoint", "place/new", "remove one"),
    "Accelerate: before prepare": (
        accelerate("before"),
        "given no optimizer",
        r"prepare\(\)",
        "after model, optimizer",
    ),
    "a run that is not trained": (ckpt("save-now {run}"), "no run", "/run is being trained", "`ckpt status"),
    # Those of every day.
    "Accelerate: swapped arguments": (
        accelerate("swapped"),
        "not the Accelerator",
        "first argument",
        r"accelerator, '",
    ),
    "a model in place of the folder": (
        lambda _: Checkpointer(torch.nn.Linear(1, 1)),
        "cannot be read as options",
        "of type Linear",
        "give the path",
    ),
    "a share above one": (options(overhead="150%"), "below 100%", "overhead", SCHEMA),
    "nothing is kept": (options(keep={"last": 0}), "at least 1, got 0", "keep.last", SCHEMA),
    "half a step": (options(every_n_steps=1.5), "whole number, got 1.5", "every_n_steps", SCHEMA),
    "a misspelt word": (options(guard="nans"), "must be 'off' or 'nan'", "guard", "did you mean 'nan'"),
    "a class of failure that is none": (
        options(max_lost_work={"node": "1 h"}),
        "not 'node'",
        "max_lost_work",
        "machine",
    ),
    "two slashes of a file URL": (options("file://data/run1"), "three slashes", "tiers", "file:///folder"),
    "one slash of a bucket": (options("s3:/bucket/run1"), "two slashes", "tiers", "s3://bucket/run1"),
    "no colon of a bucket": (options("s3//bucket/run1"), "two slashes", "tiers", "s3://bucket/run1"),
    "no file of that name": (
        options("{folder}/ckpt.yaml"),
        "no such file",
        "place/ckpt.yaml",
        "relative to the working",
    ),
    "a tab in the file": (yaml("tiers: /d\n\tslots: 1\n"), "not valid YAML", "line 2, column 1", "`ckpt init`"),
    "a key twice": (yaml("tiers: /d\nslots: 1\nslots: 2\n"), "given twice", "line 3: slots", "leave one"),
    "a list as the file": (yaml("- /data\n"), "must contain a mapping", "ckpt.yaml", "tiers: /data/run1"),
    "an empty file": (yaml(""), "missing", "ckpt.yaml: tiers", "name a folder"),
    "no place at all": (options(None, overhead="1%"), "missing", "tiers", "name a folder"),
    "the place twice": (options(tiers=["/data/a"]), "given twice", "place/new", "give one of them"),
    "the same tier twice": (options(None, tiers=["/d", "/d"]), "two tiers are the same place", "tiers", SCHEMA),
    "memory only": (options(None, tiers=["memory"]), "does not outlive the machine", "tiers", "must name a folder"),
    "memory without a process": (
        options(None, tiers=["memory", "/d"], writer="thread"),
        "needs a writer that outlives",
        "writer",
        "must be 'process'",
    ),
    "a codec that loses bits": (
        options(None, tiers=["/d", {"url": "/e", "codec": "int8"}]),
        "would lose bits",
        "tiers.1.codec",
        "delta is the smallest",
    ),
    "a step below zero": (save(ONE, -1), "not -1", "step", "whole number from 0"),
    "a metric of several numbers": (save(ONE, metrics={"loss": torch.ones(2)}), "2 elements", "metrics/loss", "notes"),
    "a function in the state": (save({"f": lambda: 0}), "builtins.function", "at f ", "opt in with pickle"),
    "no optimizer": (no_optimizer, "needs the optimizer", r"track\(\)", "model=model, optimizer=optimizer"),
    "a generator as the loader": (
        lambda place: a_loop(place, loader=(x for x in range(3))),
        r"has no state_dict\(\)",
        "'loader', a generator",
        "these two methods",
    ),
    "a class in place of a model": (
        lambda place: a_loop(place, model=torch.nn.Linear),
        "has no state",
        "'model' is the class Linear",
        "give an object",
    ),
    "a list of models": (
        lambda place: a_loop(place, model=[torch.nn.Linear(1, 1)]),
        r"has no state_dict\(\)",
        "'model', a list",
        r"track what it holds: model\[0\]",
    ),
    "a data set as the loader": (
        lambda place: a_loop(place, loader=torch.utils.data.TensorDataset(torch.ones(2))),
        r"has no state_dict\(\)",
        "'loader', a TensorDataset",
        "loaders",
    ),
    "a model as the state to fill": (
        lambda place: place.new(place.run).load(into=torch.nn.Linear(1, 1)),
        "not its state",
        "into is a Linear",
        r"into=\{'model': model.state_dict",
    ),
    "a model as the state": (save(torch.nn.Linear(1, 1)), "type torch.*Linear", r"\(root\)", r"state_dict\(\)"),
    "a half step to save": (save({"a": 1}, 1.5), "not 1.5", "step", "whole number from 0"),
    "a share of snapshots to keep": (options(keep="half"), "must be a mapping", "keep", "last"),
    "one for one percent": (options(overhead=1), "below 100%", "overhead", "write '1%'"),
    "a unit that is none": (options(max_lost_work="10 minuts"), "must be a duration", "max_lost_work", "'10 min'"),
    "a verb is misspelt": (ckpt("verfy {run}"), "No such command", "verfy", "Did you mean 'verify'"),
    "an option of a verb is misspelt": (ckpt("ls {run} --jsn"), "No such option", "--jsn", "Did you mean '?--json"),
    "no root": (ckpt("ls"), "no ROOT is given", "this folder", "CKPT_ROOT"),
    "a root that is not there": (ckpt("ls {folder}/nowhere"), "no run", "place/nowhere", RUN),
    "the folder above, of several runs": (
        ckpt("show {run}/.."),
        "has files that are not",
        "/run",
        "name a run below it: .*/run",
    ),
    "a snapshot that is not there": (ckpt("show {run} 999"), "no snapshot '999'", "/run", "nearest step is 200"),
    "the start of several names": (ckpt("show {run} 0000"), "2 snapshots", "/run", "give more"),
    "a format is misspelt": (
        ckpt("export {run} out --to safetensor"),
        "not one of 'safetensors'",
        "'--to'",
        "`ckpt export --help`",
    ),
    "a part is misspelt": (
        ckpt("export {run} out --to safetensors --only modle"),
        "resume.only: 'modle'",
        "in the snapshot",
        "similar names: model",
    ),
    "a file that is there": (
        existing("out", "export {run} out --to safetensors --only model"),
        "exists already",
        "out",
        "--force",
    ),
    "a file of options that is there": (
        existing("ckpt.yaml", "init --preset laptop"),
        "exists",
        "ckpt.yaml",
        "--force",
    ),
    "a text as a checkpoint": (existing("a.ckpt", "import a.ckpt {folder}/x"), "no file of torch", "a.ckpt", "give a"),
    "a checkpoint that is not there": (ckpt("import a.ckpt {folder}/x"), "does not exist", "a.ckpt", "check the path"),
    "nothing says what to keep": (ckpt("prune {run}"), "nothing says what to keep", "/run", "--keep last=3"),
    "a rule without a value": (ckpt("prune {run} --keep last"), "must be RULE=VALUE", "--keep last", "last=3"),
    "a code that is none": (ckpt("explain CKPT999"), "there is no code", "CKPT999", "`ckpt explain` lists"),
    "a preset of failures that is none": (ckpt("plan --failures lama3"), "no failure preset", "lama3", "llama3"),
    "no script to try": (ckpt("verify-resume --steps 4"), "give the command", "verify-resume", "-- python train.py"),
    "a folder within a run": (
        ckpt("ls {run}/snapshots"),
        "has files that are not",
        "run/snapshots",
        "`ckpt ls .*/run`",
    ),
    "a snapshot of what lists a run": (ckpt("ls {run}#4"), "no run", "run#4", "a whole run, .*: .*/run"),
    "the verb of another program": (ckpt("list {run}"), "No such command", "list", "Did you mean 'ls'"),
    "to see all runs": (ckpt("runs {run}"), "No such command", "runs", "Did you mean 'ls'"),
    "to watch": (ckpt("watch {run}"), "No such command", "watch", "Did you mean 'top'"),
    "a page in no folder": (ckpt("report {run} --html x/y.html"), "does not exist", "x/y.html", "make it"),
    "a number as the folder": (lambda _: Checkpointer(5), "cannot be read as options", "5, of type int", "path"),
    "a share in words": (options(overhead="1 percent"), "must be a share such as '1%'", "overhead", SCHEMA),
    "a metric as the rule": (
        options(keep={"best": "val_loss"}),
        "must be a mapping",
        "keep.best",
        "monitor: val_loss, mode: min",
    ),
    "a mode that is none": (
        options(keep={"best": {"monitor": "l", "mode": "minimum"}}),
        "must be 'min' or 'max'",
        "keep.best.mode",
        "did you mean 'min'",
    ),
    "a signal that is none": (
        options(preemption={"signals": ["SIGTREM"]}),
        "must be among SIGTERM",
        "preemption.signals",
        SCHEMA,
    ),
    "an option of ModelCheckpoint for the folder": (
        options(None, dirpath="x"),
        "unknown key",
        "dirpath",
        "here it is the first argument",
    ),
    "a bucket without a name": (
        lambda place: place.new("s3://").load(),
        "no bucket",
        "s3://",
        "give s3://bucket/folder",
    ),
    "a manifest as the folder": (
        lambda place: place.new(next((place.run / "snapshots").iterdir())).load(),
        "Not a directory",
        "snapshots/0000",
        "give the path of a folder",
    ),
    "a run beside its snapshots": (
        lambda place: place.new(place.run / "snapshots").save(ONE, step=1),
        "not of ckpt-engine",
        "run/snapshots",
        "a folder of its own",
    ),
    "resume by true": (options(resume=True), "must be 'auto' or 'off', got true", "resume", SCHEMA),
    "a number of steps as text": (save(ONE, "1"), "whole number: a str is no number", "step", "whole number"),
    "a lock in the state": (save({"l": threading.Lock()}), "_thread.lock", "at l ", "opt in with pickle"),
    "to delete": (ckpt("delete {run} 100"), "No such command", "delete", "Did you mean 'prune'"),
    "one of two runs": (ckpt("diff {run}"), "Missing argument", "'B'", "`ckpt diff --help`"),
    "no format": (ckpt("export {run} out"), "Missing option", "'--to'", "safetensors"),
    "a folder as the page": (ckpt("report {run} --html ."), "is a folder", r"\. is", "name the file"),
    "a run that is not there to stop": (ckpt("stop {run}"), "no run", "/run is being trained", "`ckpt status"),
    "an option of a store without a value": (
        ckpt("ls {run} --storage-option endpoint"),
        "not NAME=VALUE",
        "'endpoint'",
        "`ckpt ls --help`",
    ),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(mistake: str, place: Place) -> None:
    """What is wrong, where, and what to do; each command that is named exists, with the options that are named."""
    do, *parts = MISTAKES[mistake]
    with pytest.raises(CkptError) as caught:
        do(place)
    for part in parts:
        assert re.search(part, str(caught.value), re.DOTALL), str(caught.value)
    for line in re.findall(r"[`']ckpt ([^`'\n]+)[`']", str(caught.value)):
        verb, *words = line.split()
        if verb in ("--help", "-h"):
            continue
        assert verb in VERBS, line
        command = commands.get_command(click.Context(commands), verb)
        assert command is not None
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--") and word != "--"} <= known, line


def test_there_are_ninety() -> None:
    """The table has ninety mistakes at least."""
    assert len(MISTAKES) >= 90
