"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.house import file_map
from tests.house.source import nodes_of, tree_of
from tests.support import interpreters

ROOT = Path(__file__).parents[2]
PACKAGES = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
MOST_IN_FILE = 400
MOST_IN_FUNCTION = 60
MOST_MEMBERS = 8
MOST_ARGUMENTS = 10
MOST_ATTRIBUTES = 15
LONG_CONSTRUCTORS = frozenset({"AdaptiveCheckpoint"})
"""LightningCLI needs the options of the callback."""
UNPLAIN = re.compile(r"\b(nobody|whoever|anew|told|held)\b", re.IGNORECASE)
TOP = {
    *(
        ".ci",
        ".github",
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "SECURITY.md",
        "Makefile",
        "README.md",
        "STYLE.md",
        "mkdocs.yml",
        "pyproject.toml",
    ),
    *(
        "accelerate_ckpt",
        "benchmarks",
        "changes",
        "ckpt_engine",
        "docs",
        "examples",
        "lightning_ckpt",
        "requirements",
        "tests",
    ),
}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


WITHOUT_TORCH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    assert not {"torch", "lightning", "accelerate"} & set(sys.modules), module
"""


def test_the_writer_and_the_command_line_start_without_torch() -> None:
    """Importing these in a fresh interpreter loads neither torch nor a trainer."""
    modules = (
        *("ckpt_engine", "ckpt_engine.writer.__main__", "ckpt_engine.writer.client", "ckpt_engine.store.repository"),
        *("ckpt_engine.frequency.cadence", "ckpt_engine.preempt.stop_plan", "ckpt_engine.config"),
        "ckpt_engine.cli.main",
    )
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *modules], timeout=60, check=True)


@pytest.mark.cells(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_its_one_responsibility_and_stays_short(package: str) -> None:
    """Each file starts with a docstring and has 400 code lines at most, each function 60."""
    too_long = []
    for path in (one for one in MODULES if one.is_relative_to(ROOT / package)):
        text = path.read_text()
        tree = tree_of(path)
        if not text.strip():
            continue
        assert ast.get_docstring(tree), f"{path}: no module docstring"
        code = _code_lines(text, tree)
        if len(code) > MOST_IN_FILE:
            too_long.append(f"{path.relative_to(ROOT)}: {len(code)} code lines")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = len(code.intersection(range(node.lineno, node.end_lineno + 1)))
                if length > MOST_IN_FUNCTION:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.name}: {length} code lines")
    assert too_long == []


def test_protocols_and_constructors_stay_small() -> None:
    """Who implements or calls one has to know all of it."""
    wide, long = set(), set()
    for node in (node for path in MODULES for node in nodes_of(path)):
        if not isinstance(node, ast.ClassDef):
            continue
        members = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AnnAssign)]
        if "Protocol" in map(ast.unparse, node.bases) and len(members) > MOST_MEMBERS:
            wide.add(node.name)
        for one in ast.walk(node):
            if isinstance(one, ast.FunctionDef) and one.name == "__init__" and _arguments(one) > MOST_ARGUMENTS:
                long.add(node.name)
    assert (wide, long) == (set(), LONG_CONSTRUCTORS)


def _arguments(function: ast.FunctionDef) -> int:
    return len(function.args.args) + len(function.args.kwonlyargs) - 1


def test_a_name_means_one_thing() -> None:
    """No two files have the same name, and no two public classes, but the `AdaptiveCheckpoint` of each trainer."""
    files = Counter(path.name for path in MODULES if not path.name.startswith("__"))
    classes = Counter(
        node.name
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in files.items() if times > 1] == []
    assert [name for name, times in classes.items() if times > 1] == ["AdaptiveCheckpoint"]


TWICE = frozenset(
    {*("Count", "Counters", "Duration", "Folder", "Groups", "Mode", "Names", "Save", "Size", "Slots", "State", "Wrap")}
)
"""Aliases of types whose name is also that of another alias or of a class: they may only become fewer."""
WIDE = frozenset(
    {
        *("Config", "FitRun", "Options", "PrimaryTier", "SimulatedJob", "Training"),
    }
)
"""Classes with more attributes than `MOST_ATTRIBUTES`: they may only become fewer."""


def test_an_alias_of_a_type_has_a_name_of_its_own() -> None:
    """Else a reader has to look at the imports to know what is meant."""
    classes = {node.name for path in MODULES for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    aliases = Counter(name for path in MODULES for name in _aliases(path))
    found = {name for name, times in aliases.items() if times > 1 or name in classes}
    assert "Rule" in aliases, "the search finds nothing"
    assert found - TWICE == set()


def _aliases(path: Path) -> set[str]:
    """The public names in capitals and small letters that a module assigns."""
    targets = (one for node in tree_of(path).body if isinstance(node, ast.Assign) for one in node.targets)
    return {one.id for one in targets if isinstance(one, ast.Name) and re.fullmatch("[A-Z][A-Za-z]*[a-z]", one.id)}


def test_a_class_has_few_attributes() -> None:
    """Fields included; frozen values are as wide as what they describe."""
    classes = [node for path in MODULES for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    wide = {node.name for node in classes if len(_attributes(node)) > MOST_ATTRIBUTES}
    assert "Config" in wide, "the search finds nothing"
    assert wide - WIDE == set()


def _attributes(node: ast.ClassDef) -> set[str]:
    if any("frozen=True" in ast.unparse(one) for one in node.decorator_list):
        return set()
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return fields | {one.attr for one in stored if ast.unparse(one.value) == "self"}


def test_messages_use_plain_words() -> None:
    """Words that a reader whose first language is not English has to look up, or that leave open who does something."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in MODULES
        for docstrings in [{id(one.value) for one in nodes_of(path) if isinstance(one, ast.Expr)}]
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if " " in node.value.strip() and UNPLAIN.search(node.value)
    ]
    assert found == []


def test_pages_for_users_use_plain_words() -> None:
    """Those that a benchmark run writes are in the words of the benchmarks."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{page.name}:{number}: {line}"
        for page in pages
        if page.name != "benchmarks.md"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if UNPLAIN.search(line)
    ]
    assert len(pages) > 20
    assert found == []


def test_the_page_for_contributors_has_the_layers_that_are_checked() -> None:
    """In the order and with the groups of `pyproject.toml`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [layer.replace("ckpt_engine.", "") for one in contracts for layer in one.get("layers", ())]
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert len(checked) > 10, "the search finds nothing"
    assert f": {' → '.join(checked)}. " in page


def test_the_top_level_holds_only_what_belongs_there() -> None:
    """A file that a test leaves behind does not become part of the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert {name.split("/")[0] for name in tracked.stdout.splitlines()} == TOP


def test_what_explains_the_code_uses_plain_words() -> None:
    """Docstrings and comments, also of tests; names of the code in them stand in backquotes or before a colon."""
    folders = (*PACKAGES, "tests", "benchmarks", "examples")
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        for text in [path.read_text()]
        if UNPLAIN.search(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING) and (token.string.startswith(("#", '"""')))
        if UNPLAIN.search(re.sub(r"`[^`]*`|^ +\w+:", "", token.string, flags=re.MULTILINE))
    ]
    assert found == []


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that are neither blank, comment nor docstring."""
    documentation = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in documentation
    }


STORE = ROOT / "ckpt_engine" / "store" / "storage"


def _storages() -> set[str]:
    """Names of the classes that store objects, and of those that are made of them."""
    found = {"Storage", "Folder", "Versions", "Nodes", "ReadOnlyStorage"}
    classes = [node for path in MODULES for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    for node in classes:
        if {"put", "get_into", "sweep"} <= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}:
            found.add(node.name)
    while more := {n.name for n in classes if {ast.unparse(base) for base in n.bases} & found} - found:
        found |= more
    return found


def test_no_code_above_the_store_asks_for_the_class_of_a_storage() -> None:
    """What a storage can do is in its `capabilities`, which show through wrappers."""
    kinds = _storages()
    assert {"LocalStorage", "NodeStorage", "JointStorage", "WatchedStorage"} <= kinds, "the search finds nothing"
    problems = []
    for path in (one for one in MODULES if not one.is_relative_to(STORE)):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {ast.unparse(one).rpartition(".")[2] for one in ast.walk(node.args[1])}
                problems += [f"{path.relative_to(ROOT)}:{node.lineno}: {kind}" for kind in asked & kinds]
    assert problems == []


@pytest.mark.parametrize("folder", ["cli", "tools"])
def test_no_tool_changes_a_class_or_a_module_of_the_engine(folder: str) -> None:
    """What a tool needs of the engine is a public name or an option."""
    paths = [path for path in MODULES if path.is_relative_to(ROOT / "ckpt_engine" / folder)]
    assert len(paths) > 10, "the search finds nothing"
    assert [problem for path in paths for problem in _changes_of_imports(tree_of(path))] == []


@pytest.mark.parametrize(
    "code",
    [
        "from ckpt_engine import Engine\nEngine.save = None",
        "import ckpt_engine.engine as engine\nengine.AGREE_SECONDS += 1",
        "def patch():\n    from ckpt_engine import Engine\n    del Engine.save",
        "setattr(found, 'save', None)",
        "import sys\nsys.meta_path = []",
    ],
)
def test_a_change_of_what_is_imported_is_found(code: str) -> None:
    """In a function too, and by `setattr`."""
    assert len(_changes_of_imports(ast.parse(code))) == 1


def _changes_of_imports(tree: ast.Module) -> list[str]:
    nodes = list(ast.walk(tree))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    names = {one.asname or one.name.split(".")[0] for node in imports for one in node.names}
    changed = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if ast.unparse(node.value).split(".")[0] in names
    ]
    calls = (ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    return changed + [name for name in calls if name in ("setattr", "delattr", "sys.meta_path.insert")]


def test_the_lazy_public_names_exist() -> None:
    """`ckpt_engine.__all__` is sorted and everything in it can be imported."""
    import ckpt_engine

    assert ckpt_engine.__all__ == sorted(ckpt_engine.__all__)
    assert all(getattr(ckpt_engine, name).__name__ == name for name in ckpt_engine.__all__)
    with pytest.raises(AttributeError):
        _ = ckpt_engine.nothing  # type: ignore[attr-defined]


MOST_NAMES_OF_AN_ADAPTER = 30
"""Of the engine, that the package of one trainer imports; `lint-imports` sees that they are of one module."""


@pytest.mark.parametrize("package", ["lightning_ckpt", "accelerate_ckpt"])
def test_an_adapter_imports_few_names_of_the_engine(package: str) -> None:
    """All of them are in `ckpt_engine.adapter`, which has no other names and no modules."""
    from ckpt_engine import adapter

    names = {one: _names_of_the_engine(ROOT / one) for one in ("lightning_ckpt", "accelerate_ckpt")}
    assert len(names[package]) <= MOST_NAMES_OF_AN_ADAPTER
    assert sorted(names["lightning_ckpt"] | names["accelerate_ckpt"]) == sorted(adapter.__all__)
    assert not [name for name in adapter.__all__ if isinstance(getattr(adapter, name), ModuleType)]
    with pytest.raises(AttributeError):
        _ = adapter.nothing  # type: ignore[attr-defined]


def test_the_page_for_authors_of_adapters_has_all_names_and_the_example() -> None:
    """And the example imports nothing else of the engine."""
    from ckpt_engine import adapter

    page, example = (ROOT / "docs" / "adapters.md").read_text(), ROOT / "examples" / "plugins" / "ignite_adapter"
    assert (example / "ignite_ckpt.py").read_text().rstrip() in page
    assert [name for name in adapter.__all__ if f"`{name}`" not in page] == []
    assert _names_of_the_engine(example) <= set(adapter.__all__)


def _names_of_the_engine(package: Path) -> set[str]:
    paths = list(package.rglob("*.py"))
    imports = (node for path in paths for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom))
    return {one.name for node in imports if (node.module or "").split(".")[0] == "ckpt_engine" for one in node.names}


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("ckpt_engine", 1),
        ("lightning_ckpt.AdaptiveCheckpoint", 6),
        ("accelerate_ckpt.AdaptiveCheckpoint", 2),
        ("accelerate_ckpt.TransformersCallback", 3),
    ],
)
def test_a_package_imports_little_before_a_run_begins(name: str, most: int) -> None:
    """Its own modules, in a process that has none of them: each takes about 2 ms, and there are some 200.

    Its class is there, too, which a script names; what reads options is not.
    """
    package = name.partition(".")[0]
    code = f"import {package}, sys; {name}; print(*[one for one in sys.modules if one.split('.')[0] in {PACKAGES!r}])"
    options = {"preload": interpreters.LIGHTNING, "without_ours": True}
    done = interpreters.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, **options)
    assert 1 <= len(done.stdout.split()) <= most, done.stdout


@pytest.mark.parametrize(
    ("line", "missing", "extra"),
    [
        ("import lightning_ckpt", "lightning", "lightning"),
        ("from lightning_ckpt import AdaptiveCheckpoint", "lightning", "lightning"),
        ("import accelerate_ckpt", "accelerate", "accelerate"),
        ("from accelerate_ckpt import TransformersCallback", "transformers", "transformers"),
        ("from accelerate_ckpt import AdaptiveCheckpoint", "accelerate", "accelerate"),
    ],
)
def test_a_missing_trainer_is_named_with_its_extra(line: str, missing: str, extra: str) -> None:
    """Programs that try to import it catch the same kind of error as before."""
    code = f"import sys; sys.modules[{missing!r}] = None\ntry:\n    {line}\nexcept ModuleNotFoundError as err:"
    code += "\n    print(err, err.name)"
    command, options = [sys.executable, "-c", code], {"cwd": ROOT, "without_ours": True}
    done = interpreters.run(command, check=True, capture_output=True, text=True, **options)
    assert f"pip install 'ckpt-engine[{extra}]'" in done.stdout
    assert done.stdout.split()[-1].split(".")[0] == missing


@pytest.mark.parametrize(
    ("words", "named"), [(("a",), {}), (("a", "b", "c"), {}), ((), {}), ((), {"word": "a"}), (("a",), {"more": "b"})]
)
def test_a_class_derived_from_the_lazy_one_takes_its_own_arguments(
    words: tuple[str, ...], named: dict[str, str]
) -> None:
    """It is a class of the module that defines it."""
    from accelerate_ckpt import AdaptiveCheckpoint

    class Mine(AdaptiveCheckpoint):
        def __init__(self, *words: str, **named: str) -> None:
            self.given = words, named

        def release(self) -> None: ...

    one = Mine(*words, **named)
    assert one.given == (words, named)
    assert type(one).__module__ == __name__


def test_a_class_derived_from_the_lazy_one_keeps_its_methods() -> None:
    """`AdaptiveCheckpoint` of Accelerate becomes a tracker when it is made, and what derives from it as well."""
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint
    from ckpt_engine.adapter import ConfigError, Tracker

    class Mine(AdaptiveCheckpoint):
        def __init__(self, word: str) -> None:
            self.word = word

        def release(self) -> None:
            self.word += "!"

    one = Mine("released")
    one.release()
    assert one.word == "released!"
    assert isinstance(one, Mine) and isinstance(one, AdaptiveCheckpoint) and isinstance(one, Tracker)
    assert type(one).__name__ == "Mine"
    assert issubclass(Mine, AdaptiveCheckpoint)
    with pytest.raises(ConfigError, match="optimizer"):
        AdaptiveCheckpoint(Accelerator(cpu=True), "/tmp/nothing-is-made-here", writer="thread")


def test_the_lazy_callback_is_one_of_transformers(tmp_path: Path) -> None:
    """A `TrainerCallback` before and after one is made; classes derived from it choose their own arguments."""
    from transformers import TrainerCallback

    from accelerate_ckpt import TransformersCallback

    class Mine(TransformersCallback):
        def __init__(self, root: Path, *words: str) -> None:
            super().__init__(str(root))
            self.words = words

        def on_evaluate(self, *events: Any, **objects: Any) -> None:
            super().on_evaluate(*events, **objects)

    assert issubclass(TransformersCallback, TrainerCallback)
    one = Mine(tmp_path, "first", "second")
    one.on_evaluate(None, None, None)
    made = TransformersCallback(str(tmp_path))
    assert isinstance(one, TransformersCallback) and type(made) is TransformersCallback
    assert type(one) is Mine and issubclass(Mine, TrainerCallback)
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(copied) is TransformersCallback
        assert copied.config == made.config
    assert copy.deepcopy(one).words == ("first", "second")


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


def test_the_page_of_files_is_what_the_files_say() -> None:
    """`python -m tests.house.file_map` writes it."""
    assert file_map.PAGE.read_text() == file_map.page()
