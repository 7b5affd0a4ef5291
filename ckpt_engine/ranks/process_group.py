"""The ranks of a torch process group: their store, and what they share."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from ckpt_engine.errors import ConfigError, RanksError, WaitTimeoutError
from ckpt_engine.ranks.world import towards

WAIT_SECONDS = 120.0
_SHORT_SECONDS = 30.0
_worlds = itertools.count()


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as err:  # DistNetworkError and DistStoreError are kinds of it
        raise RanksError(
            f"the store of the process group does not answer: {err}",
            hint="look at the end of rank 0's log: it may be gone",
        ) from err


class GroupStore:
    """The process group's store, under keys of our own and over connections of our own."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._short = _connected(store, prefix)
        self._short.set_timeout(timedelta(seconds=_SHORT_SECONDS))
        # A wait holds its connection: what must be quick has another one.
        self._long = _connected(store, prefix)

    @_answering()
    def set(self, key: str, value: str) -> None:
        self._short.set(key, value)

    @_answering()
    def get(self, key: str) -> str | None:
        return bytes(self._short.get(key)).decode() if self._short.check([key]) else None

    @_answering()
    def add(self, key: str) -> int:
        return int(self._short.add(key, 1))

    @_answering()
    def remove(self, key: str) -> None:
        self._short.delete_key(key)

    @_answering()
    def wait(self, key: str, timeout: float) -> str:
        try:
            self._long.wait([key], timedelta(seconds=timeout))
            return bytes(self._long.get(key)).decode()
        except dist.DistStoreError as err:
            raise WaitTimeoutError(
                f"rank 0 did not publish what all ranks wait for within {timeout:.0f} s",
                hint="every rank must make its checkpointers and call load and save in the same order",
            ) from err


def _connected(store: Any, prefix: str) -> PrefixStore:
    """The store once more, with a connection of its own."""
    if hasattr(store, "clone"):
        return PrefixStore(prefix, store.clone())
    # An old torch. Nothing says which prefixes the store has: what the ranks agree on through it stands in for them.
    chosen = bytes(store.compare_set(f"{prefix}/chosen", "", uuid.uuid4().hex)).decode()
    base = getattr(store, "_underlying_non_prefix_store", store)
    if hasattr(base, "port"):
        base = type(base)(base.host, base.port, is_master=False, wait_for_workers=False, timeout=base.timeout)
    elif hasattr(base, "path"):
        base = type(base)(base.path)
    return PrefixStore(f"{prefix}/{chosen}", base)


def _start() -> str:
    """Which start of these ranks it is: torchrun's static rendezvous keeps one store, with old keys, for all restarts.

    Only where one torchrun has all ranks: several of them count differently, and so would their ranks.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return ""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


class ProcessGroupRanks:
    """The default process group as `world.Ranks`. Every rank makes one for each checkpointer, in the same order.

    Args:
        own: components of the state that differ between ranks.
        divides: whether the array at a path is the same on all ranks; None: all are, or what a tracked loop says.
        wait_seconds: how long the coordinator's writer waits for the part of a rank.

    Raises:
        ConfigError: there is no process group.
    """

    def __init__(
        self,
        own: Collection[str] = (),
        divides: Callable[[tuple[Any, ...]], bool] | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("there is no process group", hint="call torch.distributed.init_process_group() first")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.own = frozenset(own)
        self.wait_seconds = wait_seconds
        self._divides = divides
        self.store = GroupStore(distributed_c10d._get_default_store(), f"ckpt_engine{_start()}/{next(_worlds)}")

    @property
    def node(self) -> str:
        return socket.gethostname()

    @property
    def address(self) -> str:
        """Of the interface through which this machine reaches the one of rank 0; else its name."""
        found = towards(os.environ.get("MASTER_ADDR", self.node))
        # On the machine of rank 0 its own name often means the loopback interface, which no other machine reaches.
        return self.node if found is None or found.startswith("127.") else found

    def divides(self, path: tuple[Any, ...]) -> bool:
        return self._divides is None or self._divides(path)

    def divide(self, alike: Callable[[tuple[Any, ...]], bool]) -> None:
        """Arrays at these paths are the same on all ranks, unless the user has said which are."""
        if self._divides is None:
            self._divides = alike
