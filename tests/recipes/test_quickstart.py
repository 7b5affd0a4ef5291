"""The quickstarts as a reader copies them: killed in mid epoch, each says on the screen that it is resumed."""

from __future__ import annotations

import html
import itertools
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import REPOSITORY, Life, until

PAGE = (REPOSITORY / "docs" / "quickstart.md").read_text()
ROLES = ("Lightning", "Accelerate", "transformers", "Plain loop")
OTHER_LIGHTNING = "pytorch_lightning"
"""The role of Lightning with this package, as a sentence of its section says."""
KILLED = "python train.py & until ls run1/snapshots/*; do sleep 1; done 2> /dev/null; kill -9 $!"
"""By progress and not by the clock: a machine that imports slowly is not killed before its first snapshot."""
OUR_LINES = 3
NOTEBOOK = "from pathlib import Path; from tests.recipes.test_notebook import Notebook as N; "
NOTEBOOK += "print(N().run_cell(Path('train.py').read_text()))"


def section(role: str) -> str:
    role = role.replace(OTHER_LIGHTNING, "Lightning")
    return PAGE.split(f"## {role}\n")[1].split("\n## ")[0]


def script(role: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", section(role), re.DOTALL)
    if role == OTHER_LIGHTNING:
        found = re.sub(r"\blightning(\.pytorch)?(?=[ .])", OTHER_LIGHTNING, found)
    return str(found)


def lines_of(picture: Path) -> list[str]:
    """The text of a recorded terminal."""
    texts = re.findall(r'<text class="terminal-r[^>]* y="([\d.]+)"[^>]*>(.*?)</text>', picture.read_text())
    rows = itertools.groupby(texts, lambda one: one[0])
    return [html.unescape("".join(text for _, text in row)).replace("\xa0", " ").rstrip() for _, row in rows]


def ours(code: str) -> list[str]:
    """Its lines that are there because of us."""
    return [line for line in code.splitlines() if re.search(r"ckpt|Checkpoint|callback|run\.", line)]


@pytest.mark.parametrize("role", ROLES)
def test_a_quickstart_is_three_commands_and_few_lines(role: str) -> None:
    """It installs an extra that exists, is killed, and started again; all of it fits on a screen."""
    (commands,) = re.findall(r"```\n(.*?)```", section(role), re.DOTALL)
    install, killed, again = map(shlex.split, commands.splitlines())
    extras = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    package, _, extra = install[2].partition("[")
    assert (install[:2], package) == (["pip", "install"], "ckpt-engine")
    assert not extra or extra.rstrip("]") in extras
    assert (killed, again) == (shlex.split(KILLED), ["python", "train.py"])
    assert 2 <= len(ours(script(role))) <= OUR_LINES, ours(script(role))
    assert len(section(role).splitlines()) <= 40


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("role", "start"),
    [
        pytest.param("Lightning", ["train.py"], marks=pytest.mark.slow),
        pytest.param(OTHER_LIGHTNING, ["train.py"], marks=pytest.mark.slow),
        pytest.param("Accelerate", ["train.py"], marks=pytest.mark.slow),
        pytest.param("transformers", ["train.py"], marks=pytest.mark.slow),
        ("Plain loop", ["train.py"]),
        pytest.param("Plain loop", ["-c", NOTEBOOK], id="Notebook", marks=pytest.mark.slow),
    ],
)
def test_a_quickstart_is_resumed(role: str, start: list[str], tmp_path: Path) -> None:
    """Killed once a snapshot is durable, in its first epoch, and in a notebook the kernel with it."""
    (tmp_path / "train.py").write_text(script(role))
    command = [sys.executable, *start]
    first = Life(command, tmp_path, forked=True, within=tmp_path)
    until(lambda: any((tmp_path / "run1" / "snapshots").glob("*.json")), first.log)
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.ends() == -signal.SIGKILL
    assert "starting fresh" in first.log.read_text()
    second = Life(command, tmp_path, forked=True, within=tmp_path)
    until(lambda: second.process.poll() is not None or "resumed at step" in second.log.read_text(), second.log)
    steps = re.findall(r"resumed at step ([\d,]+), epoch 0 ", second.log.read_text())
    assert steps and int(steps[0].replace(",", "")) > 0, second.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recording_of_the_readme_can_be_made_again(tmp_path: Path) -> None:
    """A killed run of that example, started again, has the bits of one that nothing stops."""
    picture = tmp_path / "terminal.svg"
    made = Life([sys.executable, REPOSITORY / "examples" / "record_terminal.py", picture, "--epochs", "60"], tmp_path)
    assert made.ends() == 0, made.log.read_text()
    shown = "\n".join(lines_of(picture))
    assert re.search(r"\$ timeout -s KILL \d+ python train.py --epochs 60\n(.*\n)*Killed\n", shown), shown
    assert "resumed at step" in shown
    assert "are equal, bit" in shown
