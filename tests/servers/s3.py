"""S3 servers on free loopback ports: moto in the default tests, rclone and OpenStack Swift in the slow ones.

| kind | departs from AWS in |
| --- | --- |
| moto | checks neither digests nor passwords |
| rclone | ignores conditional headers; keeps no multipart ETags; checks passwords |
| swift | If-None-Match is accepted but not atomic; If-Match is refused |
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import botocore.session
from botocore.config import Config

from tests.support import interpreters

START_SECONDS = 60.0
STOP_SECONDS = 10.0
_LOWEST_PORT = 10_000


@dataclass(frozen=True)
class S3Server:
    """A running server with one empty bucket, `bucket`."""

    kind: str
    url: str
    key: str = "test"
    secret: str = "testtest"

    def options(self, url: str | None = None, **more: Any) -> dict[str, Any]:
        """storage_options; `url` is another way to the server, such as a proxy."""
        return {
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": url or self.url, "region_name": "us-east-1"},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
            **more,
        }

    def environment(self) -> dict[str, str]:
        """The same for programs that get no storage_options."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """A plain client, to look at what is there with other eyes."""
        return _client(self.url, self.key, self.secret)

    def make_bucket(self, name: str, **more: Any) -> str:
        """A new bucket."""
        self.client().create_bucket(Bucket=name, **more)
        return name


@cache
def _client(url: str, key: str, secret: str) -> Any:
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(s3={"addressing_style": "path"}),
    )


@contextmanager
def serving(kind: str, folder: Path, port: int = 0) -> Iterator[S3Server]:
    """A server that keeps its files in `folder`.

    Raises:
        LookupError: its program is not installed.
    """
    port = port or free_port()
    processes: list[Any] = []
    try:
        key = {"moto": _moto, "rclone": _rclone, "swift": _swift}[kind](folder, port, processes)
        yield S3Server(kind, f"http://127.0.0.1:{port}", key)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_SECONDS)


class Killable:
    """A server that is killed and started again, on the same port and on the same files; a context manager.

    Only rclone keeps what was stored: moto has it in memory.

    Raises:
        LookupError: its program is not installed.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder, self._port = kind, folder, free_port()
        self._processes: list[Any] = []
        self.server = S3Server(kind, f"http://127.0.0.1:{self._port}")
        self.start()

    def start(self) -> None:
        """Start it, unless it runs."""
        if not self._processes:
            {"moto": _moto, "rclone": _rclone}[self._kind](self._folder, self._port, self._processes)

    def kill(self) -> None:
        """`kill -9`, if it runs."""
        while self._processes:
            process = self._processes.pop()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    """A port without a listener, which the system gives to no process by itself.

    A port that the system hands out may be the other end of any connection by the time a server asks for it; and a
    client that connects to it while no server listens there may connect to itself.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(_LOWEST_PORT, low), *range(high + 1, 1 << 16)] or range(_LOWEST_PORT, 1 << 16)
    for port in random.SystemRandom().choices(others, k=100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def listens(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), 0.3):
        return True
    return False


def program(name: str) -> str:
    """The path of a program, beside this Python or on PATH.

    Raises:
        LookupError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LookupError(f"{name} is not installed")
    return found


def rclone() -> str:
    """The path of an rclone that serves S3, which old ones do not.

    Raises:
        LookupError: there is none.
    """
    found = program("rclone")
    if subprocess.run(
        [found, "serve", "s3", "--addr", "127.0.0.1:0", "--help"], capture_output=True, timeout=START_SECONDS
    ).returncode:
        raise LookupError(f"{found} is too old to serve S3")
    return found


def _run(
    folder: Path, processes: list[Any], *arguments: str, port: int, start: Any = subprocess.Popen, **more: str
) -> None:
    log = folder / f"{Path(arguments[0]).name}.log"
    with log.open("ab") as out:
        process = start(
            arguments, cwd=folder, env={**os.environ, **more}, stdout=out, stderr=out, start_new_session=True
        )
    processes.append(process)
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if listens("127.0.0.1", port):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{arguments[0]} did not start: {log.read_text()[-800:]}")


def _moto(folder: Path, port: int, processes: list[Any]) -> str:
    program("moto_server")  # is there
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    _run(folder, processes, *command, port=port, start=partial(interpreters.Popen, preload=interpreters.MOTO))
    return "test"


def _rclone(folder: Path, port: int, processes: list[Any]) -> str:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    command = [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,testtest"]
    _run(folder, processes, *command, "--config", "/dev/null", str(data), port=port)
    return "test"


def _swift(folder: Path, port: int, processes: list[Any]) -> str:
    etc = folder / "etc"
    etc.mkdir()
    (folder / "dev/d1").mkdir(parents=True)
    cache = free_port()
    (etc / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = test\n[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    _run(folder, processes, program("memcached"), "-u", "root", "-l", "127.0.0.1", "-p", str(cache), port=cache)
    for name in ("object", "container", "account"):
        own = free_port()
        steps = (["create", "4", "1", "0"], ["add", f"r1z1-127.0.0.1:{own}/d1", "1"], ["rebalance"])
        for step in steps:
            builder = [program("swift-ring-builder"), f"{name}.builder", *step]
            subprocess.run(builder, cwd=etc, stdout=subprocess.DEVNULL, timeout=60)
        (etc / f"{name}.conf").write_text(
            f"[DEFAULT]\nbind_ip=127.0.0.1\nbind_port={own}\ndevices={folder}/dev\nmount_check=false\nswift_dir={etc}\n"
            f"workers=0\nuser=root\nrecon_cache_path={folder}\n[pipeline:main]\npipeline={name}-server\n"
            f"[app:{name}-server]\nuse=egg:swift#{name}\n[{name}-replicator]\n[{name}-updater]\n[{name}-auditor]\n"
        )
        server = program(f"swift-{name}-server")
        _run(folder, processes, server, f"{etc}/{name}.conf", port=own, SWIFT_CONF_DIR=str(etc))
    filters = {
        "catch_errors": "",
        "gatekeeper": "",
        "healthcheck": "",
        "listing_formats": "",
        "s3api": "location=us-east-1\ndns_compliant_bucket_names=false\n",
        "tempauth": "user_test_test = testtest .admin\n",
        "copy": "",
        "slo": "",
        "dlo": "",
        "versioned_writes": "allow_object_versioning=true\n",
        "symlink": "",
    }
    pipeline = "catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth copy slo dlo versioned_writes"
    (etc / "proxy.conf").write_text(
        f"[DEFAULT]\nbind_ip=127.0.0.1\nbind_port={port}\nswift_dir={etc}\nworkers=0\nuser=root\n"
        f"[pipeline:main]\npipeline={pipeline} symlink proxy-server\n"
        "[app:proxy-server]\nuse=egg:swift#proxy\naccount_autocreate=true\n"
        f"[filter:cache]\nuse=egg:swift#memcache\nmemcache_servers=127.0.0.1:{cache}\n"
        + "".join(f"[filter:{name}]\nuse=egg:swift#{name}\n{text}" for name, text in filters.items())
    )
    server = program("swift-proxy-server")
    _run(folder, processes, server, f"{etc}/proxy.conf", port=port, SWIFT_CONF_DIR=str(etc))
    return "test:test"
