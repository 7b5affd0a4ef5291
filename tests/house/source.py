"""The code of this repository as trees, each parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, for all checks: a caller does not change it."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of its tree."""
    return tuple(ast.walk(tree_of(path)))
