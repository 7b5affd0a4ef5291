"""Preemption sources: a stop-file, a command, a page of a loopback server; what is no answer is said."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.config.sections import Source
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.preempt import stop_requests
from ckpt_engine.preempt.stop_requests import PreemptionSource, PreemptionSourceError, open_source


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and pages may take their time."""
    monkeypatch.setattr(stop_requests, "ANSWER_SECONDS", 60.0)


def source(**options: Any) -> PreemptionSource:
    return open_source(Source(**options), SystemClock())


# ---------------------------------------------------------------------- files


def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    """With the grace of its entry."""
    path = tmp_path / "STOP"
    watched = source(file=str(path), every="2 s", grace="1 min")
    assert watched.every_seconds == 2.0
    assert watched.poll() is None
    path.touch()
    found = watched.poll()
    assert found is not None
    assert (found.who, found.grace_seconds, found.exit_code) == (f"the file {path}", 60.0, 143)


def test_a_file_that_was_there_counts_once_it_changes(tmp_path: Path) -> None:
    """Else a run that is started again would stop again at once."""
    path = tmp_path / "STOP"
    path.touch()
    watched = source(file=str(path))
    assert watched.poll() is None
    os.utime(path, ns=(1, 1))
    assert watched.poll() is not None
    path.unlink()
    assert watched.poll() is None
    path.touch()
    assert watched.poll() is not None


def test_a_folder_that_cannot_be_looked_into_is_no_notice(tmp_path: Path) -> None:
    """The source raises an error instead."""
    (tmp_path / "file").touch()
    with pytest.raises(PreemptionSourceError, match="cannot be looked at"):
        source(file=str(tmp_path / "file" / "STOP")).poll()


# ---------------------------------------------------------------------- commands


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_says_yes_or_no() -> None:
    """The exit status of the command is the answer."""
    assert source(command=python("raise SystemExit(1)")).poll() is None
    found = source(command=python("")).poll()
    assert found is not None and found.who == f"the command {sys.executable}"


def test_a_command_in_trouble_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another status, too long, not there."""
    with pytest.raises(PreemptionSourceError, match="ended with 3: no such instance"):
        source(command=python("import sys; print('no such instance', file=sys.stderr); sys.exit(3)")).poll()
    with pytest.raises(PreemptionSourceError, match="cannot be run: No such file"):
        source(command=["/no/such/program"]).poll()
    monkeypatch.setattr(stop_requests, "ANSWER_SECONDS", 0.2)
    with pytest.raises(PreemptionSourceError, match="did not end"):
        source(command=python("import threading; threading.Event().wait()")).poll()


# ---------------------------------------------------------------------- pages


class Page:
    """A server on the loopback interface whose one page tests change."""

    def __init__(self) -> None:
        self.status, self.body = 404, b""
        self.quiet = threading.Event()
        self.quiet.set()
        self.headers: list[dict[str, str]] = []
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.headers.append(dict(self.headers))
                self.send_response(page.status)
                self.end_headers()
                try:
                    while not page.quiet.wait(0.02):  # a byte at a time, for ever
                        self.wfile.write(b".")
                except OSError:
                    return
                self.wfile.write(page.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/spot/instance-action"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.quiet.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)


@pytest.fixture
def page() -> Iterator[Page]:
    served = Page()
    yield served
    served.close()


def test_a_page_that_appears_is_a_notice(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the spot notices of clouds do; never through a proxy, which would ask about another machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    watched = source(http=page.url, grace="2 min")
    assert watched.poll() is None
    page.status, page.body = 200, b'{"action": "terminate"}'
    found = watched.poll()
    assert found is not None
    assert (found.who, found.grace_seconds) == (f"a notice of 127.0.0.1:{page.server.server_address[1]}", 120.0)


def test_a_page_that_is_always_there_must_match(page: Page) -> None:
    """As where it says TRUE or FALSE; services ask for a header of their own."""
    watched = source(http=page.url, match="^TRUE", headers={"Metadata-Flavor": "Google"})
    page.status, page.body = 200, b"FALSE"
    assert watched.poll() is None
    page.body = b"TRUE"
    assert watched.poll() is not None
    assert page.headers[0]["Metadata-Flavor"] == "Google"


def test_a_server_in_trouble_is_no_notice(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, an answer that never ends, and a server that is not there all raise an error of the source."""
    watched = source(http=page.url)
    page.status = 500
    with pytest.raises(PreemptionSourceError, match="answers 500"):
        watched.poll()
    page.status = 200
    page.quiet.clear()
    moments = itertools.count(0.0, 25.0)  # each look at the clock is later
    monkeypatch.setattr(stop_requests, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    with pytest.raises(PreemptionSourceError, match="no whole answer"):
        watched.poll()
    page.close()
    with pytest.raises(PreemptionSourceError, match="does not answer"):
        watched.poll()


# ---------------------------------------------------------------------- launchers


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_launcher_that_is_gone_is_a_notice(launcher: str, tmp_path: Path) -> None:
    """The end of a launcher is a stop request; the end of another parent, such as a shell under nohup, is none."""
    child = (
        "import sys, time; from ckpt_engine.preempt.stop_requests import launcher_source as f; "
        "from ckpt_engine.observe.clock import SystemClock; s = f(SystemClock()); "
        "print(s is None or s.poll() is None, flush=True); sys.stdin.read(1); "
        "print(s is None or s.poll().who.split(' (')[0], flush=True)"
    )
    (tmp_path / launcher).write_text(
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)\n"
    )
    for name, said in ((launcher, f"the end of {launcher}"), ("script.py", "True")):
        (tmp_path / name).write_text((tmp_path / launcher).read_text())
        parent = subprocess.Popen(
            [sys.executable, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        with parent.stdin, parent.stdout:
            assert parent.stdout.readline() == "True\n"
            parent.kill()
            parent.wait(60)
            parent.stdin.write("x")
            parent.stdin.flush()
            assert parent.stdout.readline() == f"{said}\n"
