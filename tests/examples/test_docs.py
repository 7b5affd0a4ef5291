"""The Python of the documentation: it compiles, names options that exist, and its loops resume."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import VERBS, commands
from ckpt_engine.config import OPTION_NAMES, Config, load_config
from tests.support.digests import digest, seed_everything

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STEPS = 6


def blocks(page: Path, language: str = "python") -> list[str]:
    found = re.findall(r"^( *)```(\w*).*?\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def block(page: str, words: str) -> str:
    (found,) = [one for one in blocks(ROOT / page) if words in one]
    return found


@pytest.mark.parametrize("page", [one for one in PAGES if blocks(one)], ids=lambda one: one.name)
def test_code_compiles_and_names_options_that_exist(page: Path) -> None:
    """The options of the three classes that take some are checked."""
    options = set(Config.model_fields) | {"ranks", "config"}
    for code in blocks(page):
        for call in (one for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in ("AdaptiveCheckpoint", "Checkpointer", "TransformersCallback"):
                assert {one.arg for one in call.keywords} <= options, code


@pytest.mark.parametrize("page", [one for one in PAGES if blocks(one, "yaml")], ids=lambda one: one.name)
def test_yaml_is_what_its_reader_takes(page: Path, tmp_path: Path) -> None:
    """Our options are valid; what is for Kubernetes or LightningCLI is YAML."""
    for text in blocks(page, "yaml"):
        if isinstance(yaml.safe_load(text), list):
            text = f"tiers:\n{textwrap.indent(text, '  ')}"
        if not set(yaml.safe_load(text)) <= set(OPTION_NAMES):
            continue
        (tmp_path / "ckpt.yaml").write_text(
            text if re.search("^tiers:", text, re.MULTILINE) else f"{text}tiers: /data/run1\n"
        )
        load_config(tmp_path / "ckpt.yaml")


def lines_of_shells(page: Path) -> list[str]:
    """In blocks without a language, and after `$`, where a block shows what comes back, too."""
    found: list[str] = []
    for text in blocks(page, ""):
        lines = text.replace("\\\n", " ").splitlines()
        prompts = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
        found += prompts or [line.strip() for line in lines if re.match(r"(ckpt|pip|make) +[^=\s]", line.strip())]
    return [line.partition(" #")[0].strip() for line in found]


@pytest.mark.parametrize("page", [one for one in PAGES if lines_of_shells(one)], ids=lambda one: one.name)
def test_commands_exist_with_the_options_that_are_shown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `ckpt`, as its own parser reads them; extras of `pip install` and targets of `make` exist, too."""
    monkeypatch.setenv("CKPT_ROOT", "/data/run1")  # of those that are shown without a ROOT
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for line in lines_of_shells(page):
        program, *words = shlex.split(line)
        if program == "make":
            assert words[0] in targets, line
        elif program == "pip":
            assert set(re.findall(r"ckpt-engine\[([\w,-]+)\]", line)) <= extras, line
        elif program == "ckpt" and not re.search(r"\[|\||\.\.\.", line):
            command = commands.get_command(click.Context(commands), words[0])
            assert words[0] in VERBS and command is not None, line
            command.make_context(words[0], words[1:], parent=commands.make_context("ckpt", []))


def test_the_weights_of_a_snapshot_are_used_in_three_lines(tmp_path: Path) -> None:
    """While the run that makes snapshots is still open, and without a lease."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 4))
    with Checkpointer(tmp_path, writer="thread", every_n_steps=1) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
        assert ckpt.wait(60)
        (code,) = [one for one in blocks(ROOT / "docs" / "how-to.md") if ".load()" in one]
        assert len([line for line in code.splitlines() if line]) == 3
        other = nn.Linear(4, 2)
        exec(compile(code.replace('"/data/run1"', repr(str(tmp_path))), "documentation", "exec"), {"model": other})
        newest = ckpt.load(into=None)
    assert newest is not None
    assert torch.equal(other.weight, newest["model"]["weight"])
    assert not torch.equal(other.weight, nn.Linear(4, 2).weight)


def test_the_readme_on_the_package_index_has_no_relative_links(tmp_path: Path) -> None:
    """By the line with which a release makes them absolute; none has an anchor, as nothing checks those."""
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    assert [one for one in links if "#" in one] == []
    (line,) = re.findall(r"run: (sed .*) README\.md", (ROOT / ".github" / "workflows" / "release.yml").read_text())
    shutil.copy(ROOT / "README.md", tmp_path)
    release = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1.2.3", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", f"{line} README.md"], cwd=tmp_path, env=release, check=True, timeout=60)
    made = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert [one for one in made if not one.startswith("https://")] == []
    assert "https://github.com/owner/name/blob/v1.2.3/docs/quickstart.md" in made
    assert "https://raw.githubusercontent.com/owner/name/v1.2.3/docs/figures/demo.svg" in made


class Stop(Exception):
    """In the middle of training."""


class Script:
    """What the loops of the documentation leave to their readers."""

    def __init__(self, seed: int, stops_after: int | None) -> None:
        seed_everything(seed)
        self.left = stops_after
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(0.1 * (number + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss_of(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stop
        return (out - y).square().mean()

    def train_one_step(self) -> None:
        self.loss_of(self.model(torch.ones(2, 4)), torch.zeros(2, 1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, code: str, root: Path, **names: Any) -> str:
        """The digest of weights and optimizer at the end, or "" if it was stopped."""
        code = re.sub('"/data/run1"|"/shared/run"', f'{str(root)!r}, writer="thread"', code)
        space = {"model": self.model, "optimizer": self.optimizer, "torch": torch, "steps": STEPS, **names}
        space |= {"train_one_step": self.train_one_step, "loss_of": self.loss_of}
        try:
            exec(compile(code, "documentation", "exec"), space)
        except Stop:
            return ""
        finally:
            space.get("ckpt", Nothing).close()
        model, optimizer = space["model"], space["optimizer"]
        found = digest(weights=model.state_dict(), optimizer=optimizer.state_dict())
        return found["weights"] + found["optimizer"]


class Nothing:
    @staticmethod
    def close() -> None: ...


def assert_resumes(code: str, folder: Path, **names: Any) -> None:
    """A run that is stopped and started again under another seed ends as one without a stop."""
    whole = Script(0, None).run(code, folder / "whole", **names)
    assert whole
    assert Script(0, STEPS // 2).run(code, folder / "stopped", **names) == ""
    assert Script(7, None).run(code, folder / "stopped", **names) == whole


def test_the_loop_that_saves_by_hand_resumes(tmp_path: Path) -> None:
    """The loop saves by hand and stores no random streams, so it has no dropout."""
    code = block("docs/plain-loops.md", "train_one_step()").replace("model.load", "model.eval(); model.load", 1)
    assert_resumes(code, tmp_path)


def test_the_loop_of_the_page_on_sharded_models_resumes(tmp_path: Path) -> None:
    """Into live tensors, with random streams, in a process group."""
    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    code = block("docs/sharded.md", "get_state_dict(model, optimizer)")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_resumes(code, tmp_path, Checkpointer=Checkpointer, ProcessGroupRanks=ProcessGroupRanks)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_the_tracked_loop_resumes(tmp_path: Path) -> None:
    """With workers, a scheduler and an evaluation."""
    code = block("docs/plain-loops.md", "loss_of(model(x), y)").replace('overhead="1%"', "every_n_steps=1")
    script = re.search(r"model = MyModel\(\)\noptimizer = .*\n", code)
    assert script
    code = code.replace(script.group(), "").replace("batch_size=64", "batch_size=2")
    data = [(torch.full((4,), float(i)), torch.tensor([float(i)])) for i in range(6)]
    assert_resumes(code, tmp_path, dataset=data, epochs=2, evaluate=lambda _: 0.0)
