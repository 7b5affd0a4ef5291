"""The private classes of the package `datasets` that positions know are there, and nothing else names them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_engine
from ckpt_engine.data import private_names

PACKAGE = Path(ckpt_engine.__file__).parent


@pytest.mark.long
@pytest.mark.parametrize("name", private_names.DATASETS_NAMES)
def test_a_private_name_is_still_there(name: str) -> None:
    """If this fails, the package moved something: look at `ckpt_engine/data/private_names.py`."""
    module = pytest.importorskip("datasets.iterable_dataset")
    assert hasattr(module, name)


def test_nothing_else_knows_classes_of_the_package() -> None:
    """No other file names one of its classes or the prefix of its modules."""
    known = {*private_names.DATASETS_NAMES, private_names._PACKAGE}
    offenders = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "private_names.py" and any(name in path.read_text() for name in known)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in known
    ]
    assert offenders == []
