"""Kills commands and runs at places with parity at one of their calls to the disk: `python -m tests.parity.kills`.

Each life is a fork of this process, which has imported everything and has no thread: so a kill costs little, and many
of them are made. What is left is looked at by forks, too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main
from ckpt_engine.store import names
from tests.cli.mortal import CALLS, die_at
from tests.parity.places import PARTS, WAIT_SECONDS, ParityPlace, state, train
from tests.snapshot.passage import same

LIFE_SECONDS = 120
"""A life that takes longer is ended, and counts as one that hangs."""


@dataclass
class Count:
    """What became of the lives that were killed.

    Args:
        kills: so many were.
        lost: state that was durable before does not come back.
        wrong: an object is neither what it was nor what it is to be.
        stuck: the same command, or the next start, does not end the work.
    """

    kills: int = 0
    lost: int = 0
    wrong: int = 0
    stuck: int = 0


def in_fork(work: Callable[[], object], log: Path, call: int = 0) -> int:
    """Do it in a fork that dies before its call of this number; 0: it does not. How that ended, as of `Popen`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 3
    try:
        signal.alarm(LIFE_SECONDS)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.dup2(1, 2)
        die_at(call)
        work()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - it is in the log, and the status says so
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Campaign:
    """The kills of one kind in a folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.root, self.hurt, self.was = folder / "run", folder / "hurt", folder / "was"
        self.copy, self.log = folder / "copy", folder / "log"
        self.kind, self.count = kind, Count()
        if in_fork(self._prepare, self.log):
            raise AssertionError(self.log.read_text())

    def _prepare(self) -> None:
        train([{"url": str(self.root), "parity": PARTS}])
        shutil.copytree(self.root, self.was)
        if self.kind != "cp":
            place = ParityPlace(str(self.root))
            (whole, parity), *others = place.parities.items()
            (self.root / str(parity)).unlink()
            assert (self.root / whole).exists()
            for number, (file, _) in enumerate(others):
                place.hurt(file, 2, random.Random(number))
            (self.root / names.copy_name(place.ids[0])).unlink()
        shutil.copytree(self.root, self.hurt)

    def sweep(self, kills: int, seed: int) -> Count:
        """Kill so many lives at calls that are drawn from all of one; the count is written after each of them."""
        self._reset()
        assert in_fork(self._counted, self.log) == 0, self.log.read_text()
        last = int(self.log.with_name("calls").read_text())
        for call in random.Random(seed).sample(range(1, last + 1), min(kills, last)):
            self._reset()
            if in_fork(self._work, self.log, call) == -signal.SIGKILL:
                self.count.kills += 1
                found = in_fork(self._look, self.log)
                self.count.lost += found & 1 > 0
                self.count.wrong += found & 2 > 0
                self.count.stuck += found & 4 > 0
                self.log.with_name("count").write_text(json.dumps(asdict(self.count)))
        return self.count

    def _counted(self) -> None:
        """Write how many calls a life has, about."""
        made = list[str]()
        sys.addaudithook(lambda event, _: made.append(event) if event in CALLS else None)
        try:
            self._work()
        finally:
            self.log.with_name("calls").write_text(str(len(made)))

    def _look(self) -> None:
        """End with what is wrong after a kill, as bits: lost, wrong, stuck."""
        found = 0
        for bit, check in ((1, self._load), (2, self._compare), (4, self._resume)):
            try:
                check()
            except Exception:  # noqa: BLE001 - it is in the log, and the status says so
                traceback.print_exc()
                found |= bit
        raise SystemExit(found)

    def _reset(self) -> None:
        for folder in (self.root, self.copy):
            shutil.rmtree(folder, ignore_errors=True)
        if self.kind != "run":
            shutil.copytree(self.hurt, self.root)

    def _work(self) -> None:
        if self.kind == "run":
            train([{"url": str(self.root), "parity": PARTS}], 1)
        else:
            main([self.kind, str(self.root), *([str(self.copy)] if self.kind == "cp" else [])])

    def _load(self) -> None:
        if self.kind == "run":
            if not list((self.root / "snapshots").glob("[0-9]*[0-9a-f].json")):
                return
            wanted = 1
        else:
            wanted = 3
        assert same(loaded(self.root), state(wanted))

    def _compare(self) -> None:
        if self.kind in ("run", "cp"):
            return
        there, was, hurt = (ParityPlace(str(one)).was for one in (self.root, self.was, self.hurt))
        assert set(hurt) <= set(there) <= set(was)
        assert all(data in (was[name], hurt.get(name)) for name, data in there.items())

    def _resume(self) -> None:
        if self.kind == "run":
            self._start_again()
        elif self.kind == "cp":
            self._ends_with_0()
            assert ParityPlace(str(self.copy)).was == ParityPlace(str(self.was)).was
        else:
            self._ends_with_0()
            assert ParityPlace(str(self.root)).was == ParityPlace(str(self.was)).was

    def _ends_with_0(self) -> None:
        try:
            self._work()
        except SystemExit as ended:
            assert not ended.code

    def _start_again(self) -> None:
        options = {
            "tiers": [{"url": str(self.root), "parity": PARTS}],
            "writer": "thread",
            "wait_at_end": WAIT_SECONDS,
        }
        with Checkpointer(options) as run:
            if run.load() is None:
                assert run.save(state(1), step=1).wait(WAIT_SECONDS)
            run.engine.start()
        place = ParityPlace(str(self.root))
        assert place.parities
        for number, file in enumerate(place.parities):
            place.hurt(file, 2, random.Random(number))
        assert same(loaded(self.root), state(1))


def loaded(root: Path) -> Any:
    with Checkpointer(str(root), writer="thread") as run:
        return run.load()


if __name__ == "__main__":
    kind, kills, seed, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(Campaign(kind, Path(folder)).sweep(int(kills), int(seed)))) + "\n")
