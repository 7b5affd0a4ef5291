"""How examples of laws are drawn, and what makes the whole suite quick."""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckpt_engine.loop import phases
from ckpt_engine.writer import launch
from tests.support import huge_pages, interpreters

FORKING = frozenset({"accelerate", "data", "examples", "lightning", "loop", "machines", "preempt"})
"""The tests of these folders fork their process, most of them for workers of loaders. What either side has written to
since is in small pages again."""
_OURS = r"(?:tests|benchmarks|examples)[\w.]*"
_IMPORTS = re.compile(rf"^(?:from|import) ({_OURS})(?: import (\([^)]*\)|.*))?", re.MULTILINE)
gc.disable()  # while tests are collected, which leaves nothing to free
pytest_plugins = ("tests.support.long_tests", "tests.support.workers")
pytest.register_assert_rewrite("ckpt_engine.testing")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it in the background: processes inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is no failure: how long an example takes to draw or to run says nothing about a law.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=50, **_PATIENT)
settings.register_profile("explore", derandomize=False, max_examples=400, print_blob=True, **_PATIENT)
settings.load_profile("same")


@pytest.fixture(autouse=True, scope="session")
def writers_are_forked() -> None:
    """Those that this process starts."""
    interpreters.fork_writers(launch)


@pytest.fixture(autouse=True, scope="session")
def moves_are_in_their_table() -> None:
    """Training continues after another move of a loop's life, and a test does not."""

    def refuse(move: str) -> None:
        raise AssertionError(move)

    phases.unexpected = refuse


def pytest_collection_finish() -> None:
    """What collecting has imported stays, and with it what the first optimizer of a process would import.

    Each `Trainer` of Lightning asks for the callbacks of all installed packages, which stay the same.
    """
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
        _seeds_note_no_stack()
        _loggers_of_torch_propagate()
        _loaders_end_soon()
    registry = sys.modules.get("lightning.fabric.utilities.registry")
    if registry is not None:
        registry.entry_points = cache(registry.entry_points)
    # From Python 3.14 on loader workers are forks of a process that would import these for each of them.
    heavy = ("torch", "lightning.pytorch", "transformers")
    multiprocessing.set_forkserver_preload([name for name in heavy if name in sys.modules])
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def _seeds_note_no_stack() -> None:
    """`torch.manual_seed` writes down the sources of its callers for each kind of device that is not there: 1 ms."""
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        if hasattr(sys.modules.get(name), "traceback"):
            sys.modules[name].traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


def _loggers_of_torch_propagate() -> None:
    """pytest gives its handlers to each logger that does not, six times for each test: 57 of torch take 1 ms."""
    for name, one in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(one, logging.Logger):
            one.propagate = True


def _loaders_end_soon() -> None:
    """A loader that only the garbage collector ends waits so long for each of its workers before it terminates it.

    Its queue may be collected before it: then no worker hears that it is to end, and torch waits 5 s for each. That may
    be between two tests.
    """
    importlib.import_module("torch.utils.data._utils").MP_STATUS_CHECK_INTERVAL = 0.1  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def what_is_there_stays() -> None:
    """Neither a garbage collector nor a search for iterators or a fork has to look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def engines_end_with_their_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests of a file leave open would go on beside those that follow: writers, threads, loader workers."""
    if request.config.option.workers > 1 and request.path.parent.name in FORKING:
        huge_pages.collapse()
    before = _engines()
    yield
    for tenure in [one for one in _engines() if one not in before]:
        tenure._give_way()


@pytest.fixture(autouse=True, scope="module")
def other_tests_are_foreign(request: pytest.FixtureRequest) -> None:
    """A script's process has its own modules: hidden state is looked for in what the file of the test imports only."""
    modules = sys.modules.get("ckpt_engine.audit.roots")
    if modules is not None:
        ours = {name for name in sys.modules if name.startswith(("tests.", "benchmarks.", "examples."))}
        modules._FOREIGN.update(ours)
        modules._FOREIGN.difference_update(_imported(request.module.__name__))


@cache
def _imported(name: str) -> frozenset[str]:
    """A module of ours, and those that it imports, and these."""
    found, waiting = set[str](), [name]
    while waiting:
        if (one := waiting.pop()) not in found and (module := sys.modules.get(one)) is not None:
            found.add(one)
            text = Path(module.__file__).read_text() if module.__file__ else ""
            for package, names in _IMPORTS.findall(text):
                waiting += [package, *(f"{package}.{each}" for each in re.findall(r"\w+", names))]
    return frozenset(found)


@pytest.fixture(autouse=True, scope="module")
def accelerate_begins() -> None:
    """Its classes keep what the tests of another file left, an unfinished accumulation included."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.PartialState._reset_state()
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def _engines() -> list[Any]:
    ownership = sys.modules.get("ckpt_engine.snapshot.ownership")
    return [] if ownership is None else list(ownership._tenures.values())
