"""Many fine-tunes of one base on one disk: each fork takes the bytes of its adapter, and outlives all others."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from tests.cli.mortal import ADAPTER, adapter, train
from tests.support import interpreters

MOST_CALLS = {"train": 200, "prune": 100, "fork": 100, "rm": 12}
"""A process is killed before one of so many calls, or of those that it is known to make."""
Ckpt = Callable[..., Any]


class Killer:
    """Runs processes that are killed: half of them before a drawn system call, the others at a drawn moment."""

    def __init__(self) -> None:
        self._draws, self._calls, self._seconds = random.Random(3), dict[str, int](), dict[str, float]()
        self.kills = dict[str, int]()

    @property
    def count(self) -> int:
        return sum(self.kills.values())

    def run(self, verb: str, *arguments: object) -> bool:
        """Whether the process was killed; else it has done all of its work."""
        at_call = verb not in self._seconds or self._draws.random() < 0.5
        call = self._draws.randint(1, self._calls.get(verb, MOST_CALLS[verb])) if at_call else 0
        command = [sys.executable, "-W", "ignore", "-m", "tests.cli.mortal", str(call), verb, *map(str, arguments)]
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with interpreters.Popen(command, cwd=interpreters.REPOSITORY, **options) as process:
            begun = time.monotonic()
            if not at_call:
                try:
                    process.wait(self._draws.uniform(0.0, self._seconds[verb]))
                except subprocess.TimeoutExpired:
                    process.kill()
            _, error = process.communicate()
        status = process.wait()
        if status == -signal.SIGKILL:
            self.kills[verb] = self.kills.get(verb, 0) + 1
            return True
        assert status == 0, error
        self._seconds[verb] = time.monotonic() - begun
        if at_call:
            self._calls[verb] = call  # it makes fewer
        return False


def _bytes_on_disk(root: Path) -> int:
    """Of all files below a folder, each once."""
    files = {(found.st_dev, found.st_ino): found.st_size for found in (one.stat() for one in root.rglob("*"))}
    return sum(files.values())


@dataclass
class Family:
    """A run and its forks, which share the bytes of a base, and a killer of those who work on them.

    Attributes:
        steps: of the newest snapshot of each run.
    """

    ckpt: Ckpt
    base: torch.Tensor
    roots: list[Path]
    killer: Killer = field(default_factory=Killer)
    steps: dict[Path, int] = field(default_factory=dict)

    def begin(self, root: Path) -> float:
        """Make the next run, a fork of the first one; the seconds that the fork takes."""
        number, begun = self.roots.index(root), time.monotonic()
        if number:
            assert self.ckpt("fork", f"{self.roots[0]}#1", root).code == 0
        seconds = time.monotonic() - begun
        train(root, number, 1 + bool(number), None if number else self.base)
        self.steps[root] = 1 + bool(number)
        return seconds

    def require(self, *maybe: Path) -> None:
        """Every byte of every run is there, and it resumes from its newest snapshot; of some of them maybe from one
        that a process was about to write."""
        for root, step in self.steps.items():
            checked = self.ckpt("verify", root)
            assert checked.code == 0, checked.out
            number, self.steps[root] = self._resumed(root)
            assert number == self.roots.index(root)
            assert self.steps[root] in ((step, step + 1) if root in maybe else (step,))

    def _resumed(self, root: Path) -> tuple[int, int]:
        """Which run has trained what is there, and its step."""
        found = Checkpointer(root, writer="thread").load()
        assert torch.equal(found["base"], self.base)
        assert torch.equal(found["adapter"], adapter(found["fork"], found["step"]))
        return int(found["fork"]), int(found["step"])

    def train(self, root: Path) -> bool:
        """Whether the process was killed."""
        killed = self.killer.run("train", root, self.roots.index(root), self.steps[root] + 1)
        self.steps[root] += not killed
        self.require(*[root] * killed)
        return killed

    def prune(self, root: Path) -> bool:
        """Whether the process was killed."""
        killed = self.killer.run("prune", root, "--keep", "last=1")
        self.require()
        return killed

    def fork(self, root: Path) -> bool:
        """Whether the process was killed; then the same command makes the fork, or has made it."""
        new = root.with_name("new")
        killed = self.killer.run("fork", root, new)
        assert self.ckpt("fork", root, new).code in ((0, 2) if killed else (2,))
        assert self._resumed(new) == (self.roots.index(root), self.steps[root])
        assert self.ckpt("verify", new).code == 0
        shutil.rmtree(new)
        self.require()
        return killed

    def remove(self, root: Path) -> None:
        """Until it is gone, however often that is killed."""
        del self.steps[root]
        while root.exists():
            self.killer.run("rm", root)
            self.require()


@pytest.mark.long
@pytest.mark.parametrize(
    ("megabytes", "forks", "kills"), [(8, 2, 15), pytest.param(400, 8, 200, marks=pytest.mark.slow)]
)
def test_forks_share_the_base(ckpt: Ckpt, tmp_path: Path, megabytes: int, forks: int, kills: int) -> None:
    """No process that is killed while it trains, prunes, forks or removes a run hits a byte of the others.

    The runs are removed one after another, the first one first.
    """
    roots = [tmp_path / f"run{n}" for n in range(forks + 1)]
    family = Family(ckpt, torch.rand(megabytes * 250_000), roots)
    seconds = [family.begin(root) for root in roots][1:]
    needed = family.base.nbytes + (forks + 1) * 4 * ADAPTER
    found = _bytes_on_disk(tmp_path)
    assert found <= 1.05 * needed
    works = itertools.cycle([family.train, family.prune, family.fork])
    for number, root in enumerate(roots, 1):
        while family.killer.count < kills * number // len(roots):
            next(works)(root)
        assert ckpt("prune", root, "--keep", "last=1").code == 0
        assert _bytes_on_disk(root) <= 1.05 * (family.base.nbytes + 4 * ADAPTER), "a kill has left files"
        family.remove(root)
    forking = f"forks take {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s"
    print(f"{forking}; {found:,} bytes, {found / needed:.4f} of base and adapters; kills: {family.killer.kills}")
    assert family.killer.count >= kills
