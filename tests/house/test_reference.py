"""The docstrings of the public names, of which docs/api.md is made, say what a caller has to know."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import accelerate_ckpt
import ckpt_engine
import lightning_ckpt
from ckpt_engine import testing

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
CLASSES = [
    pytest.param(getattr(package, name), id=f"{package.__name__}.{name}")
    for package in (ckpt_engine, lightning_ckpt, accelerate_ckpt)
    for name in package.__all__
]
CONTRACTS = [testing.StorageContract, testing.CodecContract]
WITHOUT_OWN_ARGUMENTS = {"Config", "SaveHandle"}
"""Options have descriptions of their own; handles are made by `save`."""


def section(doc: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    return found[1] if found else ""


def methods(kind: Any) -> Iterator[tuple[str, ast.FunctionDef, Any]]:
    """The function, or those that a class defines for its users: no hooks of a trainer, properties or private ones."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
            decorators = {ast.unparse(one) for one in node.decorator_list}
            if not decorators & {"property", "override", "log.setter"}:
                yield node.name, node, getattr(kind, node.name, kind)


def lacking(doc: str, arguments: list[str], raised: set[str], where: str) -> list[str]:
    named = re.findall(r"^    \*{0,2}(\w+(?:, \w+)*):", section(doc, "Args"), re.MULTILINE)
    known = {name for line in named for name in line.split(", ")}
    errors = section(doc, "Raises")
    return [f"{where}: no argument {one}" for one in arguments if one not in known] + [
        f"{where}: raises {one}" for one in sorted(raised) if one not in errors
    ]


def raised_by(node: ast.AST) -> set[str]:
    calls = [one.exc for one in ast.walk(node) if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call)]
    return {ast.unparse(call.func) for call in calls}


def arguments_of(node: ast.FunctionDef) -> list[str]:
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    listed += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
    return [one.arg for one in listed if one.arg not in ("self", "cls")]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_public_name_says_what_it_takes_raises_and_how_it_is_used(kind: Any) -> None:
    """With an example of its use; in the reference each one has its place."""
    doc = inspect.getdoc(kind) or ""
    assert re.search(r">>> |```python", doc), "no example"
    made = list(inspect.signature(kind).parameters) if kind.__name__ not in WITHOUT_OWN_ARGUMENTS else []
    assert lacking(doc, made, set(), kind.__name__) == []
    assert re.search(rf"^::: [\w.]*\b{kind.__name__}$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_public_method_says_what_it_takes_and_raises(kind: type) -> None:
    """A method may also refer to another one for its arguments and errors."""
    problems = []
    for name, node, method in methods(kind):
        doc = inspect.getdoc(method) or ""
        for other, part in re.findall(r"See `(\w+)\.(\w+)`", doc):
            doc += "\n\n" + (inspect.getdoc(getattr(getattr(ckpt_engine, other), part)) or "")
        doc = re.sub(r"\n\n(Args|Raises):\n((?:    .*\n?|\n)*)", r"\n\n\1:\n\2", doc)
        both = {
            title: "".join(re.findall(rf"^{title}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE))
            for title in ("Args", "Raises")
        }
        doc = f"Args:\n{both['Args']}\nRaises:\n{both['Raises']}"
        problems += lacking(doc, arguments_of(node), raised_by(node), f"{kind.__name__}.{name}")
    assert problems == []


def test_the_methods_of_a_checkpointer_have_examples() -> None:
    """All that users call in loops of their own."""
    kind = ckpt_engine.Checkpointer
    docs = (inspect.getdoc(kind) or "") + "".join(inspect.getdoc(one) or "" for _, _, one in methods(kind))
    examples = "\n".join(line for line in docs.splitlines() if line.lstrip().startswith((">>>", "...")))
    assert [name for name, _, _ in methods(kind) if f".{name}(" not in examples] == []


def test_the_contracts_are_in_the_reference() -> None:
    """With what a new storage or codec has to do to inherit them."""
    assert "::: ckpt_engine.testing" in PAGE
    assert "```python" in (testing.__doc__ or "")
    assert all(inspect.getdoc(one) for one in CONTRACTS)
