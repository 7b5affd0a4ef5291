"""Makes `docs/files.md`, where what is, from the docstrings of the files: `python -m tests.house.file_map`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import tree_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("lightning_ckpt", "accelerate_ckpt", "ckpt_engine")
HEAD = """# The files

One line for each file: what it is responsible for, and the names that are public in it. The
[architecture](architecture.md) shows how they work together, the [glossary](glossary.md) what the words mean.
`python -m tests.house.file_map` makes this page from the code.
"""
TABLE = "| file | what it does |\n|---|---|\n"


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for folder in folders():
        parts.append(f"## {folder.relative_to(ROOT)}/\n\n{summary(folder / '__init__.py')}\n\n{TABLE}")
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py" or definitions(path):
                parts[-1] += f"| `{path.name}` | {' '.join((summary(path), names(path))).strip()} |\n"
    return "\n".join(parts)


def folders() -> Iterator[Path]:
    for package in PACKAGES:
        root = ROOT / package
        yield from sorted({path.parent for path in root.rglob("*.py")})


def summary(path: Path) -> str:
    """The first paragraph of the docstring, as a row of a table can have it."""
    text = ast.get_docstring(tree_of(path)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def definitions(path: Path) -> list[str]:
    """The public classes and functions of a file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [one.name for one in tree_of(path).body if isinstance(one, kinds) and not one.name.startswith("_")]


def names(path: Path) -> str:
    return ", ".join(f"`{name}`" for name in definitions(path))


if __name__ == "__main__":
    PAGE.write_text(page())
