"""`pytest --workers N`: processes that are forks of the one that has collected, each with the next file of tests.

What collecting imports is imported once, and the workers share one server of interpreters. More of them than there are
cores keep the cores busy while tests wait for storage, processes and signals.
"""

from __future__ import annotations

import atexit
import itertools
import os
import struct
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

from tests.support import huge_pages, interpreters

LONGEST = (
    *("examples/test_demo", "data/", "store/test_object_storage_obstore", "lightning/"),
    *("store/test_object_storage_faults", "loop/", "accelerate/ranks/", "ranks/test_diverging", "accelerate/"),
    *("recipes/", "cli/", "restore/memory_tier/", "restore/", "preempt/"),
)
"""Files that take long begin first, waiting ones beside computing ones: no worker is left with one at the end.

Those of `data` fork most, and a fork costs what its process has written to: their workers have done nothing yet.
"""
TOGETHER = "house"
"""The tests of this folder read the same code, which is parsed once for all of them."""
_INDEX = struct.Struct("=H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=_number, default=0, help="run in so many processes; auto: two for each core")


def _number(given: str) -> int:
    return 2 * (os.cpu_count() or 1) if given == "auto" else int(given)


def pytest_sessionstart(session: pytest.Session) -> None:
    """The servers of interpreters import while this process collects."""
    if session.config.option.workers > 1 and not session.config.option.collectonly:
        for preload in (interpreters.ENGINE, interpreters.LIGHTNING, interpreters.ACCELERATE, interpreters.MOTO):
            interpreters.server(preload)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of pytest's own."""
    workers, files = session.config.option.workers, _files(session.items)
    if workers < 2 or len(files) < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    huge_pages.collapse()
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    queue, filled = os.pipe()
    os.write(filled, b"".join(map(_INDEX.pack, range(len(files)))))
    os.close(filled)
    running: dict[Connection, int] = {}
    for number in range(workers):
        ours, theirs = Pipe(duplex=False)
        (folder := base / str(number)).mkdir()
        pid = os.fork()
        if pid == 0:
            for one in (ours, *running):
                one.close()
            session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            _live(session, itertools.chain.from_iterable(map(files.__getitem__, _taken(queue))), theirs)
        theirs.close()
        running[ours] = pid
    _hear(session, running, queue)
    return True


def _files(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests by file, those first that take long."""
    files = [list(group) for _, group in itertools.groupby(items, lambda item: _part(item.path))]
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    return sorted(files, key=lambda one: next((ranks[n] for n in LONGEST if f"tests/{n}" in str(one[0].path)), 99))


def _part(path: Path) -> Path:
    return path.parent if path.parent.name == TOGETHER else path


def _taken(queue: int) -> Iterator[int]:
    """Numbers of files that no other worker gets."""
    while packed := os.read(queue, _INDEX.size):
        yield _INDEX.unpack(packed)[0]


def _hear(session: pytest.Session, running: dict[Connection, int], queue: int) -> None:
    """Report what the workers say, until all have ended."""
    hook, tests = session.config.hook, dict.fromkeys(running, "")
    ends = {os.pidfd_open(pid): (one, pid) for one, pid in running.items()}  # what a test leaves may have the pipe open
    while ends:
        for ready in wait([*ends, *running]):
            one = ends[ready][0] if isinstance(ready, int) else ready
            while one in running and one.poll():
                try:
                    kind, said = one.recv()
                except (EOFError, OSError):
                    del running[one]
                    break
                if kind == "test":
                    tests[one] = said
                else:
                    report = hook.pytest_report_from_serializable(config=session.config, data=said)
                    hook.pytest_runtest_logreport(report=report)
            if isinstance(ready, int):
                os.close(ready)
                running.pop(one, None)
                _, status = os.waitpid(ends.pop(ready)[1], 0)
                if status:
                    hook.pytest_runtest_logreport(report=_death(tests[one], os.waitstatus_to_exitcode(status)))
        if session.shouldfail or session.shouldstop:
            for _ in _taken(queue):  # no worker begins with another file
                pass
    os.close(queue)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _death(nodeid: str, status: int) -> pytest.TestReport:
    text = f"the process that ran this test, and was to run others of its file, ended with {status}"
    return pytest.TestReport(nodeid, (nodeid.partition("::")[0], None, nodeid), {}, "failed", text, "call")


# ---- in a worker


class _Teller:
    """Says how each test goes."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._parent.send(("test", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._parent.send(("report", data))


def _live(session: pytest.Session, tests: Iterator[pytest.Item], parent: Connection) -> None:
    """Run tests, and end this process."""
    status = 1
    try:
        atexit._clear()  # what the parent has opened, it closes
        plugins = session.config.pluginmanager
        capture, terminal = plugins.get_plugin("capturemanager"), plugins.get_plugin("terminalreporter")
        capture.stop_global_capturing()  # its files are the parent's
        capture.start_global_capturing()
        capture.suspend_global_capture()
        terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115, PTH123 - to the end
        plugins.register(_Teller(session.config, parent))
        test = next(tests, None)
        while test is not None:
            following = next(tests, None)
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc(file=sys.__stderr__)
    finally:
        atexit._run_exitfuncs()
        os._exit(status)
