"""Runs the commands and webhooks of the option `on`, beside what the writer does.

Each of them has a thread, which takes what has happened in order. None is waited for but at the end of the run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.errors import HookError
from ckpt_engine.observe.events import (
    CLOSED,
    FAILED,
    GONE,
    SnapshotCommitted,
    SnapshotFailed,
    TierDegraded,
    from_json,
    line,
    said_if_slow,
)
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.observe.units import duration, place
from ckpt_engine.store.storage.redaction import redacted, secrets_of
from ckpt_engine.writer import channel
from ckpt_engine.writer.messages import Body, Kind

FAILURE, STOP, DURABLE = "failure", "stop", "durable"
_ENDS = {
    CLOSED: (STOP, "training has ended"),
    FAILED: (FAILURE, "training has failed"),
    GONE: (FAILURE, "the training process was killed, or has crashed"),
}
_TAIL_BYTES = 4096


class Hooks:
    """A tap on what the writer says to the trainer. Only the writer of rank 0 has any hooks.

    A failure is reported once for each reason until a snapshot is durable again.

    Args:
        config: of the writer.
        emit: takes the messages to the trainer.

    Attributes:
        emit: passes a message on to the trainer, and notes what has happened. Any thread.
        ending: how the attempt of the trainer ends, one of `events.ENDS`; None: not known.
        why: the trainer ends the run, for this reason; empty: there is none. None: it has not said that it ends.
    """

    def __init__(self, config: WriterConfig, emit: Callable[[Body], object]) -> None:
        self._config, self._to_trainer = config, emit
        self._threads = {
            name: ThreadPoolExecutor(
                1,
                f"ckpt-on-{name}",
                # What a command inherits: the writer blocks SIGTERM.
                *(signal.pthread_sigmask, (signal.SIG_UNBLOCK, [signal.SIGTERM])),
            )
            for name in (FAILURE, STOP, DURABLE)
            if name in config.on and config.ranks.rank == 0
        }
        self._calls: dict[Future[None], str] = {}
        """Those that have not ended, and the hook of each."""
        self.emit = self._take if self._threads else emit
        self._newest: dict[str, Any] = {"snapshot": "", "step": None, "metrics": {}}
        self._reported: set[str] = set()
        """Codes of failures since a snapshot was durable."""
        self._report = Reporter(lambda event: emit(channel.event(event)))
        self.ending: str | None = None
        self.why: str | None = None

    def _take(self, body: Body) -> object:
        event = from_json(body["event"]) if body["kind"] == Kind.EVENT else None
        if isinstance(event, SnapshotCommitted):
            metrics = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
            self._newest = {
                "snapshot": f"{place(event.tier)}#{event.snapshot}",
                "step": event.step,
                "metrics": metrics,
            }
            self._reported.clear()
            self._begin(DURABLE, line(event))
        elif isinstance(event, SnapshotFailed | TierDegraded) and event.code not in self._reported:
            self._reported.add(event.code)
            self._begin(FAILURE, line(event), event.code)
        return self._to_trainer(body)

    def _begin(self, name: str, message: str, code: str = "") -> None:
        if name in self._threads:
            about = {**self._newest, "event": name, "message": message, "code": code, "run": place(self._config.url)}
            begun = self._threads[name].submit(self._call, name, about)
            self._calls[begun] = f"on.{name}"
            begun.add_done_callback(self._calls.pop)

    def _call(self, name: str, about: Mapping[str, Any]) -> None:
        hook = self._config.on[name]
        call = post if isinstance(hook, str) and hook.startswith(("http://", "https://")) else run
        try:
            call(hook, about, self._config.on)
            self._report.worked(name)
        except Exception as err:  # noqa: BLE001 - whatever it is: the next one gets its own chance
            secrets = [
                text
                for options in (self._config.storage_options, *(tier.storage_options for tier in self._config.tiers))
                for text in secrets_of(options)
            ]
            error = HookError(f"on.{name} failed, training continues: {redacted(str(err), secrets)}")
            self._report.failed(name, str(error))

    def finish(self, ending: str | None) -> None:
        """Note how the run ends, and wait until everything has run, first with the trainer and then without it.

        Args:
            ending: one of `events.ENDS`; None: the run does not end.
        """
        if ending == GONE or (ending is not None and self.why is not None):
            name, message = _ENDS[ending]
            self._begin(name, f"{message}: {self.why}" if self.why else message)
        calls, seconds = dict(self._calls), self._config.end_wait_seconds
        names = " and ".join(sorted(set(calls.values())))
        copying = {"kind": Kind.COPYING, "waits": f"{names} to end", "seconds": seconds, "copies": False}
        if calls:
            self._to_trainer({**copying, "waits": ""})  # everything is durable

        def say() -> None:
            self._to_trainer(copying)

        with said_if_slow(say):
            late = wait(calls, seconds).not_done
        if late:
            names = " and ".join(sorted({calls[one] for one in late}))
            self._to_trainer({"kind": Kind.CLOSED, "left": f"{names} did not end", "said": True, "copies": False})
            wait(late, self._config.drain_seconds)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that follows a redirect would become a GET, without what it says."""

    def redirect_request(self, *_: Any) -> None:
        """Nothing: the answer counts as an error."""


def post(url: str, about: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Send it as JSON; `text` is what chat services show."""
    request = urllib.request.Request(
        url,
        json.dumps({**about, "text": about["message"]}).encode(),
        {"Content-Type": "application/json", "User-Agent": "ckpt-engine"},
    )
    urllib.request.build_opener(_NoRedirect).open(request, timeout=options["timeout"]).close()


def run(command: str | Sequence[str], about: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Run it where the trainer was started, with `about` in its environment; a text is for a shell.

    Raises:
        OSError: it cannot be run, or does not end with status 0 in time; with the last line that it has written.
    """
    known = {f"CKPT_{key.upper()}": text if isinstance(text, str) else json.dumps(text) for key, text in about.items()}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=options["folder"],
            env={**os.environ, **known},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(options["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"it was stopped after {duration(options['timeout'])}") from None
        if status:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise ChildProcessError(f"it ended with status {status}{': ' if last else ''}{last}")
