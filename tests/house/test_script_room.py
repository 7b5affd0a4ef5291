"""Frames, code objects and source text of the user's script: the files that touch them, which only become fewer."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.source import nodes_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("accelerate_ckpt", "ckpt_engine", "lightning_ckpt")
MODULES = frozenset({"ast", "dis", "inspect", "linecache"})
NAMES = frozenset({"CodeType", "FrameType", "_getframe", "_current_frames", "getsource", "__code__", "tb_frame"})
OF_FRAMES = frozenset({"f_back", "f_code", "f_globals", "f_lasti", "f_lineno", "f_locals", "gi_code", "gi_frame"})
ROOM = ("ckpt_engine/audit/", "ckpt_engine/loop/shape.py")
"""Where they belong: what looks at the script."""
OUTSIDE = {
    "accelerate_ckpt/private_trainer.py": {"inspect", "f_back", "f_locals"},
    "ckpt_engine/cli/explain.py": {"inspect"},
    "ckpt_engine/data/streams.py": {"__code__", "co_freevars", "co_names"},
    "ckpt_engine/preempt/stop_requests.py": {"FrameType"},
    "ckpt_engine/whose_code.py": {"__code__", "co_filename"},
    "lightning_ckpt/compat.py": {"_getframe", "f_globals"},
    "lightning_ckpt/compat_data.py": {"FrameType", "_getframe", "f_back", "f_locals"},
}
"""The other files that touch them, and what of them."""


def touched(path: Path) -> set[str]:
    """The modules and names of Python with which a file looks at code that runs."""
    found = set[str]()
    for node in nodes_of(path):
        match node:
            case ast.Import(names=names):
                found |= {one.name for one in names} & MODULES
            case ast.ImportFrom(module=module, names=names):
                found |= {module or ""} & MODULES
                found |= {one.name for one in names} & NAMES
            case ast.Attribute(attr=attr):
                found |= {attr} if attr in NAMES | OF_FRAMES or attr.startswith("co_") else set()
    return found


def test_the_files_that_look_at_the_script_only_become_fewer() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): touched(path) for path in paths}
    outside = {name: what - OUTSIDE.get(name, set()) for name, what in found.items() if not name.startswith(ROOM)}
    assert {name: what for name, what in outside.items() if what} == {}, "ask audit/ or loop/shape.py instead"
