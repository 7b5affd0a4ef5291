"""Shows the outlook of a run to the outside: a JSON file and a small web server, on threads of their own."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from ckpt_engine.config.status import Status
from ckpt_engine.observe.log import LOGGER_NAME
from ckpt_engine.preempt.outlook import Outlook, prometheus

_log = logging.getLogger(LOGGER_NAME)

CLIENT_SECONDS = 2.0
"""How long a client may take; they are served one after the other."""
_END_SECONDS = 10.0


class Board:
    """Shows how a run stands from `start` to `close`. Neither waits for training, nor does training wait for it.

    The file is replaced in one step and not synced: it is for schedulers on the same machine or file system. What
    cannot be written or served is said once, and the run goes on.

    Args:
        options: what to show where.
        outlook: of the moment; called on threads.
        numbers: more numbers of the moment, for the page; called on threads.
    """

    def __init__(
        self, options: Status, outlook: Callable[[], Outlook], numbers: Callable[[], Mapping[str, float]]
    ) -> None:
        self._options = options
        self._outlook = outlook
        self._numbers = numbers
        self._ending = threading.Event()
        self._failed = False
        self._threads: list[threading.Thread] = []
        self._server: HTTPServer | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start what the options ask for."""
        if self._options.file is not None:
            self._run(self._write_again_and_again, "ckpt-board-file")
        if self._options.port is not None:
            address = (self._options.host, self._options.port)
            try:
                self._server = _Server(address, _handler(self.status, self.metrics))
            except OSError as err:
                _log.warning("no metrics at %s:%d: %s", *address, err.strerror or err)
                return
            self._run(self._server.serve_forever, "ckpt-board-page")

    def close(self) -> None:
        """Say in the file that the run has ended, and stop serving. Idempotent."""
        if os.getpid() != self._owner:
            return
        self._ending.set()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(_END_SECONDS)

    def status(self) -> dict[str, Any]:
        """What the file and `/status` say: the outlook, who says it, when (wall-clock seconds), and if it is over."""
        return {"time": time.time(), "pid": self._owner, "ended": self._ending.is_set(), **self._outlook().to_json()}

    def metrics(self) -> str:
        """What `/metrics` says."""
        return prometheus(self._outlook(), self._numbers())

    def _run(self, target: Callable[[], object], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write_again_and_again(self) -> None:
        while not self._ending.is_set():
            self._write()
            self._ending.wait(self._options.every)
        self._write()

    def _write(self) -> None:
        path = Path(self._options.file or "")
        temporary = path.with_name(f".{path.name}.{self._owner}")
        try:
            temporary.write_text(json.dumps(self.status()) + "\n", encoding="utf-8")
            temporary.replace(path)
            self._failed = False
        except OSError as err:
            if not self._failed:
                self._failed = True
                _log.warning("the status file %s cannot be written: %s", path, err.strerror or err)


class _Server(HTTPServer):
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - its signature
        _log.debug("a client of the metrics page failed", exc_info=True)


def _handler(status: Callable[[], object], metrics: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics())
            elif self.path == "/status":
                self._answer(200, "application/json", json.dumps(status()) + "\n")
            else:
                self._answer(404, "text/plain", "/metrics and /status are here\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a scrape is no news."""

    return Handler
