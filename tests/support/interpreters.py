"""Processes of `python -m MODULE` or `python SCRIPT` that start in milliseconds: forks of one that has imported much.

`Popen` and `run` take what the tests need of the arguments of `subprocess`. A process started here is one like any
other: it has its own environment, folder and descriptors, `__main__` is its module, and it ends as an interpreter does.
What a process does when it imports torch for the first time is no matter of tests that use this.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

from tests.support import huge_pages

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
WRITER = ("ckpt_engine.writer.server", "ckpt_engine.writer.job_queue", "xxhash", "zstandard")
"""What the process of a writer needs, and no test."""
ENGINE = (
    *("numpy", "torch", "torch._dynamo"),  # the last by the first optimizer of each process
    *("ckpt_engine.checkpointer", "ckpt_engine.writer.client", "ckpt_engine.loop.tracker"),
)
LIGHTNING = (*ENGINE, "lightning.pytorch", "lightning_ckpt.run")
ACCELERATE = (*ENGINE, "accelerate", "transformers.trainer", "accelerate_ckpt.transformers_events")
MOTO = (*ENGINE, "moto.server", "moto.s3.responses")
OURS = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
_MESSAGE_BYTES = 200_000
_Stream = IO[Any] | int | None
_started: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
"""A fork of this process that forgets what this one does at its exit must not forget these: they run."""
_servers: dict[tuple[str, ...], socket.socket] = {}


def preload_of(module: str) -> tuple[str, ...]:
    """What a module of the tests is likely to import, by its name and its own imports."""
    spec = find_spec(module)
    lines = Path(spec.origin).read_text().splitlines() if spec is not None and spec.origin is not None else []
    names = " ".join([module, *(line for line in lines if line.startswith(("import ", "from ")))])
    if "lightning" in names:
        return LIGHTNING
    return ACCELERATE if "accelerate" in names or "transformers" in names else ENGINE


class Popen:
    """One process; it is killed by `kill`, not by leaving this object behind.

    Args:
        arguments: `sys.executable`, `-W ignore` or `-P`, then `-m MODULE`, `-c CODE` or a script, and what follows.
        stdin, stdout, stderr: a file, `subprocess.PIPE`, `DEVNULL`, or None: that of this process.
        cwd, env: its folder and its environment; None: those of this process.
        pass_fds: it has these, one at most, under the same numbers.
        start_new_session: it has a session of its own.
        preload: what it finds imported.
        without_ours: nothing of our packages, whose modules it imports by itself.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
        cwd: os.PathLike[str] | str | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preload: tuple[str, ...] = ENGINE,
        without_ours: bool = False,
    ) -> None:
        assert arguments[0] == sys.executable, arguments
        self.stdin, for_stdin = _stream(stdin, 0, text=text)
        self.stdout, for_stdout = _stream(stdout, 1, text=text)
        self.stderr, for_stderr = (
            (None, os.dup(for_stdout)) if stderr == subprocess.STDOUT else _stream(stderr, 2, text=text)
        )
        self.returncode: int | None = None
        self._status, for_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = {
            "arguments": [os.fspath(one) if isinstance(one, os.PathLike) else one for one in arguments[1:]],
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),  # noqa: PTH109
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "passed": list(pass_fds),
            "asker": os.getpid(),
            "without": OURS if without_ours else (),
        }
        descriptors = [for_status.fileno(), for_stdin, for_stdout, for_stderr, *pass_fds]
        socket.send_fds(server(preload), [json.dumps(job).encode()], descriptors)
        for descriptor in (for_stdin, for_stdout, for_stderr):
            os.close(descriptor)
        for_status.close()
        self._status.settimeout(PATIENCE_SECONDS)
        self.pid = int(self._status.recv(64))

    def wait(self, timeout: float | None = PATIENCE_SECONDS) -> int:
        """Its exit status; negative: the signal that killed it.

        Raises:
            subprocess.TimeoutExpired: it is still there.
        """
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                answer = self._status.recv(64)
            except (TimeoutError, BlockingIOError) as err:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0) from err
            assert answer, "the server of interpreters is gone"
            self.returncode = int(answer)
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """As `wait`; None: it is still there."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """To the process, unless it is gone."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close our ends, and wait."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = PATIENCE_SECONDS) -> tuple[Any, Any]:
        """What it writes until it ends."""
        found: dict[int, Any] = {}
        readers = [
            threading.Thread(target=lambda n=number, s=stream: found.__setitem__(n, s.read()))
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found.get(0), found.get(1)


def run(
    arguments: Sequence[object],
    *,
    timeout: float = PATIENCE_SECONDS,
    check: bool = False,
    capture_output: bool = False,
    stdout: _Stream = None,
    stderr: _Stream = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        stdout = stderr = subprocess.PIPE
    with Popen(arguments, stdout=stdout, stderr=stderr, **options) as process:
        try:
            out, err = process.communicate(timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(list(arguments), process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


def pid_of_server(preload: tuple[str, ...]) -> int:
    """Of one that is no fork: `WRITER` or `ENGINE`."""
    return _started[preload].pid


def process_name(asker: int) -> str:
    """What a process that this one has asked for is called."""
    return f"of {asker}"


def _stream(given: _Stream, number: int, *, text: bool) -> tuple[IO[Any] | None, int]:
    """Our end, if there is one, and the descriptor that the process gets."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        ours, its, mode = (writing, reading, "w") if number == 0 else (reading, writing, "r")
        return io.open(ours, mode if text else mode + "b"), its  # noqa: UP020
    if given == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if given is None:
        return None, os.dup(number)
    return None, os.dup(given if isinstance(given, int) else given.fileno())


def server(preload: tuple[str, ...]) -> socket.socket:
    """The server with these imports, there as long as this process: where they include torch, a fork of `ENGINE`'s."""
    if preload in _servers:
        return _servers[preload]
    process, writers = None, server(WRITER) if preload == ENGINE else None
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        if preload in (WRITER, ENGINE):
            descriptors = [one.fileno() for one in (its, writers) if one is not None]
            command = [sys.executable, "-W", "ignore", "-m", __name__, ",".join(map(str, descriptors)), *preload]
            process = subprocess.Popen(command, pass_fds=descriptors, cwd=REPOSITORY)
            _started[preload] = process
        else:
            socket.send_fds(server(ENGINE), [json.dumps({"serve": preload}).encode()], [its.fileno()])
    ours.settimeout(PATIENCE_SECONDS)
    atexit.register(_end, ours, process)
    _servers[preload] = ours
    return ours


def fork_writers(launch: Any) -> None:
    """Let this process, and its forks, start the writers of `ckpt_engine.writer.launch` here.

    Such a writer is one like any other, but that it is no child of its trainer: `writers_of` finds it. What sets
    another interpreter or another entry starts a real one.
    """
    usual, interpreter = launch.ENTRY, sys.executable

    class Starting:
        """`subprocess` as `launch` sees it."""

        PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

        @staticmethod
        def Popen(command: list[str], **options: Any) -> Any:
            if command[:-1] != [interpreter, "-P", str(usual)]:
                return subprocess.Popen(command, **options)
            return Popen(command, preload=WRITER, **options)

    server(WRITER)  # at once: a test may count what it leaves open
    launch.subprocess = Starting


def _end(server: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    server.shutdown(socket.SHUT_RDWR)  # a forked process may have this end too, so closing it here is not enough
    server.close()
    if process is not None:
        process.wait(PATIENCE_SECONDS)


# ---- in the server


def _serve(requests: socket.socket, imports: Sequence[str]) -> None:
    """Fork for each request until the other end is closed, and say how each fork ends."""
    gc.disable()  # imports leave nothing to free
    for name in imports:
        import_module(name)
    gc.freeze()  # no fork looks through what it only shares
    gc.enable()
    huge_pages.collapse()
    waking, wake = socket.socketpair()
    wake.setblocking(False)
    waking.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    inbox = selectors.DefaultSelector()
    inbox.register(requests, selectors.EVENT_READ)
    inbox.register(waking, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        ready = {key.fileobj for key, _ in inbox.select()}
        with suppress(BlockingIOError):
            while waking.recv(4096):
                pass
        for pid in list(running):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                with running.pop(pid) as listener, suppress(OSError):
                    listener.send(str(os.waitstatus_to_exitcode(status)).encode())
        if requests in ready:
            message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 5)
            if not message:
                signal.set_wakeup_fd(-1)
                return
            job = json.loads(message)
            listener = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)  # an import may have children that end: its number may be another file's then
                for one in (requests, waking, wake, *running.values()):
                    one.close()
                inbox.close()
                if "serve" in job:
                    _serve(listener, job["serve"])
                    os._exit(0)
                listener.close()
                _live(job, descriptors[1:])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            running[pid] = listener
            if "serve" in job:
                listener.close()  # it answers by itself
            else:
                listener.send(str(pid).encode())


def _live(job: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be the interpreter that the job asks for, to its end."""
    status: object = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if job["session"]:
            os.setsid()
        Path("/proc/self/comm").write_text(process_name(job["asker"]))
        for number, descriptor in zip((0, 1, 2, *job["passed"]), descriptors, strict=True):
            os.dup2(descriptor, number)
            if descriptor > 2 and descriptor != number:
                os.close(descriptor)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["environment"])
        arguments = job["arguments"]
        if arguments[0] == "-W":
            warnings.simplefilter(arguments[1])
            arguments = arguments[2:]
        else:
            warnings.resetwarnings()
        safe_path = arguments[0] == "-P"
        arguments = arguments[safe_path:]
        for name in [one for one in sys.modules if one.partition(".")[0] in job["without"]]:
            del sys.modules[name]
        sys.path[:0] = [one for one in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if one]
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path[0:0] = [job["cwd"]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0:0] = [job["cwd"]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0:0] = [] if safe_path else [str(Path(arguments[0]).absolute().parent)]
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the process ends with it
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _main(descriptors: str, *imports: str) -> None:
    requests, *writers = (socket.socket(fileno=int(one)) for one in descriptors.split(","))
    if writers:
        (_servers[WRITER],) = writers
        fork_writers(import_module("ckpt_engine.writer.launch"))
    _serve(requests, imports)


if __name__ == "__main__":
    _main(*sys.argv[1:])
