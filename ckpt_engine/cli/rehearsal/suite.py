"""Runs a test suite without us and with our callback in every Trainer, and tells which tests that changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.errors import CorruptError, ResumeError, WaitTimeoutError

PLUGIN = "lightning_ckpt.pytest_plugin"
_RAN = (0, 1)
"""Exit codes of pytest where tests were run."""
_LOOK_SECONDS = 0.5
_TAIL_LINES = 12


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
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._watch(process, title, file)
            finally:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                code = process.wait()
        outcomes, _ = read_outcomes(file)
        if only is None and code not in _RAN:
            lines = self._log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            text = "\n".join(f"  {line}" for line in lines)
            raise ResumeError(
                f"pytest ended with exit code {code} without ckpt-engine; its last lines:\n{text}\n",
                hint=f"all of its output is in {self._log(name)}",
            )
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
    """What the plugin has written so far: outcomes by test, and how many tests there are.

    Raises:
        CorruptError: something else is in the file.
    """
    outcomes: dict[str, Outcome] = {}
    total = 0
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    try:
        for event in map(json.loads, lines):
            if event["event"] == "collected":
                total = event["tests"]
            else:
                outcomes[event["id"]] = Outcome(event["outcome"], event["line"])
    except (ValueError, KeyError, TypeError) as err:
        raise CorruptError(f"{file} is not what the pytest plugin writes: {err}") from err
    return outcomes, total
