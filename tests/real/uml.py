"""Runs a command on a disposable Linux kernel (User-Mode Linux) that has what the host's kernel may lack.

Its root is the host's root, read-only; `/tmp`, `/run`, `/var/tmp` and `/mnt` are its own. Killing it is a power cut:
what its page cache had not written to its disks is lost. It boots in about two seconds and has one processor.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

KERNEL = "linux.uml"
MODULES = Path("/usr/lib/uml/modules")
_INIT = Path(__file__).with_name("guest-init.sh")
_SHIM = Path(__file__).with_name("xstate_shim.c")
_BOOT_SECONDS = 120.0
_LOOK_SECONDS = 0.02


def missing(*programs: str) -> str | None:
    """Why there can be no guest that has these programs, and what to do; None: there can."""
    needed = [KERNEL, "mount", *(["cc"] if _needs_shim() else []), *programs]
    absent = [name for name in needed if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed: see tests/real/README.md"
    if not MODULES.is_dir():
        return f"{MODULES} is missing: apt-get install user-mode-linux"
    if os.geteuid() != 0:
        return "a guest needs root"
    return None


def _needs_shim() -> bool:
    """Whether this processor has more registers than the guest's kernel knows."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text().split()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a guest's command ended: `status` is None if the guest died under it."""

    status: int | None
    output: str


class Guest:
    """A guest that runs one command; a context manager that leaves no process behind.

    Args:
        folder: a new one, for the guest's own files.
        command: for bash.
        shares: folders that the guest may write, at the same path. What it syncs there survives a cut.
        disks: images, `/dev/ubda`, `/dev/ubdb` and so on in it.
        environment: more variables.
        cwd: where the command runs.
    """

    def __init__(
        self,
        folder: Path,
        command: str,
        *,
        shares: Sequence[Path] = (),
        disks: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        memory: str = "1G",
    ) -> None:
        self._job = folder
        folder.mkdir(parents=True)
        variables = {
            **{name: value for name, value in os.environ.items() if name not in ("PWD", "OLDPWD", "TMPDIR", "SHLVL")},
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        (folder / "command").write_text(command)
        (folder / "folder").write_text(str(cwd or Path.cwd()))
        (folder / "shares").write_text("".join(f"{path.resolve()}\n" for path in shares))
        (folder / "environment").write_text(
            "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items() if name.isidentifier())
        )
        (folder / "output").touch()
        init = folder / "init"
        shutil.copy(_INIT, init)
        init.chmod(0o755)
        # The guest's memory is a file in TMPDIR, and its control socket is below HOME: neither must outlive it.
        self._scratch = tempfile.mkdtemp(prefix="uml-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        preload = {}
        if _needs_shim():
            shim = f"{self._scratch}/shim.so"
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shim, str(_SHIM), "-ldl"], check=True, timeout=60)
            preload = {"LD_PRELOAD": shim}
        arguments = [KERNEL, f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
        arguments += [f"uml_job={folder}", f"uml_dir={self._scratch}", "con=null", "con0=null", "ssl=null", "quiet"]
        arguments += [f"ubd{number}={image}" for number, image in enumerate(disks)]
        with (folder / "console").open("wb") as console:
            self._process = subprocess.Popen(
                arguments,
                env={**os.environ, "TMPDIR": self._scratch, "PATH": _path(), **preload},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def booted(self) -> bool:
        """Whether its command has begun."""
        return (self._job / "started").exists()

    def alive(self) -> bool:
        """Whether the guest is there."""
        return self._process.poll() is None

    def boot(self) -> None:
        """Wait until the command begins."""
        deadline = time.monotonic() + _BOOT_SECONDS
        while not self.booted():
            if not self.alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the guest did not boot: {self._text('console')[-2000:]}")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)

    def cut(self) -> None:
        """Cut its power: at this instant nothing of it runs any more."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def wait(self, seconds: float) -> Ended:
        """Wait for the end of the command.

        Raises:
            subprocess.TimeoutExpired: it runs longer than that.
        """
        self._process.wait(seconds)
        return self.ended()

    def ended(self) -> Ended:
        """How it ended, once the guest is gone."""
        status = self._text("status").strip()
        return Ended(int(status) if status else None, self._text("output"))

    def _text(self, name: str) -> str:
        path = self._job / name
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        shutil.rmtree(self._scratch, ignore_errors=True)


def run(folder: Path, command: str, *, seconds: float, **options: object) -> Ended:
    """Run one command in a guest of its own; arguments as of `Guest`."""
    with Guest(folder, command, **options) as guest:  # type: ignore[arg-type]
        return guest.wait(seconds)
