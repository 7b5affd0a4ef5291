"""One run of the campaign: train, let something fail, end, look, and go on."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.store import names
from tests.crash.powerloss import build, crash_states
from tests.faults.disk import CHANGES, GROWS, READS, Control, DiskPlan, adopt, log_of, read_operations
from tests.faults.draws import Draw
from tests.faults.life import Heard, Life
from tests.faults.trainer import Order
from tests.faults.verdict import Ledger, Place, plain
from tests.servers.s3 import Killable
from tests.servers.wire import Wire

CALM_SECONDS = 240.0
STRIKE_SECONDS = 10.0
"""How long a fault may take to find something to strike."""
RECOVERY_SECONDS = 180.0
TIMEOUT_SECONDS, RETRY_SECONDS = 1.5, 3.0
"""Of the object store: a part of what is the default, and not too short for a busy machine."""
STATES = 40
"""Of those that a power loss may leave, how many one is drawn from."""
KEEP = 2
STEPS_SKIPPED = 5
"""At the start of a training, while everything is cold."""

FOREIGN = {"data/notes.txt": b"mine", "snapshots/list.json": b"{}"}

_NETWORK_REQUESTS = {
    "save": ("PUT|POST", ".*"),
    "replicate": ("PUT|POST", "/(data|snapshots)/"),
    "prune": ("DELETE", ".*"),
    "restore": ("GET|HEAD", ".*"),
}
_DISK_OPERATIONS = {"read_only": CHANGES, "enospc": GROWS, "slow_disk": frozenset({"write", "sync"})}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown.

    Args:
        struck: how many operations the fault has hit.
        bad, lost: what must not be, in words.
        median_seconds: of a training step.
        worst_ratio: of the longest step to the median; whatever the reason.
        tier_ratio: the same, counting of what a step took longer only waits inside the checkpointer while the fault
            lasted.
        calm_ratio: the same while there was no fault.
        seconds: that the run took.
    """

    draw: Draw
    struck: int
    bad: tuple[str, ...]
    lost: tuple[str, ...]
    median_seconds: float
    worst_ratio: float
    tier_ratio: float
    calm_ratio: float
    seconds: float


class Site:
    """What runs share: a server behind a wire that trainings reach by `transport`, and a folder. One run at a time."""

    def __init__(self, server: Killable, wire: Wire, folder: Path, transport: str) -> None:
        self.server, self.wire, self.folder, self.transport = server, wire, folder, transport
        self.bucket = server.server.make_bucket("campaign")
        self.host = f"http://127.0.0.1:{wire.port}"


@contextmanager
def site(kind: str, folder: Path, transport: str) -> Iterator[Site]:
    """A server of this kind, and what is before it."""
    (folder / "server").mkdir()
    with Killable(kind, folder / "server") as server:
        host, _, port = server.server.url.removeprefix("http://").partition(":")
        with Wire(host, int(port)) as wire:
            yield Site(server, wire, folder, transport)


class Run:
    """One run; `play` does it. `sabotage`: see `DiskPlan`."""

    def __init__(self, draw: Draw, where: Site, sabotage: str = "") -> None:
        self.draw, self.site, self.sabotage = draw, where, sabotage
        self.rng = random.Random(draw.seed)
        self.folder = where.folder / f"run-{draw.number}"
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True)
        self.ledger = Ledger()
        self.rows: list[tuple[float, float, float, int]] = []
        self.faulty: list[tuple[float, float]] = []
        self.struck = 0
        self._lives = itertools.count()
        self._control: Control | None = None
        self.places = [self._place(name, direct=True) for name in draw.tiers]

    def play(self) -> Outcome:
        """Do it, and clean up."""
        began = time.monotonic()
        try:
            self._play()
        finally:
            self._mend()
            shutil.rmtree(self.folder)
        ratios = self._ratios()
        return Outcome(
            self.draw, self.struck, tuple(self.ledger.bad), tuple(self.ledger.lost), *ratios, time.monotonic() - began
        )

    def _play(self) -> None:
        draw = self.draw
        first = self._begin(self._plan())
        if not self._calm(first):
            return
        self._plant()
        if draw.phase == "restore":
            self._leave(first, self.rng.choice(["close", "kill_trainer", "kill_both"]))
            if draw.near_lost:
                shutil.rmtree(self.disk / draw.tiers[0])
                self.ledger.wiped(draw.tiers[0])
            elif draw.fault == "wrong_bytes" and self.rng.random() < 0.7:
                self._rot(draw.tiers[0])
            self._restore_under_fault()
        else:
            self._arm()
            self._suffer(first)
        if draw.fault == "power_loss":
            self._after_power_loss()
        self.ledger.inspect(self.places, when="after the fault", spare=self._spare)
        self._go_on()

    @property
    def _spare(self) -> int:
        # On a full disk what a new snapshot pushes out of the rules goes before it is written.
        return 1 if self.draw.fault == "enospc" else 0

    # The fault

    def _plan(self) -> DiskPlan:
        draw = self.draw
        fault = "" if draw.on_network else draw.fault
        operations = _DISK_OPERATIONS.get(draw.fault, CHANGES)
        after = draw.after
        if draw.phase == "restore" and draw.fault in ("eio", "slow_disk"):
            operations = READS
        elif draw.phase == "replicate" and draw.target == "a" and draw.fault in ("eio", "slow_disk"):
            operations = frozenset({"get_into"})
        elif draw.phase == "prune" and draw.fault in ("eio", "slow_disk", "power_loss"):
            operations = frozenset({"remove", "sync_folder"})
            after = after // 3
        elif draw.fault == "eio":
            operations = frozenset(self.rng.sample(sorted(CHANGES - {"remove"}), 2))
        folder = str(self.disk / draw.target)
        return DiskPlan(str(self.disk), folder, fault, operations, after, draw.times, sabotage=self.sabotage)

    def _arm(self) -> None:
        draw, wire = self.draw, self.site.wire
        if not draw.on_network:
            assert self._control is not None
            self._control.arm(on=True)
            return
        wire.log.clear()
        method, path = _NETWORK_REQUESTS[draw.phase]
        if draw.action in ("truncate", "corrupt"):
            method, path = ".*", ".*"  # what is sent has answers without a body
        action, times, then = draw.action, draw.times, None
        if draw.action == "cut":
            action, times, then = "refuse", 1, wire.cut
        elif draw.action == "kill":
            action, times, then = "refuse", 1, self.site.server.kill
        wire.rule(action, method, path, times=times, after=draw.after, then=then)

    def _strikes(self) -> int:
        if self.draw.on_network:
            return self.site.wire.struck
        return self._control.fired if self._control is not None else 0

    def _mend(self) -> None:
        self.struck = max(self.struck, self._strikes())
        self.site.wire.clear()
        self.site.wire.mend()
        self.site.server.start()
        if self._control is not None:
            self._control.arm(on=False)

    def _wait_for_strike(self, life: Life) -> None:
        """Until the fault has struck, then as long as it lasts; training goes on."""
        life.look_around()
        began = time.monotonic()
        ready: float | None = None
        while not self._strikes() and not life.ended and time.monotonic() < began + CALM_SECONDS:
            # A training that has just begun needs a while to come to its storage.
            if ready is None and life.until(lambda one: one.kind in ("started", "refused", "broken"), 0.0):
                ready = time.monotonic()
            if ready is not None and time.monotonic() > ready + STRIKE_SECONDS:
                break
            life.listen_for(0.05)
        if self.draw.fault == "power_loss" and self._strikes():
            life.until(lambda one: False, RECOVERY_SECONDS)
        else:
            life.listen_for(self.draw.seconds)
        self.faulty.append((began, time.monotonic()))

    # The trainings

    def _begin(self, plan: DiskPlan) -> Life:
        control = self.folder / "control"
        control.mkdir(exist_ok=True)
        plan.write(control)
        self._control = Control(control)
        return Life(Order(self._tiers(), {"last": KEEP}, self.draw.state_bytes, control))

    def _calm(self, life: Life) -> bool:
        """Wait until every tier has a snapshot."""
        if self._everywhere(life, 0, CALM_SECONDS):
            return True
        self._enter(life)
        life.end(kill=True, writer=True)
        self.ledger.bad.append(f"without any fault, not every tier had a snapshot in time: {_last(life)}")
        return False

    def _everywhere(self, life: Life, since: int, seconds: float) -> bool:
        """Whether a snapshot that was begun after `since` words reaches every tier in time."""
        deadline = time.monotonic() + seconds
        saving = life.until(lambda one: one.kind == "saving", seconds, since=since)
        if saving is None:
            return False

        def is_there(one: Heard, place: Place) -> bool:
            known = one.is_event("snapshot_committed") or one.is_event("snapshot_replicated")
            return known and one.row["step"] >= saving.row["step"] and place is self._place_of(one.row["tier"])

        return all(
            life.until(lambda one, place=place: is_there(one, place), deadline - time.monotonic(), since=since)
            for place in self.places
        )

    def _suffer(self, life: Life) -> None:
        self._wait_for_strike(life)
        if self.draw.fault == "power_loss":
            self._leave(life, "kill_both")
        elif self.draw.ending == "close":
            self._mend()
            if not self._everywhere(life, len(life.heard), RECOVERY_SECONDS):
                self.ledger.bad.append(f"after the fault, not every tier got a snapshot again: {_last(life)}")
            self._leave(life, "close")
        else:
            self._leave(life, self.draw.ending)
        self._mend()

    def _leave(self, life: Life, how: str) -> None:
        """End a training."""
        if how == "close":
            life.stop()
            closed = life.until(lambda one: one.kind in ("closed", "broken", "refused"), RECOVERY_SECONDS)
            if closed is None or closed.kind != "closed":
                self.ledger.bad.append(f"closing did not end well: {_last(life)}")
        elif how == "kill_trainer" and self.draw.phase != "restore":
            life.kill()
            self._mend()
        if not life.end(kill=True, writer=how == "kill_both"):
            self.ledger.bad.append("a process did not end")
        self._enter(life)

    def _restore_under_fault(self) -> None:
        before = self.ledger.newest()
        life = self._begin(self._plan())
        self._arm()
        life.until(lambda one: one.kind in ("started", "refused", "broken"), 0.3)
        self._wait_for_strike(life)
        began: Heard | None = None
        if self.draw.fault != "power_loss":
            self._mend()
            began = life.until(lambda one: one.kind in ("started", "refused", "broken"), CALM_SECONDS)
            if began is None:
                self.ledger.bad.append(f"a training neither started nor refused to: {_last(life)}")
            elif began.kind == "started" and not self._everywhere(life, len(life.heard), RECOVERY_SECONDS):
                self.ledger.bad.append(f"after the fault, not every tier got a snapshot again: {_last(life)}")
        loaded = life.until(lambda one: one.kind == "loaded", 0.0)
        if loaded is not None:
            # An older one may do while the newest does not answer; that is said in the report.
            self.ledger.loaded(loaded.row, at_least=0)
        if before and any(one.kind == "fresh" for one in life.heard):
            self.ledger.lost.append("a training began from scratch although there were snapshots")
        well = began is not None and began.kind == "started" and not life.ended
        self._leave(life, "close" if well else "kill_both")
        self._mend()

    def _go_on(self) -> None:
        """The next training, without any fault."""
        newest = self.ledger.newest()
        life = self._begin(DiskPlan(str(self.disk), str(self.disk), "", frozenset(), 0, None))
        began = life.until(lambda one: one.kind in ("started", "refused", "broken"), CALM_SECONDS)
        if began is None or began.kind != "started":
            self.ledger.bad.append(f"the next training did not start: {_last(life)}")
        elif not self._everywhere(life, len(life.heard), RECOVERY_SECONDS):
            self.ledger.bad.append(f"the next training could not save: {_last(life)}")
        loaded = life.until(lambda one: one.kind == "loaded", 0.0)
        if loaded is not None:
            self.ledger.loaded(loaded.row, at_least=newest)
        elif newest:
            self.ledger.lost.append("the next training did not resume")
        self._leave(life, "close" if began is not None and began.kind == "started" else "kill_both")
        self.ledger.inspect(self.places, when="after the next training", spare=self._spare)
        self._check_foreign()

    # The disk

    def _after_power_loss(self) -> None:
        """What is left of the disk: one of the states that the operations up to here allow."""
        assert self._control is not None
        operations = read_operations(log_of(self.folder / "control"))
        states = list(itertools.islice(crash_states(operations, len(operations), self.draw.seed), STATES))
        shutil.rmtree(self.disk)
        self.disk.mkdir()
        build(self.rng.choice(states), self.disk)

    def _plant(self) -> None:
        """Files of somebody else beside ours."""
        for number, ((name, data), tier) in enumerate(itertools.product(FOREIGN.items(), self.draw.tiers)):
            place = next(one for one in self.places if one.name == tier)
            if tier == "s3":
                place.storage.put(name, [memoryview(data)])
                continue
            path = self.disk / tier / name
            path.write_bytes(data)
            if self.draw.fault == "power_loss":
                adopt(log_of(self.folder / "control"), self.disk, number, path, data)

    def _check_foreign(self) -> None:
        lost = {self.draw.tiers[0]} if self.draw.near_lost else set()
        for place in self.places:
            for name, data in FOREIGN.items() if place.name not in lost else ():
                if place.name == "s3":
                    found = place.storage.get(name)
                else:
                    path = self.disk / place.name / name
                    found = path.read_bytes() if path.exists() else b""
                if found != data:
                    self.ledger.bad.append(f"{name} of somebody else at {place.name} is {found!r}")

    def _rot(self, tier: str) -> None:
        """Flip a bit of the newest snapshot's tensors."""
        place = self.places[0]
        repository = place.repository()
        info = repository.list()[-1]
        entry = self.rng.choice([one for one in repository.read(info.id).entries.values() if one.pieces])
        piece = entry.pieces[0]
        path = self.disk / tier / names.data_name(info.id)
        with path.open("r+b") as file:
            file.seek(piece.offset + self.rng.randrange(piece.nbytes))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        self.ledger.spoiled.add((tier, info.id))

    # Numbers and names

    def _tiers(self) -> list[dict[str, Any]]:
        return [self._tier(self._place(name, direct=False)) for name in self.draw.tiers]

    def _tier(self, place: Place) -> dict[str, Any]:
        options = {"storage_options": dict(place.options)} if place.options else {}
        return {"url": place.url, "keep": {"last": place.keep}, **options}

    def _place(self, name: str, *, direct: bool) -> Place:
        if name != "s3":
            return Place(name, str(self.disk / name), {}, KEEP)
        more = {} if direct else {"retry_seconds": RETRY_SECONDS, "timeout_seconds": TIMEOUT_SECONDS}
        options = self.site.server.server.options(None if direct else self.site.wire.url, part_bytes=5 << 20, **more)
        if not direct and self.site.transport == "obstore":  # what is judged is read by the other one
            del options["config_kwargs"]
            options |= {"transport": "obstore", "verify": "never"}
        return Place(name, f"s3://{self.site.bucket}/run-{self.draw.number}", options, KEEP)

    def _place_of(self, url: str) -> Place | None:
        return next((one for one in self.places if plain(one.url) == plain(url)), None)

    def _enter(self, life: Life) -> None:
        self.ledger.take(life.heard, self.places)
        rows = [row for one in life.heard if one.kind == "steps" for row in one.row["rows"]]
        self.rows += rows[STEPS_SKIPPED:]

    def _ratios(self) -> tuple[float, float, float, float]:
        if not self.rows:
            return 0.0, 0.0, 0.0, 0.0
        median = statistics.median(seconds for _, seconds, _, _ in self.rows)
        # Time inside the checkpointer in which it never gave up the processor by itself is no wait for anything.
        waited = [(began, inside if waits else 0.0) for began, _, inside, waits in self.rows]
        hit = [inside for began, inside in waited if any(a <= began <= b for a, b in self.faulty)]
        calm = [inside for began, inside in waited if not any(a <= began <= b for a, b in self.faulty)]
        worst = max(seconds for _, seconds, _, _ in self.rows) / median
        return median, worst, 1 + max(hit, default=0.0) / median, 1 + max(calm, default=0.0) / median


def _last(life: Life) -> str:
    """The end of what a training has said, without the steps."""
    return "; ".join(f"{one.kind} {_short(one.row)}" for one in life.heard if one.kind not in ("steps", "saving"))[
        -1500:
    ]


def _short(row: Mapping[str, Any]) -> str:
    keys = ("event", "step", "snapshot", "tier", "code", "message", "text")
    return " ".join(str(row[key]) for key in keys if row.get(key) is not None)
