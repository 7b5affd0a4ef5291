"""The command group: help, exit codes, errors, and no torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.cli import ls
from ckpt_engine.cli.main import VERBS, commands, main

Ckpt = Callable[..., Any]
PAGE = (Path(__file__).parents[2] / "docs/cli.md").read_text()


def test_every_verb_explains_itself(ckpt: Ckpt) -> None:
    """Each verb has a line in the listing and a help page."""
    listing = ckpt("--help").out
    for verb in VERBS:
        assert re.search(rf"^  {verb}  +\S", listing, re.MULTILINE)
        assert ckpt(verb, "-h").out.startswith(f"Usage: ckpt {verb}")


@pytest.mark.parametrize("arguments", [["nope"], ["cp"], ["ls", "--bad", "x"], ["show", "a", "b", "c"]])
def test_wrong_usage_is_exit_code_2(ckpt: Ckpt, arguments: list[str]) -> None:
    """Usage errors name the command and go to the error stream."""
    result = ckpt(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "--help` shows its arguments" in result.err


def test_a_misspelt_verb_names_the_nearest(ckpt: Ckpt) -> None:
    """The exit code is 2, and the message names the most similar verb."""
    result = ckpt("verfy", "/data/run1")
    assert result.code == 2
    assert "Did you mean 'verify'?" in result.err


def test_version(ckpt: Ckpt) -> None:
    """The version of the distribution."""
    assert re.fullmatch(r"ckpt, version \d+\.\d+\.\d+\S*\n", ckpt("--version").out)


def test_mistakes_of_ours_keep_their_traceback(run_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors of the project's tree become messages; anything else is a bug and is shown whole."""

    def broken(root: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ls, "open_run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["ls", str(run_folder.path)])


def _python(code: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.long
def test_only_what_reads_values_imports_torch(run_folder: Any, arrays: Any, tmp_path: Path) -> None:
    """`ckpt` answers at once on a login node; importing torch takes seconds. `diff` and some exports need it."""
    run_folder.add(1, arrays)
    run_folder.add(2, arrays)
    root, copy = str(run_folder.path), str(tmp_path / "copy")
    calls = [["--help"], ["schema"], *([verb, root] for verb in ("ls", "show", "status", "verify", "compact"))]
    calls += [["pin", root, "2"], ["unpin", root, "2"], ["cp", root, copy], ["prune", root, "--keep", "last=1"]]
    calls += [["doctor", copy, "--size", "1 kB"], *([verb, "--help"] for verb in VERBS)]
    code = (
        "import sys\nfrom ckpt_engine.cli.main import main\n"
        f"for arguments in {calls!r}:\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert not end.code, (arguments, end.code)\n"
        "    assert not {'torch', 'lightning'} & set(sys.modules), arguments"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_a_reader_that_goes_away_is_no_error(run_folder: Any, arrays: Any) -> None:
    """`ckpt ls ROOT | head -1` does not end in a traceback."""
    for step in range(3):
        run_folder.add(step, arrays)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "ckpt_engine.cli.main", "ls", str(run_folder.path)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_output_without_a_terminal_is_plain(run_folder: Any, arrays: Any) -> None:
    """No colours, no cut lines, no progress bar; also where the locale knows ASCII only."""
    run_folder.add(1, arrays, metrics={f"a_rather_long_metric_name_{i}": 0.5 for i in range(20)})
    for verb in ("ls", "show", "verify"):
        result = subprocess.run(
            [sys.executable, "-m", "ckpt_engine.cli.main", verb, str(run_folder.path)],
            capture_output=True,
            timeout=120,
            env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
        )
        assert result.returncode == 0, result.stderr
        said = [line for line in result.stderr.splitlines() if not line.endswith(b" so far")]  # a machine that is busy
        assert (said, b"\x1b" in result.stdout) == ([], False)
        assert verb == "verify" or b"a_rather_long_metric_name_19=0.5" in result.stdout


def test_every_command_is_documented() -> None:
    """docs/cli.md has a section for each verb that names its arguments and options."""
    for verb in VERBS:
        command = commands.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        section = re.search(rf"^## ckpt {verb}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
        assert section, verb
        for parameter in command.params:
            for name in parameter.opts if parameter.param_type_name == "option" else ():
                if name in (
                    "--endpoint-url",
                    "--storage-option",
                    "--wide",
                    "-w",
                ):  # of all verbs, and said of all of them
                    assert name in PAGE.partition("\n## ")[0]
                    continue
                assert re.search(rf"[`\[ ]{name}\b", section[1]), (verb, name)
    assert re.findall(r"^## ckpt ([\w-]+)", PAGE, re.MULTILINE) == list(VERBS)


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    """Most of what a quick verb takes are imports, and Ctrl-C comes then."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ckpt_engine.cli import command; command()"
    hears = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, preexec_fn=hears
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
