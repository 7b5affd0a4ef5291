"""Runs a user's command in a scratch folder.

What the command does there is compared with what a run has recorded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_engine.config.rehearsal import Rehearsal
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_data, copy_snapshot, scratch_of
from ckpt_engine.errors import ConfigError, ResumeError, WaitTimeoutError
from ckpt_engine.observe.resume_report import FILE_NAME, Replay, ResumeReport
from ckpt_engine.observe.units import count
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.storage import open_storage
from ckpt_engine.tools.stored_run import Run, find_run

if TYPE_CHECKING:
    from ckpt_engine.tools.verdict import FirstDifference

_TAIL_LINES = 12
_END_SECONDS = 5.0
_OTHER_ROOT = "the script names another run folder at each start ({}; {}): outside of a rehearsal nothing is found"


@dataclass(frozen=True, slots=True)
class Proof:
    """What a command did from a snapshot on, beside what the run did.

    Args:
        killed_after: the step of the snapshot.
        snapshots, values: how much was compared.
        replay: what the recorded steps have shown; None: nothing was recorded.
        resumed: where the resumed command first differs.
        notes: more that is worth knowing.
    """

    killed_after: int
    snapshots: int
    values: int
    replay: Replay | None
    resumed: FirstDifference | None
    notes: tuple[str, ...]

    def lines(self, other: str, blame: str = "NOT EXACT") -> list[str]:
        """The verdict, and what explains it.

        Args:
            other: what the resumed run was compared with.
            blame: begins the line about a difference.
        """
        if self.resumed is not None:
            verdict = f"{blame}: resumed at step {self.killed_after}, step {self.resumed.step} differs"
            lines = [verdict, *self.resumed.lines()]
        else:
            what = f"{count(self.snapshots, 'snapshot')}, {count(self.values, 'value')}"
            verdict = f"exact: resumed at step {self.killed_after}, equal to {other} ({what})"
            lines = [verdict] if self.replay is None else [verdict, self.replay.text()]
        return lines + [f"note: {note}" for note in self.notes]


@dataclass(frozen=True, slots=True)
class Runs:
    """Starts a command, once for each run.

    Args:
        words: the command, as the user gives it.
        scratch: a folder for everything that is left behind.
        timeout: seconds that each run may take.
    """

    words: Sequence[str]
    scratch: Path
    timeout: float

    def run(self, name: str, end: int, every_n_steps: int = 1) -> list[str]:
        """Once, in the folder of this name; the runs that the command named.

        Args:
            end, every_n_steps: see `Rehearsal`.

        Raises:
            ResumeError: the command failed.
            WaitTimeoutError: it took too long.
        """
        place, log = self.scratch / name, self.scratch / f"{name}.log"
        place.mkdir(exist_ok=True)
        rehearsal = Rehearsal(str(place), every_n_steps, end)
        code = run_to_end(self.words, log, self.timeout, rehearsal.environment())
        if code != 0:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise failed(f"the command {how} ({name} run)", log)
        return rehearsal.roots()

    def opened(self, name: str) -> list[Run]:
        """The runs in the folder of this name that have a snapshot."""
        return [find_run(str(folder.parent)) for folder in sorted((self.scratch / name).glob("run*/snapshots"))]

    def rehearse(self, steps: int, at: int, say: Callable[[str], object]) -> tuple[Proof, FirstDifference | None]:
        """The command twice from the start, and once resumed in the middle of what it did first.

        Args:
            steps: how far it runs.
            at: the step of the snapshot that it is resumed from, or of the newest one before.
            say: takes a line about each run.

        Returns:
            What the resumed run shows, and where two runs from the start differ.

        Raises:
            ResumeError: see `prove`; or there is no snapshot to resume from.
            WaitTimeoutError: a run takes too long.
        """
        say(f"run 1: from the start to step {steps}")
        roots = self.run("whole", steps + 1)
        from ckpt_engine.tools import verdict  # torch

        whole = self.opened("whole")
        starts = [(run, early[-1]) for run in whole if (early := [one for one in run.holders if one.step <= at])]
        if not starts:
            raise ResumeError(
                f"the script took no snapshot up to step {at}: there is nothing to resume from",
                hint="it needs AdaptiveCheckpoint or a Checkpointer that saves; or give a later --kill-at and --steps",
            )
        say(f"run 2: from the start to step {at}, once more")
        self.run("repeated", at + 1)
        fresh, _, _ = verdict.compare(whole, self.opened("repeated"), 0, at, fresh=True)
        say(f"run 3: resumed at step {at}, to step {steps}")
        proof = self.prove("resumed", starts, steps, roots)
        ends = (max(one.step for run in found for one in run.holders) for found in (whole, self.opened("resumed")))
        return replace(proof, resumed=proof.resumed or verdict.judge_end(*ends)), fresh

    def prove(self, name: str, starts: Sequence[tuple[Run, ParsedId]], last: int, roots: Sequence[str]) -> Proof:
        """Resume the command from snapshots, and compare its steps and snapshots with what the runs have behind these.

        Args:
            name: of a new folder.
            starts: of each run that the command names, in order.
            last: the last step that is compared.
            roots: the runs that the command is to name.

        Raises:
            ResumeError: the command does not resume, fails, or does nothing that can be compared.
            WaitTimeoutError: it takes too long.
        """
        from ckpt_engine.tools import verdict  # torch

        folders = [self.scratch / name / f"run{number}" for number in range(len(starts))]
        for start, folder in zip(starts, folders, strict=True):
            _cut_back(*start, folder)
        step = max(snapshot.step for _, snapshot in starts)
        behind = {parsed.step for run, _ in starts for parsed in run.holders if step < parsed.step <= last}
        named = self.run(name, last + 1, math.gcd(*behind) or last + 1)
        again = self.opened(name)
        written = [path for folder in folders if (path := folder / FILE_NAME).exists()]
        reports = [ResumeReport.from_json(json.loads(path.read_text())) for path in written]
        new = {one.step for run in again for one in run.holders} - {snapshot.step for _, snapshot in starts}
        if not reports and (min(new, default=last) < step or len(named) > len(roots)):
            raise ResumeError(
                "the script did not resume when it was started again: it loaded no snapshot "
                f"({', '.join(roots)} is its run folder; it named {', '.join(named)})",
                hint="Lightning: trainer.fit(..., ckpt_path='auto'); plain loops: state = ckpt.load(); "
                "and the same run folder at every start",
            )
        found, steps, values = verdict.compare([run for run, _ in starts], again, step + 1, last, fresh=False)
        # The command ends behind the step after the last one.
        said = (report.replay for report in reports if report.replay is not None)
        replays = [one for one in said if one.first is None or one.first.step <= last]
        if not steps and not any(one.steps or one.first for one in replays):
            why = next((one.why for one in replays), "the command records no steps")
            raise ResumeError(
                f"nothing can be compared after step {step}: {why}; the two runs share no snapshot",
                hint=f"see {self.scratch / name}.log; a later --steps or an earlier --step leaves more to compare",
            )
        first = verdict.earliest([found, *map(verdict.of_replay, replays)])
        if first is not None:
            missing = (f"{row.name}: {row.why}" for report in reports for row in report.not_restored)
            first = replace(first, declared=tuple(missing))
        replay = next((one for one in replays if one.first is not None), next(iter(replays), None))
        notes = [_OTHER_ROOT.format(", ".join(roots), ", ".join(named))] if named != roots else []
        if first is None and (lonely := len(behind.difference(steps))):
            notes.append(f"not compared, for want of a counterpart: {count(lonely, 'snapshot')} of the first run")
        return Proof(step, len(steps), values, replay, first, tuple(notes))


def _cut_back(run: Run, snapshot: ParsedId, folder: Path) -> None:
    """A folder with this snapshot and what was recorded, as if the process had been killed behind it."""
    near, target = run.holders[snapshot][0], open_storage(str(folder))
    with acquire(target):
        far = adopt_run(RunText.of(near), target)
        copy_snapshot(near, far, snapshot.id, partial(copy_data, near, far, scratch=scratch_of(near.storage)))
        for one in near.storage.list(names.ROWS):
            target.put(one.name, [memoryview(near.storage.get(one.name))], exclusive=False)


@contextmanager
def scratch_folder(wanted: Path | None) -> Iterator[Path]:
    """A new folder for runs; one that is not `wanted` is removed behind the block, unless that failed.

    Raises:
        ConfigError: it exists.
    """
    if wanted is not None and wanted.exists():
        raise ConfigError(f"{wanted} exists already", hint="name a folder that does not exist")
    place = Path(tempfile.mkdtemp(prefix="ckpt-rehearsal-")) if wanted is None else wanted.absolute()
    place.mkdir(parents=True, exist_ok=True)
    yield place
    if wanted is None:
        shutil.rmtree(place, ignore_errors=True)


def run_to_end(command: Sequence[str], log: Path, timeout: float, environment: Mapping[str, str] | None = None) -> int:
    """The exit status of a process whose output goes to a file. What it has started itself does not outlive it; our
    writer is in a session of its own.

    Raises:
        ConfigError: there is no such program.
        WaitTimeoutError: it takes too long.
    """
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        except OSError as err:
            raise ConfigError(f"{command[0]} cannot be started: {err.strerror}") from err
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired as err:
            raise WaitTimeoutError(
                f"the command had not ended after {timeout:g} s", hint=f"see {log}; give a longer --timeout"
            ) from err
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # a launcher passes the first one on
                with suppress(ProcessLookupError):  # all gone
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)


def failed(what: str, log: Path) -> ResumeError:
    """Says what went wrong, with the last lines of output."""
    lines = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return ResumeError(f"{what}; its last lines:\n{lines}\n", hint=f"all of its output is in {log}")
