"""What one run of the campaign does: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NETWORK = ("reset", "stall", "throttling", "5xx", "truncated", "wrong_bytes", "server_killed")
DISK = ("enospc", "eio", "read_only", "slow_disk", "power_loss")
FAULTS = (*NETWORK, *DISK)
PHASES = ("save", "replicate", "prune", "restore")

ACTIONS = {
    "reset": ("refuse", "midbody", "lost", "cut"),
    "stall": ("stall", "block"),
    "throttling": ("503",),
    "5xx": ("500",),
    "truncated": ("truncate",),
    "wrong_bytes": ("corrupt", "spoil"),
    "server_killed": ("kill",),
}
"""What the wire does for each fault of the network (see `tests.servers.wire`)."""

ENDINGS = ("close", "kill_trainer", "kill_both")
"""How a training ends once its fault is over."""

SMALL_BYTES = 200_000
BIG_BYTES = 6 << 20
"""More than one part of an upload."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One run.

    Args:
        number: of the run in its campaign.
        seed: of everything random in it.
        fault: one of `FAULTS`.
        phase: what is under way when it strikes.
        action: which of the ways in which that fault happens on a network; for a disk the same as `fault`.
        tiers: of the run, nearest first: "a" and "b" are folders, "s3" a prefix of a bucket.
        target: the tier that is hit.
        after: operations of the kind in question that still work after the fault was armed.
        times: operations that it hits; None: all until it ends.
        seconds: how long it lasts after its first strike.
        state_bytes: size of what is saved, roughly.
        ending: how the training ends after the fault.
        near_lost: the folder of the nearest tier is gone when the next training begins (only where the restore is hit).
    """

    number: int
    seed: int
    fault: str
    phase: str
    action: str
    tiers: tuple[str, ...]
    target: str
    after: int
    times: int | None
    seconds: float
    state_bytes: int
    ending: str
    near_lost: bool

    @property
    def on_network(self) -> bool:
        """Whether the fault is one of the network and not of a disk."""
        return self.fault in NETWORK

    @property
    def name(self) -> str:
        """For people, with what is needed to run it again."""
        return f"run {self.number} (seed {self.seed}): {self.fault}/{self.action} during {self.phase} of {self.target}"


def draws(runs: int, seed: int, *, faults: Sequence[str] = FAULTS, phases: Sequence[str] = PHASES) -> list[Draw]:
    """`runs` runs, each combination of a fault and a phase equally often, in a random order."""
    cells = [(fault, phase) for fault in faults for phase in phases]
    order = random.Random(f"order-{seed}")
    order.shuffle(cells)
    return [draw(number, seed, *cells[number % len(cells)]) for number in range(runs)]


def draw(number: int, seed: int, fault: str, phase: str) -> Draw:
    """One run; the same for the same arguments."""
    rng = random.Random(f"{seed}-{number}-{fault}-{phase}")
    on_network = fault in NETWORK
    action = rng.choice(_actions(fault, phase)) if on_network else fault
    tiers, target = _tiers(rng, fault, phase, on_network)
    lasting = fault in ("slow_disk", "read_only", "enospc") or rng.random() < 0.5
    near_lost = phase == "restore" and on_network and rng.random() < 0.5
    most = _MOMENTS[phase] if fault != "power_loss" else 60
    if phase == "restore" and on_network and not near_lost:
        most = 2  # the nearest tier serves; the further one is only asked what it has
    return Draw(
        number=number,
        seed=rng.getrandbits(32),
        fault=fault,
        phase=phase,
        action=action,
        tiers=tiers,
        target=target,
        after=rng.randrange(most),
        times=None if lasting else rng.randint(1, 5),
        seconds=rng.choice([0.3, 1.0, 5.0]),
        # Thousands of states would be built of a big one.
        state_bytes=SMALL_BYTES if fault == "power_loss" or rng.random() < 0.6 else BIG_BYTES,
        ending=rng.choice(ENDINGS),
        near_lost=near_lost,
    )


_NEED_A_BODY = ("midbody", "spoil")
"""Nothing happens to requests that have none: those that read or remove."""


def _actions(fault: str, phase: str) -> list[str]:
    bodies = phase in ("save", "replicate")
    return [action for action in ACTIONS[fault] if bodies or action not in _NEED_A_BODY]


_MOMENTS = {"save": 12, "replicate": 8, "prune": 4, "restore": 6}
"""How many operations at most still work: more than one snapshot has in a phase."""


def _tiers(rng: random.Random, fault: str, phase: str, on_network: bool) -> tuple[tuple[str, ...], str]:
    if on_network:
        if phase == "save":
            return rng.choice([("s3",), ("s3", "b")]), "s3"
        return ("a", "s3"), "s3"
    if phase == "replicate":
        # Either the place that is copied to fails, or the one that is copied from.
        return rng.choice([(("a", "b"), "b"), (("a", "s3"), "a")])
    return rng.choice([("a", "s3"), ("a", "b"), ("a",)]), "a"
