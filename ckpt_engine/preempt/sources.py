"""Where notices come from besides signals: a file that appears, a command that says yes, a page of the cloud."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ckpt_engine.config.preemption import Source
from ckpt_engine.observe.clock import Clock
from ckpt_engine.preempt.notice import PreemptionSource, SourceError, StopNotice

ANSWER_SECONDS = 5.0
"""How long a page or a command may take."""
_PAGE_BYTES = 65_536
_NO_NOTICE = (404, 410)


class FileSource:
    """A stop-file: it appears, or is touched or replaced.

    One that is there when the run starts is from an earlier stop: it counts once it changes.

    Args:
        path: of the file.
    """

    def __init__(self, path: str, clock: Clock, *, every_seconds: float, grace_seconds: float | None) -> None:
        self._path = Path(path)
        self._now = clock.monotonic
        self.every_seconds = every_seconds
        self._grace_seconds = grace_seconds
        try:
            self._before = self._look()
        except SourceError:
            self._before = None  # `poll` will say it

    def poll(self) -> StopNotice | None:
        found = self._look()
        if found is None or found == self._before:
            self._before = found
            return None
        return StopNotice(f"the file {self._path}", self._now(), self._grace_seconds)

    def _look(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as err:
            raise SourceError(f"the file {self._path} cannot be looked at: {err.strerror or err}") from err
        return stat.st_ino, stat.st_mtime_ns


class HttpSource:
    """A page that is missing (404, 410) or does not match as long as nothing is wrong, as clouds have them.

    Args:
        url: asked with GET, never through a proxy; http or https.
        headers: of the request.
        match: what the answer must contain, as a regular expression; None: any answer is a notice.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        headers: Mapping[str, str],
        match: str | None,
        every_seconds: float,
        grace_seconds: float | None,
    ) -> None:
        self._request = urllib.request.Request(url, headers=dict(headers))
        self._host = urlsplit(url).netloc.rpartition("@")[2]  # in messages, without a password
        self._match = re.compile(match) if match is not None else None
        self._now = clock.monotonic
        self.every_seconds = every_seconds
        self._grace_seconds = grace_seconds
        # Metadata services are on the machine; a proxy would ask those of another one.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def poll(self) -> StopNotice | None:
        try:
            page = self._page()
        except urllib.error.HTTPError as err:
            with err:
                if err.code in _NO_NOTICE:
                    return None
                raise SourceError(f"{self._host} answers {err.code} {err.reason}") from err
        except (OSError, ValueError) as err:
            raise SourceError(f"{self._host} does not answer: {err}") from err
        if self._match is not None and not self._match.search(page):
            return None
        return StopNotice(f"a notice of {self._host}", self._now(), self._grace_seconds)

    def _page(self) -> str:
        """What the page says, at most so much of it and for so long: a server may send a byte a second."""
        deadline = time.monotonic() + ANSWER_SECONDS
        parts: list[bytes] = []
        with self._opener.open(self._request, timeout=ANSWER_SECONDS) as answer:
            while sum(map(len, parts)) < _PAGE_BYTES and (part := answer.read1(_PAGE_BYTES)):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer within {ANSWER_SECONDS:.0f} s")
        return b"".join(parts).decode("utf-8", "replace")


class CommandSource:
    """A command that ends with 0 if the run must stop, and with 1 if not; anything else is trouble.

    Args:
        command: program and arguments; no shell is involved.
    """

    def __init__(
        self, command: Sequence[str], clock: Clock, *, every_seconds: float, grace_seconds: float | None
    ) -> None:
        self._command = tuple(command)
        self._now = clock.monotonic
        self.every_seconds = every_seconds
        self._grace_seconds = grace_seconds

    def poll(self) -> StopNotice | None:
        name = self._command[0]
        try:
            done = subprocess.run(
                self._command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as err:
            raise SourceError(f"the command {name} did not end within {ANSWER_SECONDS:.0f} s") from err
        except OSError as err:
            raise SourceError(f"the command {name} cannot be run: {err.strerror or err}") from err
        if done.returncode == 0:
            return StopNotice(f"the command {name}", self._now(), self._grace_seconds)
        if done.returncode == 1:
            return None
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SourceError(f"the command {name} ended with {done.returncode}{f': {said}' if said else ''}")


def open_source(options: Source, clock: Clock) -> PreemptionSource:
    """The source that one entry of `preemption.sources` describes."""
    every, grace = options.every, options.grace
    if options.file is not None:
        return FileSource(options.file, clock, every_seconds=every, grace_seconds=grace)
    if options.http is not None:
        return HttpSource(
            options.http,
            clock,
            headers=options.headers,
            match=options.match,
            every_seconds=every,
            grace_seconds=grace,
        )
    return CommandSource(options.command or (), clock, every_seconds=every, grace_seconds=grace)
