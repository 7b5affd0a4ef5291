"""Runs a test suite without and with the Lightning callback in every Trainer: what that changes, as JSON.

`python suite.py --timeout SECONDS -- ARGUMENTS` with the arguments of pytest; the exit code is 1 if a test fails that
passes without us, and 2 if none passes. Progress is on the error stream.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_engine.cli.output import say_waiting, showing
from ckpt_engine.errors import ResumeError
from ckpt_engine.tools.rehearsal_runs import failed, run_to_end

PLUGIN = "in_every_lightning_trainer"
_RAN = (0, 1)
"""Exit codes of pytest where tests were run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test.

    Args:
        outcome: passed, failed or skipped.
        line: the first line of its failure.
    """

    test: str
    outcome: str
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

    new_failures: tuple[Outcome, ...]
    unsteady: tuple[Outcome, ...]
    passed: int
    failed_before: tuple[Outcome, ...]
    skipped: int


@dataclass(frozen=True, slots=True)
class Suite:
    """Starts pytest in the working folder, once for each run.

    Args:
        arguments: of pytest, as the user gives them.
        scratch: an empty folder.
        timeout: seconds that each run may take.
        shows: in the block that it makes, the text of the function that it takes is what a run does.
    """

    arguments: Sequence[str]
    scratch: Path
    timeout: float
    shows: Callable[[Callable[[], str]], AbstractContextManager[None]]

    def compare(self) -> SuiteReport:
        """The whole procedure.

        Raises:
            ResumeError: pytest runs no test.
            WaitTimeoutError: it takes too long.
        """
        without, _ = self._run("run 1: without ckpt-engine")
        fine = [test for test, one in without.items() if one.outcome == "passed"]
        if not fine:
            raise ResumeError("no test passes without ckpt-engine", hint=f"see {self._file('run 1', 'log')}")
        trainers = self.scratch / "trainers"
        trainers.mkdir()
        ours = [f"--ckpt-trainers={trainers}"]
        found, code = self._run("run 2: with AdaptiveCheckpoint in every Trainer", ours, fine)
        ended = f"the tests ended before it, with exit code {code}"
        ours_of = {test: found.get(test) or Outcome(test, "failed", ended) for test in fine}
        broken = {test: one for test, one in ours_of.items() if one.outcome == "failed"}
        title = "run 3: the new failures again, without ckpt-engine"
        again = self._run(title, (), list(broken))[0] if broken else {}
        shaky = {test for test, one in again.items() if one.outcome == "failed"}
        return SuiteReport(
            new_failures=tuple(one for test, one in broken.items() if test not in shaky),
            unsteady=tuple(one for test, one in broken.items() if test in shaky),
            passed=len(fine) - len(broken),
            failed_before=tuple(one for one in without.values() if one.outcome == "failed"),
            skipped=sum(one.outcome == "skipped" for one in without.values()),
        )

    def _run(
        self, title: str, more: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> tuple[dict[str, Outcome], int]:
        name = title.partition(":")[0]
        file, log = self._file(name, "jsonl"), self._file(name, "log")
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, f"--ckpt-outcomes={file}", *more]
        if only is not None:
            chosen = self._file(name, "json")
            chosen.write_text(json.dumps(only))
            command += [f"--ckpt-only={chosen}"]  # as a word of its own, its path would move pytest's rootdir
        with self.shows(lambda: progress(title, file)):
            code = run_to_end([*command, *self.arguments], log, self.timeout)
        if only is None and code not in _RAN:
            raise failed(f"pytest ended with exit code {code} without ckpt-engine", log)
        return read_outcomes(file)[0], code

    def _file(self, name: str, suffix: str) -> Path:
        return self.scratch / f"{name}.{suffix}"


def progress(title: str, file: Path) -> str:
    """How far a run is, in a line."""
    outcomes, total = read_outcomes(file)
    broken = sum(one.outcome == "failed" for one in outcomes.values())
    return f"{title}: {len(outcomes):,} of {total:,} tests, {broken:,} failed"


def read_outcomes(file: Path) -> tuple[dict[str, Outcome], int]:
    """What the plugin has written so far: outcomes by test, and how many tests there are."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half there
    events = list(map(json.loads, lines))
    tests = (Outcome(one["id"], one["outcome"], one["line"]) for one in events if one["event"] != "collected")
    return {one.test: one for one in tests}, sum(one["tests"] for one in events if one["event"] == "collected")


@contextmanager
def shown(now: Callable[[], str]) -> Iterator[None]:
    """In the block, `now` says how far a run is, and once more behind it."""
    with showing(now, hidden=False):
        yield
    say_waiting(now())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that each run may take")
    parser.add_argument("words", nargs="+")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckpt-suite-") as scratch:
        try:
            report = Suite(options.words, Path(scratch), options.timeout, shown).compare()
        except ResumeError as err:
            print(err, file=sys.stderr)
            return 2
    print(json.dumps(asdict(report)))
    return 1 if report.new_failures else 0


if __name__ == "__main__":
    sys.exit(main())
