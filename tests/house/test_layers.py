"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    "module",
    [
        "ckpt_engine",
        "ckpt_engine.persist.__main__",
        "ckpt_engine.persist.client",
        "ckpt_engine.store.repository",
        "ckpt_engine.frequency.driver",
        "ckpt_engine.preempt.plan",
        "ckpt_engine.config",
        "ckpt_engine.cli.main",
    ],
)
def test_the_writer_and_the_command_line_start_without_torch(module: str) -> None:
    """Importing these in a fresh interpreter loads neither torch nor a trainer."""
    code = f"import sys, {module}; print(sorted({{'torch', 'lightning', 'accelerate'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_its_one_responsibility_and_stays_short(path: Path) -> None:
    """Each file starts with a docstring and has 450 lines at most."""
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert text.count("\n") <= 450


def test_the_lazy_public_names_exist() -> None:
    """`ckpt_engine.__all__` is sorted and everything in it can be imported."""
    import ckpt_engine

    assert ckpt_engine.__all__ == sorted(ckpt_engine.__all__)
    assert all(getattr(ckpt_engine, name).__name__ == name for name in ckpt_engine.__all__)
    with pytest.raises(AttributeError):
        _ = ckpt_engine.nothing  # type: ignore[attr-defined]


def test_every_error_has_its_own_code_and_is_in_the_tree_of_the_docstring() -> None:
    """Codes are unique and documented."""
    from ckpt_engine import errors

    found = {
        name: kind.code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.CkptError)
    }
    assert len(set(found.values())) == len(found)
    for name, code in found.items():
        assert any(name in line and code in line for line in (errors.__doc__ or "").splitlines()), name
