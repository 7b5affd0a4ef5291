"""Counts the signs that a file has several topics: pure functions of a syntax tree."""

from __future__ import annotations

import ast
import re

SEVERAL = re.compile(r"[.!?] [A-Z`\"]|;|,[^,]*\b(?:and|or)\b|:[^:]*,[^:]*,")
"""A second sentence, a semicolon, "a, b and c", or "all of it: a, b, c"."""


def constant_blocks(tree: ast.Module) -> int:
    """How many blocks of assignments stand between two definitions of a module."""
    kinds = ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kinds += "d"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            kinds += "c"
    return len(re.findall("(?<=d)c+(?=d)", kinds))


def summary(tree: ast.Module) -> str:
    """The first paragraph of the docstring as one line."""
    return " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())


def lists_topics(text: str) -> bool:
    """Whether a summary is a list, or has more than one subject."""
    return SEVERAL.search(text) is not None
