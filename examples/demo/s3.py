"""An S3 server of the demo's own: moto, a process that keeps everything in memory and is gone with the demo."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.errors import CkptError
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from demo.process import TrainingFailedError

BUCKET = "demo"
START_SECONDS = 60.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Remote:
    """A tier in an object store, as the configuration names it."""

    url: str
    options: dict[str, Any]

    def newest(self) -> ParsedId | None:
        """The newest snapshot there; None: there is none, or the store does not answer."""
        try:
            ids = Repository(open_storage(self.url, self.options)).ids()
        except CkptError:
            return None
        return max(ids, key=lambda one: one.seq, default=None)


@contextmanager
def serving(log: Path) -> Iterator[Remote]:
    """Start a server on a free port and make a bucket in it; its output goes to `log`.

    Raises:
        TrainingFailedError: it is not installed, or does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [_program(), "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait(process, port, log)
        url = f"http://127.0.0.1:{port}"
        # moto asks for no password: these are names, not secrets.
        access = {"key": "demo", "secret": "demo"}
        asyncio.run(_make_bucket(url, access))
        client = {"endpoint_url": url, "region_name": "us-east-1"}
        yield Remote(f"s3://{BUCKET}/run", {**access, "client_kwargs": client})
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)


def _program() -> str:
    beside = Path(sys.executable).parent / "moto_server"
    found = str(beside) if beside.exists() else shutil.which("moto_server")
    if found is None:
        raise TrainingFailedError("there is no S3 server to start: pip install 'moto[server]' s3fs")
    return found


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.05)
    raise TrainingFailedError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-1000:]}")


async def _make_bucket(url: str, access: dict[str, str]) -> None:
    """With the client library alone: the engine never makes a bucket."""
    from aiobotocore.session import get_session

    names = {"aws_access_key_id": access["key"], "aws_secret_access_key": access["secret"]}
    async with get_session().create_client("s3", endpoint_url=url, region_name="us-east-1", **names) as client:
        await client.create_bucket(Bucket=BUCKET)
