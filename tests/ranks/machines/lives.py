"""Lives of a run on two machines with two ranks each: what may fail in them, and what must hold after each."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, free_port, writers_of
from tests.ranks.machines.netns import LINK, NodeLauncher, Nodes
from tests.ranks.machines.train import Expected, said

MACHINES = 2
PER_MACHINE = 2
SIZE = MACHINES * PER_MACHINE
SERVER = MACHINES
"""The machine with the server, where there is one."""
OUTAGES = {"server": (0.2, 12.0), "path": (0.2, 12.0), "long": (40.0, 50.0)}
"""How long the server is away, in seconds; a long time is more than a lease is good for."""


@contextmanager
def machines(count: int) -> Iterator[Nodes]:
    """So many; the test is skipped where they cannot be made."""
    try:
        with Nodes(count) as made:
            yield made
    except PermissionError as err:
        pytest.skip(str(err))


@contextmanager
def launching(module: str, nodes: Nodes) -> Iterator[Cluster]:
    """The first machines, with ranks that run a module."""
    made = [NodeLauncher(module, nodes, node) for node in range(MACHINES)]
    try:
        yield Cluster(nodes, made)
    finally:
        for one in made:
            one.close()


class Cluster:
    """Machines, and who starts the ranks on each."""

    def __init__(self, nodes: Nodes, launchers: Sequence[NodeLauncher]) -> None:
        self.nodes = nodes
        self.launchers = launchers
        self.pids: list[list[int]] = []

    def start(self, job: dict[str, Any], log: Path, *, lead: int = 0, per_machine: int = PER_MACHINE) -> None:
        """Start the ranks of all machines, the first ones on `lead`."""
        port = str(free_port())
        environment = {
            "MASTER_ADDR": self.nodes.address(lead),
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": port,
            "GLOO_SOCKET_IFNAME": LINK,
        }
        self.pids = [
            one.start(
                job,
                per_machine,
                log.with_suffix(f".{node}"),
                first=((node - lead) % len(self.launchers)) * per_machine,
                world=len(self.launchers) * per_machine,
                environment=environment,
            )
            for node, one in enumerate(self.launchers)
        ]

    def join(self) -> list[int]:
        """The exit statuses of all ranks, which end by themselves: only on its own machine one takes others along."""
        began = time.monotonic()
        statuses = [status for one in self.launchers for status in one.join()]
        assert time.monotonic() - began < PATIENCE_SECONDS, "a rank hangs"
        return statuses

    def writers(self) -> list[list[int]]:
        """By machine."""
        return [writers_of(pids) for pids in self.pids]


@dataclass(frozen=True)
class Place:
    """Where a run is saved.

    Args:
        url: of it, for this process and for the ranks.
        storage_options: for both.
        waits: the ranks wait for each snapshot.
        pace: seconds of a step beyond that.
    """

    url: str
    storage_options: Mapping[str, Any] | None = None
    waits: bool = True
    pace: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Of the checkpointers."""
        tier: dict[str, Any] = {"url": self.url}
        if self.storage_options is not None:
            tier["storage_options"] = dict(self.storage_options)
        return {"tiers": [tier], "keep": {"last": 3}, "on_error": "warn"}

    def require_sound(self, wanted: Expected) -> int:
        """Every snapshot that is listed can be loaded, and has the weights of its step; how many there are.

        Writers of dead trainers may still be at work: what retention has removed meanwhile is not asked for.
        """
        found = 0
        with Checkpointer(self.options) as alone:
            for info in alone.snapshots():
                try:
                    state = alone.load(step=info.step)
                except CkptError:
                    assert info.id not in {one.id for one in alone.snapshots()}
                    continue
                assert state is not None
                assert said(state["model"]["weights"]) == wanted[info.step], f"{info.id} has other weights"
                found += 1
        return found

    def require_tidy(self) -> None:
        """No data that no snapshot needs."""
        storage = open_storage(self.url, self.storage_options or {})
        repository = Repository(storage)
        needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
        there = {item.name for item in storage.list("data/")}
        assert {name for name in there if not name.removeprefix("data/").startswith(".")} == needed


class Life:
    """One start of all ranks."""

    def __init__(self, cluster: Cluster, place: Place, folder: Path, number: int, steps: int, lead: int) -> None:
        self._cluster = cluster
        self._trace = folder / f"trace{number}"
        self._log = folder / "log"
        self._lead = lead
        job = {
            "options": place.options,
            "trace": str(self._trace),
            "steps": steps,
            "waits": place.waits,
            "pace": place.pace,
            "wait_seconds": 8.0,
        }
        cluster.start(job, self._log, lead=lead)

    def lines(self, rank: int) -> list[list[str]]:
        path = Path(f"{self._trace}.{rank}")
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def count(self, word: str) -> int:
        """Lines of rank 0 that begin so."""
        return sum(line[0] == word for line in self.lines(0))

    def wait(self, durable: int) -> None:
        """Until so many snapshots are durable."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.count("durable") < durable:
            assert time.monotonic() < deadline, f"{durable} snapshots do not become durable: {self.text()}"
            time.sleep(0.005)

    def fail(self, kind: str, draw: random.Random) -> Callable[[], None]:
        """Let something happen that ends this life; returns what undoes it afterwards."""
        cluster = self._cluster
        node = draw.randrange(MACHINES)
        if kind == "link":
            cluster.nodes.cut(node)
            return lambda: cluster.nodes.mend(node)
        if kind in OUTAGES:
            self._outage(kind, node, draw)
            kind = "rank"
        writers = cluster.writers()
        if kind in ("node", "moved"):
            cluster.launchers[node if kind == "node" else self._lead].lose()
            return lambda: None
        doomed = {
            "rank": [draw.choice(cluster.pids[node])],
            "writer": writers[node][:1],
            "writers": [pid for of_node in writers for pid in of_node],
            "all": [pid for of_node in cluster.pids + writers for pid in of_node],
        }[kind]
        kill(doomed)
        if kind in ("writer", "writers"):  # its trainer starts another one, and goes on
            time.sleep(draw.uniform(0.0, 1.0))
            kill([draw.choice(cluster.pids[node])])
        return lambda: None

    def _outage(self, kind: str, node: int, draw: random.Random) -> None:
        """The server is away for a while, for all or for one machine; training goes on, and snapshots do later."""
        nodes = self._cluster.nodes
        begun, seconds = self.count("step"), draw.uniform(*OUTAGES[kind])
        if kind != "path":
            nodes.cut(SERVER)
        else:
            nodes.part(node, SERVER)
        try:
            time.sleep(seconds)  # as long as it is away
            assert self.count("step") > begun + 1, f"training stands still while the server is away: {self.text()}"
        finally:
            if kind != "path":
                nodes.mend(SERVER)
            else:
                nodes.join(node, SERVER)
        self.wait(self.count("durable") + 2)
        time.sleep(draw.uniform(0.0, 0.5))

    def end(self) -> list[int]:
        try:
            return self._cluster.join()
        except AssertionError as err:
            raise AssertionError(f"{err}: {self.text()}") from None

    def text(self) -> str:
        return "".join(path.read_text()[-2000:] for path in sorted(self._log.parent.glob("log.*")))


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(cluster: Cluster, place: Place, folder: Path, kinds: list[str], seed: int) -> None:
    """One life per kind of failure, and one that ends by itself."""
    draw = random.Random(seed)
    durable = lead = 0
    wanted = Expected(SIZE)
    for number, kind in enumerate([*kinds, ""]):
        began = time.monotonic()
        life = Life(cluster, place, folder, number, 100_000 if kind else 3, lead)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        try:
            if kind:
                life.wait(draw.randint(1, 8))
                time.sleep(draw.uniform(0.0, 0.05))  # a random moment
                undo = life.fail(kind, draw)
            statuses = life.end()
        finally:
            undo()
        if kind == "moved":
            lead = (lead + 1) % MACHINES
        if not kind:
            assert statuses == [0] * SIZE, life.text()
        starts = set()
        for rank in range(SIZE):
            for line in life.lines(rank):
                if line[0] in ("resumed", "step"):
                    assert line[2] == wanted[int(line[1])], f"{kind}: rank {rank} has other weights: {line}"
                if line[0] == "resumed":
                    starts.add(int(line[1]))
        assert len(starts) == 1, f"{kind}: the ranks resumed at different steps: {starts}"
        assert starts.pop() >= durable, f"{kind}: what was durable is gone: {life.text()}"
        durable = max([durable, *(int(line[1]) for line in life.lines(0) if line[0] == "durable")])
        listed = place.require_sound(wanted)
        seconds = time.monotonic() - began
        print(f"seed {seed} life {number} {kind or 'ends'}: durable {durable}, listed {listed}, {seconds:.1f} s")
    place.require_tidy()
