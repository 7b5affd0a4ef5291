"""Every command, option, key and page that a message or the documentation names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from ckpt_engine.cli.main import VERBS, commands
from ckpt_engine.config import Config
from tests.house.source import nodes_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_OURS = {
    "--check-hash-based-pycs",
    "--ckpt-only",
    "--ckpt-outcomes",
    "--ckpt-trainers",
    "--ckpt_path",
    "--epochs",
    "--gpus-per-node",
    "--identity",
    "--identity_provider",
    "--kill-on-bad-exit",
    "--load_fast",
    "--lr",
    "--max-restarts",
    "--nnodes",
    "--nodes",
    "--now",
    "--nproc-per-node",
    "--ntasks-per-node",
    "--only",
    "--open-mode",
    "--per_device_train_batch_size",
    "--private_key",
    "--public_key",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--record",
    "--requeue",
    "--shutdown-timeout",
    "--signal",
    "--signature",
    "--standalone",
    "--time",
}
"""Options of Python, pytest plugins, torchrun, Slurm, TensorBoard, benchmarks, LightningCLI, model_signing, scripts."""


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Every text in the code, with where it is; what a format puts in is `{}`."""
    found = []
    for path in (one for package in PACKAGES for one in sorted((ROOT / package).rglob("*.py"))):
        inside = {id(part) for node in nodes_of(path) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes_of(path):
            text = None
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            if text:
                found.append((f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text))
    return tuple(found)


def pages() -> Iterator[tuple[str, str]]:
    return ((page.name, page.read_text()) for page in PAGES)


@cache
def command(verb: str) -> click.Command:
    found = commands.get_command(click.Context(commands), verb)
    assert found is not None
    return found


@cache
def options_of(verb: str) -> frozenset[str]:
    names = {name for one in command(verb).params if isinstance(one, click.Option) for name in one.opts}
    return frozenset(names | {name for one in command(verb).params for name in one.secondary_opts} | {"--help", "-h"})


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """What is written as a call of `ckpt`: in backticks, or a line of its own."""
    for found in re.finditer(r"`ckpt ([a-z][a-z-]*)([^`]*)`|^ *(?:\$ )?ckpt ([a-z][a-z-]*)(.*)$", text, re.MULTILINE):
        verb, rest = found[1] or found[3], (found[2] or found[4] or "").split("#")[0]
        ours = re.split(r" -- |[|;&]", rest)[0]  # behind it another program has its own
        yield verb, re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours)


def all_options() -> set[str]:
    return {name for verb in VERBS for name in options_of(verb)} | {"--version"}


@pytest.mark.parametrize("where", ["messages", "pages"])
def test_every_named_command_and_option_of_it_exists(where: str) -> None:
    """The option belongs to that command."""
    problems = []
    for place, text in texts() if where == "messages" else pages():
        for verb, options in calls(text):
            if verb not in VERBS:
                problems.append(f"{place}: no command `ckpt {verb}`")
            else:
                problems += [f"{place}: ckpt {verb} has no {one}" for one in options if one not in options_of(verb)]
    assert problems == []


@pytest.mark.parametrize("where", ["messages", "pages"])
def test_every_other_named_option_is_one_of_some_command(where: str) -> None:
    """That is so where the text does not name the command beside the option."""
    known = all_options() | NOT_OURS
    problems = []
    for place, text in texts() if where == "messages" else pages():
        problems += [f"{place}: {one}" for one in re.findall(r"(?<![\w`-])--[a-z][a-z_-]+", text) if one not in known]
    assert problems == []


def _keys(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema.get("properties", {}))
        return own.union(*(_keys(value) for value in schema.values())) if schema else own
    return set().union(*map(_keys, schema)) if isinstance(schema, list) and schema else set()


ARGUMENTS = {"into", "own", "transport"}
"""Of `load`, of `ProcessGroupRanks` and of storages."""


def hints() -> Iterator[tuple[str, str]]:
    for path in (one for package in PACKAGES for one in sorted((ROOT / package).rglob("*.py"))):
        for node in nodes_of(path):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                for part in (one for one in ast.walk(node.value) if isinstance(one, ast.Constant)):
                    yield f"{path.relative_to(ROOT)}:{node.value.lineno}", str(part.value)


def test_every_key_of_the_configuration_that_a_hint_names_exists() -> None:
    """A name in backticks, and `key: value` with a key of several words or one that stands for itself."""
    known = _keys(Config.model_json_schema(by_alias=True)) | set(Config.model_fields)
    found = [
        (place, key)
        for place, text in hints()
        for key in (
            *re.findall(r"`([a-z_]+)`", text),
            *re.findall(r"(?:\bwith|`)\s?([a-z_]+): (?=\w|\[|\{)", text),
        )
    ]
    assert {"slots", "tiers", "rng", "pickle"} <= {key for _, key in found}, "the search finds nothing"
    tiers = {"memory"}
    assert [one for one in found if one[1] not in known | tiers | ARGUMENTS] == []


def test_every_named_page_exists() -> None:
    """Every page of the documentation that a message or a link names exists."""
    problems = []
    for place, text in texts():
        problems += [f"{place}: {one}" for one in re.findall(r"docs/[\w/-]+\.md", text) if not (ROOT / one).exists()]
    folders = (ROOT, ROOT / "changes", ROOT / "docs" / "decisions")
    for page in (*PAGES, *(one for folder in folders for one in sorted(folder.glob("*.md")))):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / link).exists():
                problems.append(f"{page.name}: {link}")
    assert problems == []


def test_the_search_finds_what_is_wrong() -> None:
    """A command that is not there, an option of another one, and a call in a line of its own."""
    assert list(calls("see `ckpt frob x --y`, or\n  ckpt ls /run --all  # --not-this")) == [
        ("frob", ["--y"]),
        ("ls", ["--all"]),
    ]
    assert "--all" not in options_of("ls")
    assert "--keep" in options_of("prune")


def test_the_page_of_the_architecture_shows_every_thread() -> None:
    """Each name that the code gives to a thread or a pool of threads."""
    named = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in nodes_of(path):
                if isinstance(node, ast.keyword) and node.arg in ("name", "thread_name_prefix"):
                    named |= {
                        found
                        for part in ast.walk(node.value)
                        if isinstance(part, ast.Constant)
                        for found in re.findall(r"^ckpt-[a-z]+(?:-[a-z]+)*", str(part.value))
                    }
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert {"ckpt-writer", "ckpt-stage", "ckpt-tier"} <= named, "the search finds nothing"
    assert sorted(one for one in named if f"`{one}" not in page) == []


def test_the_page_of_the_architecture_names_what_exists() -> None:
    """Folders and files, in the pictures and in the table, where `folder/file` is below one of the packages."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"(?<![\w./-])(?!docs/)((?:[a-z_]+/)+[a-z_]*(?:\.py)?)(?![\w/-])", page))
    roots = [ROOT, ROOT / "ckpt_engine"]
    missing = [
        one
        for one in sorted(named)
        if not any((root / one).exists() or (root / f"{one}.py").exists() for root in roots)
    ]
    assert len(named) > 20, "the search finds nothing"
    assert missing == []
