"""Texts that somebody else wrote are shown, and never steer the terminal: by every verb, error, log and page."""

from __future__ import annotations

import ast
import json
import logging
import random
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.errors import CkptError, visible
from ckpt_engine.store.sealed_json import seal
from tests.support.forged import forge

HOSTILE = "\x1b]0;pwn\x07\x1b[2JX\nfake line 100\u202e\x9b31m\r\u2028\x7f\u2066"
STEERING = (
    *("\x1b[31m", "\x1b]8;;http://x\x07", "\r", "\n  fake line", "\x85", "\x9b2J", "\x00", "\x7f"),
    *("\u200f", "\u2069", "\u2029", "\ufeff", "\u202d"),
)
CLI = Path(__file__).parents[2] / "ckpt_engine/cli"


def _renamed(body: dict[str, Any], text: str) -> None:
    body["entries"][text] = body["entries"].pop("model/w")
    body["tree"]["model"]["w"]["entry"] = text


Change = Callable[[dict[str, Any], str], object]
FIELDS: dict[str, Change] = {
    "reason": lambda m, text: m["info"].update(reason=text),
    "metric": lambda m, text: m["info"].update(metrics={text: 1.0}),
    "component": lambda m, text: (m["tree"].update({text: 5}), m["info"]["components"].update({text: 7})),
    "key": lambda m, text: m["tree"].update(x={text: text}),
    "text": lambda m, text: m["tree"].update(x=text),
    "software": lambda m, text: m.update(software={text: text}),
    "notes": lambda m, text: m.update(notes={text: text}),
    "slimmed": lambda m, text: m.update(notes={"slimmed": {"from": text, "without": [text]}}),
    "attempt": lambda m, text: m["info"].update(line={"attempt": text, "before": [[text, 1]]}),
    "class": lambda m, text: m["tree"].update(y={"$": "dataclass", "type": text, "fields": {text: 1}}),
    "namedtuple": lambda m, text: m["tree"].update(y={"$": "namedtuple", "type": text, "fields": [text], "items": [1]}),
    "enum": lambda m, text: m["tree"].update(y={"$": "enum", "type": text, "name": text}),
    "path": lambda m, text: m["tree"].update(y={"$": "path", "v": text, "pure": True}),
    "dtype of torch": lambda m, text: m["tree"].update(y={"$": "torch.dtype", "v": text}),
    "unknown node": lambda m, text: m["tree"].update(z={"$": text}),
    "codec": lambda m, text: m["entries"]["model/w"]["pieces"][0].update(codec=text),
    "base": lambda m, text: m["entries"]["model/w"]["pieces"][0].update(codec="rows", base=text),
    "group": lambda m, text: m["entries"]["model/w"]["pieces"][0].update(codec=text, group=[text]),
    "digest": lambda m, text: m["entries"]["model/w"]["pieces"][0].update(digest=text),
    "dtype": lambda m, text: m["entries"]["model/w"].update(dtype=text),
    "container dtype": lambda m, text: m["entries"]["model/w"].update(container_dtype=text),
    "file": lambda m, text: m["files"][0].update(name=text),
    "device": lambda m, text: m["tree"]["model"]["w"].update(device=text),
    "run": lambda m, text: m.update(run=text),
    "id": lambda m, text: m["info"].update(id=text),
    "parent": lambda m, text: m["info"].update(parent=text),
    "format": lambda m, text: m.update(format=text),
    "version": lambda m, text: m.update(version=text),
    "entry": _renamed,
    "missing entry": lambda m, text: m["tree"]["model"]["w"].update(entry=text),
    "world": lambda m, text: m["world"].update({text: text}),
    "structure": lambda m, text: m["world"].update(structure=text),
}
VERBS = (
    *("ls", "ls --json", "show", "show --json", "show --all", "verify", "verify --json", "status", "goodput", "pin"),
    *("prune --dry-run --keep last=1", "diff", "diff --json", "report", "report --json", "cp", "compact --dry-run"),
    *("export --to safetensors --all", "export --to torch"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three snapshots, the newest of which is to be changed."""
    root = tmp_path_factory.mktemp("foreign") / "run"
    with Checkpointer(root, keep={"last": 3}, writer="thread") as ckpt:
        for step in range(3):
            state = {"model": {"w": torch.full((500,), float(step))}, "step": step}
            ckpt.save(state, step=step, metrics={"loss": 1.0 / (step + 1)}).wait(30)
    return root


def words(verb: str, root: Path, out: Path) -> list[str]:
    """The command line of a verb."""
    name, *options = verb.split()
    places = {
        "diff": [f"{root}#1", f"{root}#2"],
        "cp": [str(root), str(out / "copy")],
        "export": [str(root), str(out / "file")],
        "report": [str(root), "--html", str(out / "page.html"), "--force"],
    }
    return [name, *places.get(name, [str(root)]), *options]


def steering(text: str) -> set[str]:
    """What of a text a terminal would not show as a character."""
    return {one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def require_shown(verb: str, root: Path, out: Path) -> None:
    """A verb prints lines of characters, and none that the store has made up."""
    done = _invoked(verb, root, out)
    assert not steering(done), (verb, done)
    assert not re.search(r"(?m)^\s*fake line", done), (verb, done)
    assert "Traceback" not in done
    page = out / "page.html"
    if page.exists():
        assert not steering(page.read_text()) and "\n" + "fake line" not in page.read_text()


def _invoked(verb: str, root: Path, out: Path) -> str:
    done = CliRunner().invoke(commands, words(verb, root, out))
    if isinstance(done.exception, CkptError):
        return f"{done.output}\nckpt: {done.exception}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def changed(run: Path, root: Path, change: Change, text: str) -> Path:
    """The run, with a text in its newest manifest."""
    shutil.copytree(run, root)
    forge(root, lambda body: change(body, text))
    return root


@pytest.mark.cells(8)
@pytest.mark.parametrize(("number", "field"), list(enumerate(FIELDS)))
def test_no_field_of_a_manifest_steers_the_terminal(run: Path, tmp_path: Path, number: int, field: str) -> None:
    """Every fourth verb, in text and as JSON, and the page."""
    root = changed(run, tmp_path / "run", FIELDS[field], HOSTILE)
    for verb in VERBS[number % 4 :: 4]:
        require_shown(verb, root, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_no_verb_is_steered_by_any_field(run: Path, tmp_path: Path, field: str) -> None:
    """All pairs of both."""
    root = changed(run, tmp_path / "run", FIELDS[field], HOSTILE)
    for verb in VERBS:
        require_shown(verb, root, tmp_path)


def drawn(chance: random.Random) -> str:
    """A text with something that no terminal shows."""
    plain = ["x", "ö", "/", "~", "日", " ", "{"]
    return "".join(chance.choice([*STEERING, *plain]) for _ in range(12)) + chance.choice(STEERING)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(220))
def test_drawn_texts_do_not_steer_the_terminal(run: Path, tmp_path: Path, seed: int) -> None:
    """Other texts, in other fields."""
    chance = random.Random(seed)
    root = changed(run, tmp_path / "run", FIELDS[chance.choice(list(FIELDS))], drawn(chance))
    for verb in chance.sample(VERBS, 5):
        require_shown(verb, root, tmp_path)


@pytest.mark.parametrize("name", ["attempts.json", "lease.json", "status.json", "rollback.json", "ckpt.json"])
def test_no_other_record_steers_the_terminal(run: Path, tmp_path: Path, name: str) -> None:
    """Each text in it is hostile, at any depth."""
    root = tmp_path / "run"
    shutil.copytree(run, root)

    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(one) for key, one in value.items()}
        if isinstance(value, list):
            return [hostile(one) for one in value]
        return HOSTILE if value is None or isinstance(value, str) else value

    if (root / name).exists() and (root / name).read_bytes().strip(b"{} \n"):
        row = json.loads((root / name).read_bytes())
        row.pop("digest", None)
    else:
        row = {"host": "", "process": 1, "command": "", "who": "", "why": "", "run": "", "url": ""}
    (root / name).write_bytes(seal(hostile(row)) + b"\n")
    for verb in VERBS[::2]:
        require_shown(verb, root, tmp_path)


def test_a_pin_with_a_hostile_note_is_shown(run: Path, tmp_path: Path) -> None:
    """Another user may have pinned the snapshot."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    _invoked("pin", root, tmp_path)
    assert CliRunner().invoke(commands, ["pin", str(root), "1", "--note", HOSTILE]).exit_code == 0
    for verb in VERBS[:10]:
        require_shown(verb, root, tmp_path)


@pytest.mark.parametrize("field", FIELDS)
def test_a_resume_shows_foreign_texts_in_its_log_and_error(
    run: Path, tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The report, the reasons of what is passed over, and the error where nothing is left."""
    root = changed(run, tmp_path / "run", FIELDS[field], HOSTILE)
    caplog.set_level(logging.DEBUG)
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.load()
        assert ckpt.loaded is not None
        texts = [one.reason for one in ckpt.loaded.rejected]
    for path in sorted((root / "snapshots").glob("*.json"))[:-1]:
        path.unlink()
    try:
        Checkpointer(root).load(into={"model": {"other": torch.zeros(1)}})
    except CkptError as err:
        texts += [str(err), err.message, err.hint or ""]
    texts += [record.getMessage() for record in caplog.records]
    for text in texts:
        assert not steering(text) and not re.search(r"(?m)^\s*fake line", text), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ö 日本 → x", "plain ö 日本 → x"),
        ("a\nb", r"a\nb"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b\x7f\x00", r"\x9b\x7f\x00"),
        ("\u202e\u2066\u2028", r"\u202e\u2066\u2028"),
        ("\ud800", r"\ud800"),
        (r"C:\new", r"C:\new"),
    ],
)
def test_what_is_not_printable_becomes_an_escape(text: str, shown: str) -> None:
    """And all else stays as it is; doing it twice changes nothing."""
    assert visible(text) == visible(visible(text)) == shown
    assert CkptError(text, text, hint=text).message == f"{shown}\n{shown}"


def test_commands_write_through_one_function() -> None:
    """No verb calls click's own functions, or `print`: it would forget the escapes."""
    for path in sorted(CLI.glob("*.py")):
        if path.name == "output.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"), path
