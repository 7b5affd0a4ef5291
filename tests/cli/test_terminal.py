"""Every verb in a terminal of 80 columns: nothing wraps, nothing is cut that a reader needs."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.cli.main import VERBS
from ckpt_engine.observe.events import CLOSED, FAILED
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.attempts import Attempt
from ckpt_engine.writer.run_records import AWAY, WORKING, TierStatus, WriterStatus, write_status
from tests.cli.conftest import CREATED, RunFolder
from tests.cli.test_goodput import record

Terminal = Callable[..., Any]
LENGTHS = (20, 120)
METRICS = {"val_loss": 0.1234, "val_accuracy": 0.91, "train_loss_of_the_whole_epoch": 0.5}
FAR_TROUBLE = "cannot write: the cable is out and nobody has found the other end of it"
LIVES = (
    Attempt("node1", "a", CREATED, 1400.0, FAILED, step=230, times={"training": 1300.0, "slowdown": 9.0, "stall": 5.0}),
    Attempt("node2", "b", CREATED + 2000.0, 1300.0, CLOSED, step=400, times={"training": 1100.0, "replay": 150.0}),
)


@pytest.fixture(params=LENGTHS)
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The path of a run, of so many characters."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    name = "r" * (request.param - len(str(base)) - 1)
    yield base / name
    shutil.rmtree(base)


@pytest.fixture
def world(root: Path, arrays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Runs and files by the names that commands below use."""
    made = RunFolder(root)
    old = made.add(1_200, arrays, epoch=3, metrics=METRICS)
    far = root.with_name(root.name[:-1] + "f")
    shutil.copytree(root, far)
    made.add(12_600, arrays, epoch=4, reason="validation", metrics=METRICS, parent=old)
    record(root, *LIVES)
    near_url, far_url = f"file://{root}", f"file://{far}"
    write_status(
        LocalStorage(root),
        WriterStatus(
            4711, "node7", CREATED, False,
            (
                TierStatus(near_url, WORKING, newest=old),
                TierStatus(far_url, AWAY, None, None, 1, 1_500_000, 0, "CKPT300", FAR_TROUBLE, 0.0, "zstd: 9 MB"),
            ),
        ),
    )  # fmt: skip
    yaml, bad = root.with_name(root.name[:-1] + "y.yaml"), root.with_name(root.name[:-1] + "b.yaml")
    yaml.write_text(f"tiers: [{root}, {far}]\nkeep: {{last: 1, best: {{monitor: val_loss}}}}\n")
    away = root.with_name(root.name[:-1] + "a.yaml")
    blocked = root.with_name(root.name[:-1] + "x")
    blocked.write_text("a file where a folder is needed")
    away.write_text(f"tiers: [{root}, {blocked}]\n")
    bad.write_text("tiers: /data\noverhed: 3\nkeep: {lst: 3}\nmax_lost_work: much\n")
    hurt = RunFolder(root.with_name(root.name[:-1] + "h"))
    for step in (1, 2):
        hurt.add(step, arrays)
    hurt.flip(hurt.repository.ids()[-1].id, "state_dict/layer.weight")
    hurt.manifest_file(hurt.repository.ids()[0].id).write_bytes(b"{")
    foreign = root.with_name(root.name[:-1] + "o")
    foreign.mkdir()
    (foreign / "other.txt").write_text("of another program")
    source = tmp_path / "source.txt"
    source.write_text("no checkpoint")
    monkeypatch.chdir(tmp_path)
    none = root.with_name(root.name[:-1] + "n")
    names_of = {"ROOT": root, "FAR": far, "YAML": yaml, "BAD": bad, "AWAY": away, "HURT": hurt.path, "FOREIGN": foreign}
    names_of |= {"NONE": none, "PARENT": root.parent, "OUT": none.with_suffix(".out"), "SOURCE": source}
    return {name: str(path) for name, path in names_of.items()}


READING = ("ls", "show", "verify", "status", "goodput", "plan --days 0.1")
ALL_KINDS = (*READING, "report", "compact", "pin", "save-now", "stop")
COMMANDS = [
    *("--help", "nope", "--bad"),
    *(f"{verb} {option}" for verb in VERBS for option in ("--help", "--bad")),
    *(f"{verb} {place}" for verb in READING for place in ("ROOT", "YAML", "AWAY", "HURT")),
    *(f"{verb} {place}" for verb in ALL_KINDS for place in ("NONE", "FOREIGN", "BAD")),
    *(f"explain CKPT{number}" for number in (100, 300, 500, 701)),
    *"""
ls PARENT
show ROOT --all
show ROOT 77
show ROOT 0
show a b c
diff ROOT#1200 ROOT#12600
diff ROOT FAR
diff ROOT ROOT
diff ROOT#7 NONE
plan --failures llama3 --days 0.1
plan --failures much
export ROOT OUT --to safetensors
export ROOT OUT
export ROOT OUT --to safetensors --only nothing
export ROOT ROOT --to safetensors
export ROOT OUT --to lightning --dtype float16
export NONE OUT --to torch
export ROOT OUT --to nothing
export ROOT OUT --to torch --dry-run
import SOURCE NONE
import OUT NONE
import s3://bucket/x NONE
verify-resume
verify-resume --kill-at 30 -- true
prove ROOT -- true
prove NONE -- true
prove ROOT#1200
prove ROOT#1200 -- true
show ROOT#1200
verify NONE#1200
ls ROOT#1200
ls
export OUT
compact ROOT --dry-run
compact ROOT 99
cp ROOT OUT
cp HURT OUT
cp ROOT FOREIGN
cp NONE OUT
prune YAML --dry-run
prune ROOT --keep last=1 --dry-run
prune ROOT --keep last=1
prune ROOT
prune ROOT --keep lst=1
prune ROOT --keep last
prune ROOT --branch nope
prune ROOT --keep quota=1kB --dry-run
pin ROOT 1200 --note because-it-was-used-in-the-paper-of-the-third-quarter
pin ROOT
pin YAML 1200
unpin ROOT 1200
unpin YAML 99
doctor ROOT --size 1kB
doctor YAML --size 1kB
doctor BAD
check ROOT
check YAML --state 900TB
check AWAY
check BAD
check ROOT --state much
doctor ROOT --size much
doctor SOURCE --size 1kB
explain
explain CKPT202
explain 999
explain keep
explain overhed
explain interval ROOT
explain interval NONE
init OUT.yaml --preset nope
init BAD --preset laptop
completion nope
report ROOT --html OUT.html
report ROOT --html ROOT
save-now ROOT
stop ROOT --wait much
""".strip().splitlines(),
]
PATH = re.compile(r"\s*(?:do:|why:|in)?\s*\S*/\S+")


def unfit(lines: list[str], columns: int = 80) -> list[str]:
    """Lines that do not fit, but for a longer path that is alone on its line."""
    return [line for line in lines if len(line) > columns and not PATH.fullmatch(line)]


@pytest.mark.cells(12)
@pytest.mark.parametrize("verb", [*VERBS, "group"])
def test_no_row_wraps_in_80_columns(terminal: Terminal, world: dict[str, str], verb: str) -> None:
    """Answers and errors of the verb, with short and with long roots."""
    known = re.compile(rf"\b({'|'.join(world)})\b")
    asked = [one for one in COMMANDS if one.split()[0] == verb or (verb == "group" and one.split()[0] not in VERBS)]
    assert asked or verb in ("top", "schema", "completion")
    wrong = {}
    for one in asked:
        words = [known.sub(lambda found: world[found[0]], word) for word in one.split()]
        done = terminal(*words)
        assert "Traceback" not in done.out, done.out
        if bad := unfit(done.lines):
            wrong[one] = bad
        if done.code == 2 and done.lines:
            first = next((line for line in done.lines if line.startswith("ckpt: [CKPT")), "none")
            assert first != "none" and len(first) <= 80, (one, done.lines)
            long = [path for path in world.values() if len(path) > 60 and path in first]
            assert long == [], (one, first)
    assert wrong == {}, json.dumps(wrong, indent=1, ensure_ascii=False)


@pytest.mark.cells(1)
@pytest.mark.parametrize("option", ["-w", "--wide"])
@pytest.mark.parametrize("verb", ["ls", "status", "prune --keep last=1 --dry-run", "show"])
def test_wide_cuts_nothing(terminal: Terminal, world: dict[str, str], option: str, verb: str) -> None:
    """The same lines as in a file: whole ids, all metrics, no row in two lines."""
    verb, *options = verb.split()
    shown = terminal(verb, world["ROOT"], *options, option)
    plain = terminal(verb, world["ROOT"], *options)
    assert shown.code == plain.code == 0
    assert not any("…" in line for line in shown.lines)
    newest = re.search(r"\d{8}-s\d{10}-[0-9a-f]{8}", shown.out)
    assert newest is not None
    assert any(len(line) > 80 for line in shown.lines) or verb in ("show", "status")
    if verb == "ls":
        assert all(f"{name}=" in shown.out for name in METRICS)
        assert not all(f"{name}=" in plain.out for name in METRICS)


def test_a_wide_terminal_needs_no_option(terminal: Terminal, world: dict[str, str]) -> None:
    """Where there is room, nothing is cut."""
    assert terminal("ls", world["ROOT"], columns=250).lines == terminal("ls", world["ROOT"], "--wide").lines
