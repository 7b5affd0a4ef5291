"""The campaign of retention: `python -m tests.faults.schedules --schedules 200 --seed 1`.

A schedule is a run of some training, `ckpt prune`, `pin`, `unpin`, `compact` and `cp`, in random order, on two tiers
with random codecs and a copy. Most steps of it are ended by `kill -9` at a random moment, with or without the writer's
own process. After each one all that is listed at every place restores bit for bit, what was acknowledged and what was
pinned is there; after the last one a collection leaves exactly the files that the snapshots need.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main as ckpt
from ckpt_engine.copy import encode_pieces
from ckpt_engine.copy.make_room import prune
from ckpt_engine.copy.write_snapshot import cut
from ckpt_engine.restore.load import load
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll
from ckpt_engine.store.storage.local import LocalStorage
from tests.faults.life import fork_server, start_fork_server
from tests.snapshot.passage import same
from tests.support.bounds import bounds

PLACES = ("near", "far", "copy")
NEAR = ("raw", "raw", "zstd", "byteplane-zstd", "delta")
FAR = ("raw", "zstd", "byteplane-zstd", "delta", "delta")
KEEP: Sequence[dict[str, Any]] = ({"last": 2}, {"last": 3}, {"last": 1, "every_n_steps": 4}, {"last": 9})
VERBS = ("train", "train", "train", "prune", "pin", "unpin", "compact", "cp")
SECONDS = 120.0
"""For anything to happen at all."""


@cache
def tensors(step: int) -> dict[str, torch.Tensor]:
    """What is trained, after a step: few rows of the table change, all weights do, a little, the rest is frozen."""
    if step == 0:
        random_of = torch.Generator().manual_seed(0)
        shapes = {"table": (600, 8), "weights": (40, 30), "frozen": (500,)}
        return {name: torch.randn(shape, generator=random_of) for name, shape in shapes.items()}
    random_of = torch.Generator().manual_seed(step)
    new = {name: tensor.clone() for name, tensor in tensors(step - 1).items()}
    new["table"][torch.randint(600, (5,), generator=random_of)] += step
    new["weights"] += 1e-6 * torch.randn(40, 30, generator=random_of)
    return new


def state(step: int) -> dict[str, Any]:
    """The state after a step."""
    return {"model": tensors(step), "step": step}


@dataclass(frozen=True)
class Order:
    """What a process does: a verb, and what it needs to know."""

    root: str
    verb: str
    near: str = "raw"
    far: str = "raw"
    keep: dict[str, Any] = field(default_factory=dict)
    writer: str = "thread"
    steps: int = 1
    arguments: tuple[str, ...] = ()
    sabotage: bool = False


def obey(order: Order, pipe: Connection) -> None:
    """The process: says that it begins, each step that is durable, and how it ended."""
    setattr(*bounds("PLAIN", least_bytes=0, most_bases=4))  # all is shared however small, in short chains
    encode_pieces.LEAST_ROWS = 2
    cut.__defaults__ = (4000,)
    if order.sabotage:
        Repository._references = lambda self, listed: (set(), ())  # type: ignore[method-assign]
    pipe.send("begins")
    if order.verb == "train":
        tiers = [
            {"url": f"{order.root}/near", "codec": order.near, "keep": order.keep},
            {"url": f"{order.root}/far", "codec": order.far, "keep": order.keep},
        ]
        with Checkpointer(tiers=tiers, writer=order.writer) as checkpointer:
            loaded = checkpointer.load()
            step = loaded["step"] if loaded is not None else 0
            for one in range(step + 1, step + 1 + order.steps):
                checkpointer.save(state(one), step=one).wait(SECONDS)
                pipe.send(one)
        pipe.send("done")
        return
    said = StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            ckpt([order.verb, *order.arguments])
    except SystemExit as end:
        if end.code in (0, None):
            pipe.send("done")
        else:  # to refuse, such as what is pinned, is an answer as well
            is_refused = said.getvalue().startswith("ckpt: [CKPT")
            pipe.send("refused" if is_refused else f"{end.code}: {said.getvalue()}")


class Schedule:
    """One schedule.

    Args:
        root: an empty folder.
        seed: decides everything but the moments at which the operating system does what.
    """

    def __init__(self, root: Path, seed: int, *, sabotage: bool = False) -> None:
        self.root = root
        self.bad: list[str] = []
        self.kills = 0
        self.restored = 0
        self.codecs: set[str] = set()
        self._chance = random.Random(seed)
        self._sabotage = sabotage
        self._durable = 0
        self._pinned: set[str] = set()
        self._keep = self._chance.choice(KEEP)
        self._source = self._chance.choice(("near", "far"))

    def play(self, length: int) -> None:
        """Do so many things, and look at the places after each."""
        verbs = ["train", *self._chance.choices(VERBS, k=length - 1)]
        try:
            for verb in verbs:
                self._do(verb)
                self._check(verb)
                if self.bad:
                    return
            self._clean()
        except Exception as err:  # noqa: BLE001 - whatever goes wrong is a finding
            self.bad.append(f"{type(err).__name__}: {err}")

    def _do(self, verb: str) -> None:
        near = Repository(LocalStorage(self.root / "near"))
        ids = [parsed.id for parsed in near.ids()]
        chosen = self._chance.choice(ids) if ids else ""
        if verb != "train" and not chosen:
            return
        url = str(self.root / "near")
        arguments: dict[str, tuple[str, ...]] = {
            "prune": (
                str(self.root / self._chance.choice(("near", "far"))),
                "--keep",
                f"last={self._chance.randint(1, 3)}",
            ),
            "pin": (url, chosen, "--note", "kept"),
            "unpin": (url, chosen),
            "compact": (url, chosen),
            "cp": (str(self.root / self._source), str(self.root / "copy")),
        }
        if verb == "prune" and not Repository(LocalStorage(arguments["prune"][0])).ids():
            return
        if verb == "cp" and not Repository(LocalStorage(arguments["cp"][0])).ids():
            return
        if verb == "unpin":
            self._pinned.discard(chosen)
        order = Order(
            str(self.root),
            verb,
            self._chance.choice(NEAR),
            self._chance.choice(FAR),
            self._keep,
            self._chance.choice(("thread", "thread", "thread", "process")),
            self._chance.randint(1, 6),
            arguments.get(verb, ()),
            self._sabotage,
        )
        ended = self._run(order)
        if verb == "pin" and ended == "done":
            self._pinned.add(chosen)

    def _run(self, order: Order) -> str:
        """Let a process do it, and most often kill it meanwhile; what it said last."""
        ours, theirs = fork_server().Pipe()
        process = fork_server().Process(target=obey, args=(order, theirs), daemon=False)
        process.start()
        theirs.close()
        said: Any = ""
        is_killed, wanted = self._chance.random() < 0.75, self._chance.randint(0, order.steps)
        moment = self._chance.random() ** 2 * (0.15 if order.verb == "train" else 0.08)
        deadline, strikes = time.monotonic() + SECONDS, None
        heard = 0
        while time.monotonic() < deadline:
            left = (deadline if strikes is None else strikes) - time.monotonic()
            try:
                if ours.poll(max(0.0, left)):
                    said = ours.recv()
                    heard += 1
                    if isinstance(said, int):
                        self._durable = max(self._durable, said)
                elif strikes is not None:
                    break
            except (EOFError, ConnectionError):
                break
            if is_killed and strikes is None and heard > wanted:
                strikes = time.monotonic() + moment
        writers = self._children(process.pid)
        if strikes is not None and process.is_alive():
            self.kills += 1
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            if self._chance.random() < 0.5:
                for writer in writers:
                    with suppress(psutil.NoSuchProcess):
                        writer.kill()
            with suppress(EOFError, ConnectionError):
                while ours.poll(0):
                    said = ours.recv()
                    self._durable = max(self._durable, said) if isinstance(said, int) else self._durable
        process.join(SECONDS)
        _, alive = psutil.wait_procs(writers, SECONDS)
        ours.close()
        if process.is_alive() or alive:
            self.bad.append(f"{order.verb} does not end")
            process.kill()
        elif strikes is None and said not in ("done", "refused"):
            self.bad.append(f"{order} ended after it had said {said!r}, with {process.exitcode}")
        return str(said)

    @staticmethod
    def _children(pid: int) -> list[psutil.Process]:
        try:
            return list(psutil.Process(pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def _check(self, verb: str) -> None:
        for name in PLACES:
            storage = LocalStorage(self.root / name)
            if not (self.root / name).exists():
                continue
            listing = Repository(storage).scan()
            if listing.damaged:
                self.bad.append(f"after {verb}: damaged at {name}: {listing.damaged}")
            for info in listing.snapshots:
                found = load([Repository(storage)], only=info.id)
                if found is None or not same(found.state, state(info.step)):
                    self.bad.append(f"after {verb}: {info.id} at {name} is not what was saved")
                self.restored += 1
                manifest = Repository(storage).read(info.id)
                self.codecs |= {piece.codec for entry in manifest.entries.values() for piece in entry.pieces}
            steps = {info.step for info in listing.snapshots}
            if name == "near":
                if max(steps, default=0) < self._durable:
                    self.bad.append(
                        f"after {verb}: step {self._durable} was durable and is gone, there are {sorted(steps)}"
                    )
                if lost := self._pinned - {info.id for info in listing.snapshots}:
                    self.bad.append(f"after {verb}: pinned and gone: {lost}")

    def _clean(self) -> None:
        for name in PLACES:
            storage = LocalStorage(self.root / name)
            if not (self.root / name).exists():
                continue
            with acquire(storage, wait_seconds=SECONDS) as lease:
                repository = Repository(storage)
                repository.create_if_absent()
                prune(repository, lease, KeepAll())
                needed = {file for parsed in repository.ids() for file in repository.files_of(parsed.id)}
            there = {
                str(path.relative_to(self.root / name)) for path in (self.root / name).rglob("*") if path.is_file()
            }
            needed |= {names.manifest_name(parsed.id) for parsed in repository.ids()}
            needed |= {names.pin_name(snapshot) for snapshot in pins.pinned_ids(storage)}
            needed |= there & {names.RECORD, names.LEASE, names.STATUS, names.CATALOG, names.ATTEMPTS}
            if there != needed:
                self.bad.append(f"at {name}: left over {sorted(there - needed)}, missing {sorted(needed - there)}")
        self._check("the last collection")


@dataclass
class Tally:
    """What came of all schedules."""

    schedules: int = 0
    kills: int = 0
    restored: int = 0
    codecs: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)


def campaign(
    folder: Path,
    schedules: int,
    seed: int,
    length: int = 8,
    tell: Callable[[str], object] = lambda _: None,
    **how: bool,
) -> Tally:
    """Play schedules one after another, each in a folder of its own."""
    start_fork_server()
    tally = Tally()
    for number in range(schedules):
        root = folder / str(number)
        root.mkdir()
        one = Schedule(root, seed * 100_000 + number, **how)
        one.play(length)
        tally.schedules += 1
        tally.kills += one.kills
        tally.restored += one.restored
        tally.codecs |= one.codecs
        tally.bad += [f"schedule {number}: {line}" for line in one.bad]
        wrong = "".join(f"; WRONG: {line}" for line in one.bad)
        tell(f"schedule {number}: {one.kills} kills, {one.restored} restored{wrong}")
    return tally


def main() -> int:
    """Play it and print the numbers."""
    parser = argparse.ArgumentParser(description="Random schedules of whatever adds and removes snapshots, with kills.")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say = lambda line: print(line, flush=True)  # noqa: E731
        tally = campaign(Path(folder), options.schedules, options.seed, options.length, say)
    print(
        f"{tally.schedules} schedules, {tally.kills} kills, {tally.restored} restored bit for bit, codecs "
        f"{', '.join(sorted(tally.codecs))}: {len(tally.bad)} not as promised"
    )
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
