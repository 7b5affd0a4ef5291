"""Keys, passwords and tokens of an object store are shown nowhere, whatever goes wrong."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.errors import CkptError, StorageError
from ckpt_engine.observe.events import Event, LogSink, TierDegraded
from ckpt_engine.store.storage.objects_fsspec import FsspecStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.store.storage.redaction import redacted, secrets_of, shows
from ckpt_engine.testing import put
from tests.cli.conftest import Outcome
from tests.servers.s3 import free_port
from tests.store.test_object_storage import az  # noqa: F401 - a fixture

KEY, SECRET, TOKEN = "AKIAxyzzyxKEY", "xyzzyx/SECRET+wJalrXU", "xyzzyxTOKENxyzzyx"
WAIT_SECONDS = 60.0
WAYS = [
    *((way, way) for way in ("refused", "403")),
    *(pytest.param(way, way, marks=pytest.mark.slow) for way in ("400", "409", "503", "garbage", "stall")),
]


class _Echo(BaseHTTPRequestHandler):
    """Answers with everything that a foolish server could tell."""

    protocol_version = "HTTP/1.1"
    way = "403"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.way == "stall":
            self.server.ended.wait(WAIT_SECONDS)  # type: ignore[attr-defined]
            return
        secrets = f"{KEY} {SECRET} {TOKEN} {self.headers.get('Authorization', '')}".replace("&", "")
        body = f"<Error><Code>Weird{KEY}</Code><Message>you are {secrets}</Message></Error>".encode()
        self.send_response(200 if self.way == "garbage" else int(self.way), "x")
        if self.way == "garbage":
            body = f"<{secrets}".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that fails in the way asked for, whose URL carries a password too."""
    if request.param == "refused":
        yield f"http://{KEY}:{SECRET.replace('/', '-')}@127.0.0.1:{free_port()}"
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Way", (_Echo,), {"way": request.param}))
    server.daemon_threads = True
    server.ended = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.ended.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join(WAIT_SECONDS)
    server.server_close()


def options(url: str, **more: Any) -> dict[str, Any]:
    """Impatient, and with secrets in every place for them."""
    return {
        "key": KEY,
        "secret": SECRET,
        "token": TOKEN,
        "endpoint_url": url,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "timeout_seconds": 60.0,
        "retry_seconds": 0.1,
        "part_bytes": 5 << 20,
        **more,
    }


def check(text: str) -> None:
    """No secret is in `text`, nor the parts of one that a URL may have."""
    for secret in (KEY, SECRET, TOKEN, "xyzzyx", "wJalrXU"):
        assert secret not in text


def everything_shown(error: BaseException) -> str:
    """What a traceback, a log or a report can show of an error."""
    record = ErrorRecord.of(error)
    return "".join(traceback.format_exception(error)) + f"{error!r} {record!r} {record.exception()}"


@pytest.mark.long
@pytest.mark.parametrize(("way", "endpoint"), WAYS, indirect=["endpoint"])
def test_no_failing_request_shows_a_secret(way: str, endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """No message, traceback, cause or log line shows one."""
    caplog.set_level(logging.INFO)
    storage = S3Storage("s3://bucket/run", options(endpoint, timeout_seconds=0.3 if way == "stall" else 60.0))
    uses: list[Callable[[], object]] = [
        lambda: put(storage, "a", b"x"),
        lambda: put(storage, "data/big", bytes(6 << 20)),
        lambda: put(storage, "a", b"x", exclusive=False),
        lambda: storage.get("a"),
        lambda: storage.get("a", 3, 4),
        lambda: storage.get_into("a", 0, memoryview(bytearray(9))),
        lambda: list(storage.list("")),
        lambda: storage.delete("a", "b"),
        lambda: storage.replace("a", b"x", None),
        lambda: storage.replace("a", b"x", "1"),
        lambda: storage.read_versioned("a"),
        storage.server_seconds,
        storage.sweep,
    ]
    failed = 0
    for use in uses:
        try:
            use()
        except StorageError as err:
            failed += 1
            check(everything_shown(err))
    assert failed >= len(uses) - 2
    check(f"{storage!r} {storage} {storage.url} {storage.options!r} {storage._calls!r} {caplog.text}")


@pytest.mark.parametrize(
    "bad",
    [
        {"config_kwargs": {"no_such_option": SECRET}},
        {"config_kwargs": {"proxies": {"http": f"http://me:{SECRET}@127.0.0.1:1"}}},
        {"client_kwargs": {"aws_session_token": TOKEN, "nonsense": 1}},
        {"no_such_option": SECRET},
        {"endpoint_url": f"{SECRET} is no URL"},
    ],
)
def test_no_refused_option_shows_a_secret(bad: dict[str, Any]) -> None:
    """The library's own complaints may quote what it was given."""
    given = options(f"http://127.0.0.1:{free_port()}") | bad
    with pytest.raises(StorageError) as caught:
        put(S3Storage("s3://bucket/run", given), "a", b"x")
    check(everything_shown(caught.value))


def test_no_url_with_a_password_or_a_signature_is_shown() -> None:
    """It is refused before anything else looks at it."""
    for url in (
        *(f"s3://{KEY}:{SECRET}@bucket/run", f"sftp://me:{SECRET}@host/run"),
        *(f"s3://bucket/run?sig={TOKEN}", f"s3://bucket/run//#{SECRET}", f"https://store/x?sig={SECRET}"),
    ):
        for use in (S3Storage, FsspecStorage, lambda url, _: Checkpointer(url).load()):
            with pytest.raises(CkptError) as caught:
                use(url, {})
            check(everything_shown(caught.value))


def test_no_error_of_another_library_shows_a_secret(az: dict[str, Any]) -> None:
    """Errors of other libraries quote URLs, signed ones among them: our error says only their kind."""
    storage = FsspecStorage("az://container/run", {**az, "account_key": SECRET, "retry_seconds": 0.0})
    for text in (
        f"bad key {SECRET}",
        f"https://store/x?sv=1&sig={TOKEN}",
        f"https://store/x?X-Amz-Security-Token={TOKEN}",
    ):
        for kind in (ValueError, OSError, RuntimeError, ConnectionError, PermissionError):
            az["failures"] += [kind(text)]
            with pytest.raises(StorageError) as caught:
                storage.get("a")
            check(everything_shown(caught.value))
    check(f"{storage!r}")


def test_harmless_causes_stay_visible(az: dict[str, Any]) -> None:
    """Who has to find out what is wrong needs them."""
    storage = FsspecStorage("az://container/run", {**az, "account_key": SECRET, "retry_seconds": 0.0})
    az["failures"] += [RuntimeError("the moon is full")]
    with pytest.raises(StorageError) as caught:
        storage.get("a")
    assert "the moon is full" in everything_shown(caught.value)


def test_what_is_a_secret_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, tokens, logins of proxies, the environment; no endpoints, no regions, no short words."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from the environment")
    found = secrets_of(
        {
            "key": KEY,
            "endpoint_url": "http://me:hunter22@host/x",
            "profile": "training",
            "anon": False,
            "config_kwargs": {"s3": {"addressing_style": "virtual"}, "proxies": {"https": "http://u:proxypass@p:1"}},
            "client_kwargs": {"region_name": "eu-central-1", "aws_secret_access_key": SECRET},
            "token": {"private_key": "PRIVATE", "kind": "service account"},
            "username": "ubuntu",
            "password": "short",
        }
    )
    text = "host training virtual eu-central-1 http short"
    assert redacted(text, found) == text
    for secret in (KEY, SECRET, "hunter22", "proxypass", "PRIVATE", "service account", "from the environment"):
        assert secret not in redacted(f"it is {secret}!", found)
    error = RuntimeError("harmless")
    assert not shows(error, found)
    error.add_note(SECRET)
    assert shows(error, found)


class _Away(LogSink):
    """Logs, and knows when a tier is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        super().emit(event)
        self.seen.append(event)


def _contents(folder: Path) -> Iterator[tuple[Path, str]]:
    """Of all files; the writer goes on, and replaces some meanwhile."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.read_bytes().decode("latin-1")


@pytest.mark.parametrize("endpoint", ["403"], indirect=True)
@pytest.mark.parametrize("writer", [pytest.param("process", marks=pytest.mark.slow), "thread"])
def test_no_trace_of_a_run_shows_a_secret(
    endpoint: str,
    writer: Literal["process", "thread"],
    tmp_path: Path,
    ckpt: Callable[..., Outcome],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its files (status, lease, manifests), events, logs and processes and `ckpt status` show none."""
    caplog.set_level(logging.DEBUG, "ckpt_engine")
    far = {"url": "s3://bucket/run", "storage_options": options(endpoint)}
    sink = _Away()
    with Checkpointer(tiers=[str(tmp_path / "run"), far], writer=writer) as checkpointer:
        checkpointer.engine.events = sink
        for step in range(3):
            checkpointer.save({"w": torch.zeros(1000)}, step=step).wait(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(isinstance(event, TierDegraded) for event in sink.seen):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            checkpointer.engine.poll()
        for process in psutil.Process().children(recursive=True):
            if process.status() != psutil.STATUS_ZOMBIE:
                check(" ".join(process.cmdline()))
        check(f"{checkpointer!r} {checkpointer.config!r}")
    contents = dict(_contents(tmp_path))
    assert any(path.suffix == ".json" for path in contents)
    for content in contents.values():
        check(content)
    shown = capfd.readouterr()
    check(f"{shown.out} {shown.err} {caplog.text} {sink.seen!r}")
    for form in ((), ("--json",)):
        shown = ckpt("status", *form, tmp_path / "run")
        assert "s3://bucket/run" in shown.out
        check(shown.out + shown.err)
    assert "s3://bucket/run" in caplog.text
    (away,) = [event for event in sink.seen if isinstance(event, TierDegraded)]
    assert "403" in away.message
