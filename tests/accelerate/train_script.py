"""Trains in processes that can be killed: `python -m tests.accelerate.train_script` reads jobs from its standard input.

Each job is one line of JSON. It runs in a fork of this process, so that the imports are paid once. It appends one line
per trace entry to its trace file while it trains, and a last line with the digest of where it ended. Answers on
standard output, one JSON line each: the child's process id when it starts, its exit status when it is gone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch

from tests.accelerate.runs import train_accelerate
from tests.accelerate.test_exact_resume import CASES
from tests.tracking.runs import Entry, train_plain

PACE_SECONDS = 0.01


class TraceFile(list[Entry]):
    """A trace that is on disk up to its last entry, whatever happens to the process; slow enough to be killed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, entry: Any) -> None:
        super().append(entry)
        os.write(self._descriptor, f"{entry!r}\n".encode())
        time.sleep(PACE_SECONDS)


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    case = replace(CASES[job["case"]], accumulate=job["accumulate"], epochs=job["epochs"])
    train = {"accelerate": train_accelerate, "plain": train_plain}[job["loop"]]
    trace = TraceFile(job["trace"])
    options = {"tiers": job["root"], "every_n_steps": 2, "keep": {"last": 3}, **job.get("options", {})}
    done = train(case, options, seed=job["seed"], trace=trace)
    trace.append(("digest", done.digest))


def main() -> None:
    """Serve jobs until standard input ends."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                output = os.open(f"{job['trace']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                logging.basicConfig(level=logging.INFO)
                try:
                    run(job)
                    status = 0
                except SystemExit as end:
                    status = int(end.code or 0)
                atexit._run_exitfuncs()  # as at the end of a script
            except BaseException:  # noqa: BLE001 - the fork must never return into the server's loop
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps({"pid": child}), flush=True)
        _, wait_status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(wait_status)}), flush=True)


if __name__ == "__main__":
    main()
