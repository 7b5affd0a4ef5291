"""Runs of the script in processes of their own: uninterrupted, killed and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.cli.rehearsal.command_line import PythonCommand
from ckpt_engine.cli.rehearsal.spec import Spec, Trace
from ckpt_engine.errors import ResumeError, WaitTimeoutError
from ckpt_engine.observe.resume_report import FILE_NAME, NotRestored, ResumeReport
from ckpt_engine.store import layout

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
        without = shutil.ignore_patterns(layout.LEASE, layout.CATALOG, layout.STATUS)
        shutil.copytree(self.scratch / "uninterrupted", target, copy_function=os.link, ignore=without)
        for manifest in target.glob("*/snapshots/*.json"):
            parsed = layout.manifest_id(f"snapshots/{manifest.name}")
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
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                self.command.rehearsed(spec),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired as err:
                raise WaitTimeoutError(
                    f"the script had not reached step {self.steps} after {self.timeout:g} s ({name} run)",
                    hint=f"see {self._log(name)}; give fewer --steps or a longer --timeout",
                ) from err
            finally:
                # What the script has started itself must not outlive it; our writer is in a session of its own.
                _kill_group(process.pid)
                process.wait()
        return Trace.read(trace), code

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def _require_success(self, code: int, name: str) -> None:
        if code == 0:
            return
        lines = self._log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ResumeError(
            f"the script {how} ({name} run); its last lines:\n" + "\n".join(f"  {line}" for line in lines) + "\n",
            hint=f"all of its output is in {self._log(name)}",
        )

    def _with_snapshots(self, trace: Trace, name: str) -> Trace:
        if trace.steps:
            return trace
        raise ResumeError(
            f"the script took no snapshot ({name} run)",
            hint=f"it needs AdaptiveCheckpoint, or a Checkpointer that saves; its output is in {self._log(name)}",
        )


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all gone
