"""Runs a user's script or test suite in processes of its own, from an empty folder or one that is cut back to an
earlier step, and reads what they report.

`PythonCommand` takes a command line such as `python -u train.py --lr 1` apart, so that its script runs in a rehearsal.
`Suite` runs tests without us and with our callback in every Trainer, and compares.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from ckpt_engine.errors import ResumeError, WaitTimeoutError
from ckpt_engine.observe.resume_report import FILE_NAME, NotRestored, ResumeReport
from ckpt_engine.store import names

PLUGIN = "lightning_ckpt.pytest_plugin"
_RAN = (0, 1)
"""Exit codes of pytest where tests were run."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Changed:
    """A test that passes without us and fails with us.

    Args:
        line: the first line of its failure.
    """

    test: str
    line: str


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """What our callback changes in a suite.

    Args:
        new_failures: pass without us, fail with us.
        unsteady: of those that failed with us, the ones that failed without us when they were run again.
        passed: with us.
        failed_before: fail without us; they were not run with us.
        skipped: by themselves, without us.
    """

    new_failures: tuple[Changed, ...]
    unsteady: tuple[Changed, ...]
    passed: int
    failed_before: tuple[Changed, ...]
    skipped: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test: passed, failed or skipped."""

    outcome: str
    line: str


class Suite:
    """Starts pytest as often as needed, in the folder that we are in.

    Args:
        arguments: of pytest, as the user gives them.
        scratch: an empty folder.
        timeout: seconds that each run may take.
        say: takes a line of progress, and whether it is the last one of a run.
    """

    def __init__(
        self, arguments: Sequence[str], scratch: Path, timeout: float, say: Callable[[str, bool], None]
    ) -> None:
        self._arguments, self._scratch, self._timeout, self._say = arguments, scratch, timeout, say

    def compare(self) -> SuiteReport:
        """The whole procedure.

        Raises:
            ResumeError: pytest runs no test.
            WaitTimeoutError: it takes too long.
        """
        without, _ = self._run("run 1: without ckpt-engine")
        fine = [test for test, one in without.items() if one.outcome == "passed"]
        if not fine:
            raise ResumeError("no test passes without ckpt-engine", hint=f"see {self._log('run 1')}")
        trainers = self._scratch / "trainers"
        trainers.mkdir()
        ours = [f"--ckpt-trainers={trainers}"]
        found, code = self._run("run 2: with AdaptiveCheckpoint in every Trainer", ours, fine)
        ended = Outcome("failed", f"the tests ended before it, with exit code {code}")
        failed = {test: one for test in fine if (one := found.get(test, ended)).outcome == "failed"}
        again: Mapping[str, Outcome] = {}
        if failed:
            again, _ = self._run("run 3: the new failures again, without ckpt-engine", (), list(failed))
        shaky = {test for test, one in again.items() if one.outcome == "failed"}
        return SuiteReport(
            new_failures=tuple(Changed(test, one.line) for test, one in failed.items() if test not in shaky),
            unsteady=tuple(Changed(test, failed[test].line) for test in failed if test in shaky),
            passed=len(fine) - len(failed),
            failed_before=tuple(Changed(test, one.line) for test, one in without.items() if one.outcome == "failed"),
            skipped=sum(one.outcome == "skipped" for one in without.values()),
        )

    def _run(
        self, title: str, more: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> tuple[dict[str, Outcome], int]:
        name = title.partition(":")[0]
        file = self._scratch / f"{name}.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, f"--ckpt-outcomes={file}", *more]
        if only is not None:
            chosen = self._scratch / f"{name}.json"
            chosen.write_text(json.dumps(only))
            command += [f"--ckpt-only={chosen}"]  # as a word of its own, its path would move pytest's rootdir
        with _started([*command, *self._arguments], self._log(name)) as process:
            self._watch(process, title, file)
        outcomes, code = read_outcomes(file)[0], process.returncode
        if only is None and code not in _RAN:
            raise _failed(f"pytest ended with exit code {code} without ckpt-engine", self._log(name))
        return outcomes, code

    def _watch(self, process: subprocess.Popen[bytes], title: str, file: Path) -> None:
        """Until it ends."""
        deadline = time.monotonic() + self._timeout
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                break
            outcomes, total = read_outcomes(file)
            self._say(self._progress(title, outcomes, total), False)
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"pytest was not done after {self._timeout:g} s ({title})",
                    hint=f"see {self._log(title.partition(':')[0])}; give fewer tests or a longer --timeout",
                )
        self._say(self._progress(title, *read_outcomes(file)), True)

    @staticmethod
    def _progress(title: str, outcomes: Mapping[str, Outcome], total: int) -> str:
        failed = sum(one.outcome == "failed" for one in outcomes.values())
        return f"{title}: {len(outcomes):,} of {total:,} tests, {failed:,} failed"

    def _log(self, name: str) -> Path:
        return self._scratch / f"{name}.log"


def read_outcomes(file: Path) -> tuple[dict[str, Outcome], int]:
    """What the plugin has written so far: outcomes by test, and how many tests there are."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half there
    events = list(map(json.loads, lines))
    outcomes = {one["id"]: Outcome(one["outcome"], one["line"]) for one in events if one["event"] != "collected"}
    return outcomes, sum(one["tests"] for one in events if one["event"] == "collected")


_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Runs:
    """Starts the script as often as needed.

    Args:
        command: of the user.
        scratch: an empty folder for everything that is left behind.
        steps: how far each run goes.
        timeout: seconds that each may take.
    """

    command: PythonCommand
    scratch: Path
    steps: int
    timeout: float

    def uninterrupted(self) -> Trace:
        """Once, to the last step.

        Raises:
            ResumeError: the script failed by itself, or took no snapshot in time.
            WaitTimeoutError: it took too long.
        """
        trace, code = self._run("uninterrupted", "uninterrupted", None)
        self._require_success(code, "uninterrupted")
        return self._with_snapshots(trace, "uninterrupted")

    def killed(self, kill_at: int) -> Trace:
        """Once, killed with SIGKILL in the step after `kill_at`.

        Raises:
            ResumeError, WaitTimeoutError: as `uninterrupted`; or it ended before that step.
        """
        trace, code = self._run("killed", "killed", kill_at)
        if code != -signal.SIGKILL:
            self._require_success(code, "killed")
            raise ResumeError(
                f"training ended by itself at step {max(trace.steps, default=0)}, before it was killed",
                hint=f"give an earlier step with --kill-at (now {kill_at})",
            )
        if not trace.steps:
            raise ResumeError(
                f"the script took no snapshot up to step {kill_at}: there is nothing to resume from",
                hint="give a later step with --kill-at and --steps",
            )
        return trace

    def again(self, folder: str = "killed") -> Trace:
        """Once more, on the snapshots that are in a folder.

        Raises:
            ResumeError, WaitTimeoutError: as `uninterrupted`.
        """
        name = "again" if folder == "killed" else f"again-{folder}"
        trace, code = self._run(name, folder, None)
        self._require_success(code, name)
        return trace

    def cut(self, kill_at: int) -> str:
        """A folder with the snapshots of the uninterrupted run up to a step, as if it had been killed there."""
        target = self.scratch / "cut"
        # Data is written once: a link is as good as a copy. The lease is not.
        without = shutil.ignore_patterns(names.LEASE, names.CATALOG, names.STATUS, names.ATTEMPTS)
        shutil.copytree(self.scratch / "uninterrupted", target, copy_function=os.link, ignore=without)
        for manifest in target.glob("*/snapshots/*.json"):
            parsed = names.manifest_id(f"snapshots/{manifest.name}")
            if parsed is not None and parsed.step > kill_at:
                manifest.unlink()
        return target.name

    def folders(self, name: str) -> list[Path]:
        """The run folders below one of the runs."""
        return sorted((self.scratch / name).glob("run*"))

    def not_restored(self, name: str) -> list[NotRestored]:
        """What the last resume of one of the runs reported as not restored."""
        reports = [folder / FILE_NAME for folder in self.folders(name)]
        found = [ResumeReport.from_json(json.loads(path.read_text())) for path in reports if path.exists()]
        return [row for report in found for row in report.not_restored]

    def _run(self, name: str, folder: str, kill_at: int | None) -> tuple[Trace, int]:
        place = self.scratch / folder
        place.mkdir(exist_ok=True)
        trace = self.scratch / f"{name}.trace"
        spec = Spec(str(place), str(trace), self.steps, kill_at).write(self.scratch / f"{name}.json")
        with _started(self.command.rehearsed(spec), self._log(name)) as process:
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired as err:
                raise WaitTimeoutError(
                    f"the script had not reached step {self.steps} after {self.timeout:g} s ({name} run)",
                    hint=f"see {self._log(name)}; give fewer --steps or a longer --timeout",
                ) from err
        return Trace.read(trace), code

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def _require_success(self, code: int, name: str) -> None:
        if code != 0:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise _failed(f"the script {how} ({name} run)", self._log(name))

    def _with_snapshots(self, trace: Trace, name: str) -> Trace:
        if trace.steps:
            return trace
        raise ResumeError(
            f"the script took no snapshot ({name} run)",
            hint=f"it needs AdaptiveCheckpoint, or a Checkpointer that saves; its output is in {self._log(name)}",
        )


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file. It ends with the block, and what it has started itself does not outlive
    it; our writer is in a session of its own."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # all gone
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failed(what: str, log: Path) -> ResumeError:
    """Says what went wrong, with the last lines of output."""
    lines = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return ResumeError(f"{what}; its last lines:\n{lines}\n", hint=f"all of its output is in {log}")


_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "srun", "mpirun", "horovodrun")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A Python program as a user starts it.

    Args:
        interpreter: with its options.
        kind: "script" or "module".
        name: of the file or module.
    """

    interpreter: tuple[str, ...]
    kind: str
    name: str
    arguments: tuple[str, ...]

    def rehearsed(self, spec: Path) -> list[str]:
        """The command that runs it in a rehearsal."""
        wrapper = ("-m", "ckpt_engine.cli.rehearsal_patches", str(spec), self.kind, self.name)
        return [*self.interpreter, *wrapper, *self.arguments]

    @classmethod
    def parse(cls, words: Sequence[str]) -> PythonCommand:
        """Understand a command line.

        Raises:
            click.UsageError: it is none that runs one Python program; says what to write instead.
        """
        first, rest = words[0], list(words[1:])
        if not Path(first).name.startswith("python"):
            return cls._of_program(first, rest)
        options = [first]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            word = rest.pop(0)
            if word in ("-c", "-"):
                raise click.UsageError("a program given with -c or on standard input cannot be run twice: use a file")
            options.append(word)
            if word in _WITH_VALUE and rest:
                options.append(rest.pop(0))
        kind = "script"
        if rest and rest[0] == "-m":
            kind = "module"
            rest.pop(0)
        if not rest:
            raise click.UsageError(f"{' '.join(words)} names no script: give python train.py ...")
        if kind == "script" and not Path(rest[0]).is_file():
            raise click.UsageError(f"{rest[0]} is no file: give the script as for python itself")
        return cls(tuple(options), kind, rest[0], tuple(rest[1:]))

    @classmethod
    def _of_program(cls, name: str, rest: list[str]) -> PythonCommand:
        if Path(name).name in _LAUNCHERS:
            raise click.UsageError(f"{name} starts several processes: give the command of one, python train.py ...")
        found = shutil.which(name)
        shebang = _first_line(Path(found)) if found else ""
        if found is None or "python" not in shebang:
            raise click.UsageError(f"{name} is no Python program: give python train.py ...")
        words = shebang.removeprefix("#!").split()
        interpreter = words[1:] if Path(words[0]).name == "env" else words
        return cls(tuple(interpreter), "script", found, tuple(rest))


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(256).decode(errors="replace").strip() if file.read(2) == b"#!" else ""


@dataclass(frozen=True, slots=True)
class Spec:
    """One run of the script.

    Args:
        folder: where its snapshots go; one folder in it per run folder that the script names.
        trace: file to which one line of JSON per event is appended.
        steps: the run ends right after the first snapshot of at least this step.
        kill_at: the process kills itself before it would take a snapshot after this step; None: it does not.
    """

    folder: str
    trace: str
    steps: int
    kill_at: int | None = None

    def write(self, path: Path) -> Path:
        """Put it into a file."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Spec:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text()))


Attributes = Mapping[str, tuple[str, str]]
"""Class and digest of values that may be hidden state, by path; that of a local variable begins with `function().`"""

Batches = Mapping[tuple[int, int], str]
"""Digests of batches, by loader and number within the epoch."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of the script wrote down.

    Args:
        roots: the run folders that the script named, in order of their first use.
        loaded: ids of the snapshots it resumed from.
        batches: what was fetched on the way to each step.
        steps: of the snapshots it took, in order.
        attributes: what its objects and its loop's variables were at each step.
    """

    roots: tuple[str, ...]
    loaded: tuple[str, ...]
    batches: Mapping[int, Batches]
    steps: tuple[int, ...]
    attributes: Mapping[int, Attributes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The events of a trace file; none if there is no file."""
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        saving = [one for one in events if one["event"] == "saving"]
        batches: dict[int, dict[tuple[int, int], str]] = {}
        attributes: dict[int, Attributes] = {}
        now: dict[str, tuple[str, str]] = {}
        for one in saving:
            found = {(loader, number): digest for loader, number, digest in one["batches"]}
            batches.setdefault(one["step"], {}).update(found)
            now = now | {path: (kind, digest) for path, (kind, digest) in one["attributes"].items()}
            attributes[one["step"]] = now
        return cls(
            roots=tuple(one["url"] for one in events if one["event"] == "root"),
            loaded=tuple(one["snapshot"] for one in events if one["event"] == "loaded"),
            batches=batches,
            steps=tuple(one["step"] for one in saving),
            attributes=attributes,
        )


def event_line(name: str, **values: Any) -> bytes:
    """One event as it is appended to the trace."""
    return json.dumps({"event": name, **values}).encode() + b"\n"
