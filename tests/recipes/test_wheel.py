"""The quickstarts from the wheel, six roles: fresh environments, and the commands as the page has them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import PATIENCE_SECONDS, REPOSITORY, Life, until
from tests.recipes.test_quickstart import OTHER_LIGHTNING, ROLES, script, section

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, REPOSITORY], check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this environment, as links, without ours: gigabytes that need not be installed again."""
    folder = tmp_path_factory.mktemp("others")
    for package in (one for path in sys.path if path.endswith("site-packages") for one in Path(path).iterdir()):
        if "ckpt_engine" not in package.name and package.suffix != ".pth" and not (folder / package.name).exists():
            (folder / package.name).symlink_to(package)
    return folder


class Machine:
    """An environment without our packages, and an empty folder as working directory.

    Our wheel is found in `wheels` as it would be on the index; pip finds what it needs in `others`.
    """

    def __init__(self, folder: Path, wheels: Path, others: Path) -> None:
        self.folder, self.wheels = folder, wheels
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        for old in site.glob("setuptools*"):  # of Python 3.11, and too old for torch
            shutil.rmtree(old)
        (site / "others.pth").write_text(f"{others}\n")

    def life(self, command: str) -> Life:
        """Start a line of a shell."""
        path = f"{self.folder / 'venv' / 'bin'}:/usr/bin:/bin"
        variables = {"PATH": path, "PIP_FIND_LINKS": str(self.wheels), "PIP_NO_INDEX": "1", "PIP_QUIET": "1"}
        shell = ["env", "-u", "PYTHONPATH", "-C", self.folder, "bash", "-c", command]
        return Life(shell, self.folder, **variables)

    def does(self, command: str) -> str:
        """Its log, of all commands up to here."""
        life = self.life(command)
        assert life.ends() == 0, life.log.read_text()
        return life.log.read_text()


@pytest.mark.parametrize("role", [*ROLES, OTHER_LIGHTNING])
def test_a_quickstart_from_the_wheel_is_resumed(role: str, tmp_path: Path, wheels: Path, others: Path) -> None:
    """Its three commands, one after the other: installed, killed, resumed. The machine decides in which epoch."""
    machine = Machine(tmp_path, wheels, others)
    (commands,) = re.findall(r"```\n(.*?)```", section(role), re.DOTALL)
    install, killed, again = commands.splitlines()
    machine.does(install)
    assert "No broken requirements" in machine.does("env -u PIP_QUIET pip check")
    (tmp_path / "train.py").write_text(script(role))
    first = machine.life(killed)
    assert first.ends() == 0, first.log.read_text()
    assert re.search(r"run1/snapshots/\S+\.json\n", first.log.read_text()), first.log.read_text()
    assert "starting fresh" in first.log.read_text()
    assert f"{tmp_path / 'venv'}" in machine.does("python -c 'import ckpt_engine; print(ckpt_engine.__file__)'")
    second = machine.life(again)
    until(lambda: second.process.poll() is not None or "resumed at step" in second.log.read_text(), second.log)
    assert re.search(r"resumed at step [1-9][\d,]*, epoch \d+ ", second.log.read_text()), second.log.read_text()


def test_the_notebook_from_the_wheel_is_resumed(tmp_path: Path, wheels: Path, others: Path) -> None:
    """In a real kernel: its install cell, the cell of the page, a killed kernel, the same cell, the stop button."""
    machine = Machine(tmp_path, wheels, others)
    machine.does("env -u PIP_NO_INDEX pip install ipykernel jupyter_client")
    (install,) = re.findall(r"`(%pip install [^`]*)`", section("Notebook"))
    (tmp_path / "cell.py").write_text(script("Plain loop"))
    driver = REPOSITORY / "tests" / "recipes" / "kernel_driver.py"
    life = machine.life(f"python {driver} cell.py run1 '{install}'")
    life.process.wait(2 * PATIENCE_SECONDS)
    said = life.log.read_text()
    before, _, after = said.partition("--- interrupted")
    assert re.search(r"resumed at step [1-9][\d,]*, epoch 0 ", before), said
    assert "KeyboardInterrupt" in after, said
    assert "SystemExit" not in said and "is durable on" in after, said
