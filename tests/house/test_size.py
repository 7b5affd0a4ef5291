"""How large the packages may get."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.house.source import nodes_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
MOST_STATEMENTS = 37_000


def _is_code(node: ast.AST) -> bool:
    """Imports and docstrings, those of attributes included, are none; how code is formatted changes nothing."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom) and not is_text


def _statements(nodes: Iterable[ast.AST]) -> int:
    return sum(map(_is_code, nodes))


def test_the_packages_stay_within_their_statements() -> None:
    """A feature pays by what it deletes."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    assert sum(_statements(nodes_of(file)) for file in files) <= MOST_STATEMENTS


def test_formatting_and_docstrings_do_not_count() -> None:
    """One definition, one condition with a body of one statement, and one value with its docstring."""
    text = '''import os\ndef one():\n    """Text."""\n    if os:\n        return 1\nTWO = (\n    2\n)\n"""Two."""\n'''
    assert _statements(ast.walk(ast.parse(text))) == 4
