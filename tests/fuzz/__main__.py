"""`python -m tests.fuzz --mutants 2000` reads so many mutants in processes of their own, and says what it finds."""

from __future__ import annotations

import argparse
import json
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil

from tests.fuzz import stores
from tests.fuzz.mutants import Mutant, corpus, draw
from tests.fuzz.reading import READINGS, described, read

ANSWER_CPU_SECONDS = 150.0
"""Of work on one mutant, in all ways: a process that does not answer after that hangs, however busy the machine is."""
ANSWER_SECONDS = 1800.0
"""Of waiting, where it does not even work."""
MOST_ADDRESS_BYTES = 12 << 30
FULL = 8
"""One of so many mutants is read in every way; the others are loaded, and read in some."""


def child(folder: Path) -> None:
    """Reads mutants that it is given as lines, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    runs = {name: folder / name for name in stores.MAKERS}
    for line in sys.stdin:
        job = json.loads(line)
        mutant = draw(job["seed"], runs) if job["mutant"] is None else Mutant.of_json(job["mutant"])
        rng = random.Random(job["seed"])
        every = job["mutant"] is not None or job["seed"] % FULL == 0
        readings = READINGS if every else [READINGS[0], *(one for one in READINGS[1:] if rng.random() < 0.25)]
        with tempfile.TemporaryDirectory() as room:
            found = read(mutant, runs[mutant.store], Path(room), readings)
        print(json.dumps([described(mutant, one) for one in found]), flush=True)


class Reader:
    """A child process, and another one when it dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[str] | None = None

    def ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """What is found in one mutant."""
        if self._child is None:
            command = [sys.executable, "-m", "tests.fuzz", "--child", str(self._folder)]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(job) + "\n")
        self._child.stdin.flush()
        ready = self._is_ready()
        line = self._child.stdout.readline() if ready else ""
        if line:
            return list(json.loads(line))
        self._child.kill()
        with self._child as gone:
            what = f"process ended with {gone.wait(30)}" if ready else "hang"
        self._child = None
        return [{"what": what, "reading": "?", "mutant": job, "detail": ""}]

    def _is_ready(self) -> bool:
        assert self._child is not None
        process, deadline = psutil.Process(self._child.pid), time.monotonic() + ANSWER_SECONDS
        began = sum(process.cpu_times()[:2])
        while not select.select([self._child.stdout], [], [], 5)[0]:
            if time.monotonic() > deadline or sum(process.cpu_times()[:2]) - began > ANSWER_CPU_SECONDS:
                return False
        return True

    def close(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            with self._child as ended:
                ended.wait(60)


def campaign(mutants: int, seed: int, processes: int = 2, *, say: bool = False) -> list[dict[str, Any]]:
    """The findings in the corpus, and in so many mutants from number `seed` on."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-fuzz-"))
    jobs: Queue[dict[str, Any]] = Queue()
    for number, mutant in enumerate(corpus()):
        jobs.put({"seed": number, "mutant": mutant.to_json()})
    for number in range(seed, seed + mutants):
        jobs.put({"seed": number, "mutant": None})
    found: list[dict[str, Any]] = []

    def work() -> None:
        reader = Reader(folder)
        try:
            while True:
                job = jobs.get_nowait()
                for one in reader.ask(job):
                    found.append({"seed": job["seed"], **one})
                    if say:
                        print(json.dumps(found[-1]), flush=True)
        except Empty:
            reader.close()

    try:
        stores.build(folder)
        threads = [threading.Thread(target=work) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    """The command line."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mutants", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--child", type=Path)
    given = arguments.parse_args()
    if given.child is not None:
        child(given.child)
        return
    found = campaign(given.mutants, given.seed, given.processes, say=True)
    print(f"{given.mutants} mutants and {len(corpus())} of the corpus: {len(found)} findings")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
