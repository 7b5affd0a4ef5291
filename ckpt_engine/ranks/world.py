"""What the engine has to know of the other ranks: how many there are, what is the same on all, and where to meet."""

from __future__ import annotations

from typing import Any, Protocol


class Store(Protocol):
    """Small texts by key that all ranks see. Every call is short; nothing here is a collective. Thread safe."""

    def set(self, key: str, value: str) -> None:
        """Write, or write anew.

        Raises:
            RanksError: the store is gone.
        """
        ...

    def get(self, key: str) -> str | None:
        """What is there now, or None. Raises as `set`."""
        ...

    def wait(self, key: str, timeout: float) -> str:
        """What is there, waiting at most `timeout` seconds for it.

        Raises:
            WaitTimeoutError: nobody has written it.
            RanksError: as `set`.
        """
        ...

    def add(self, key: str) -> int:
        """Count up by one, from 0; what it is now. `get` gives it as text. Raises as `set`."""
        ...

    def remove(self, key: str) -> None:
        """Let go of a key. Raises as `set`."""
        ...


class Ranks(Protocol):
    """One of several processes that train together, each with its own `Checkpointer` for the same place.

    Every rank makes its checkpointers, and calls their `start`, `prepare`, `load`, `choose` and durable `save`, in the
    same order.

    Attributes:
        rank, size: of `size` ranks, from 0; rank 0 is the coordinator.
        own: components of the state that differ between ranks: each rank saves its own and gets it back.
        store: where they meet.
        wait_seconds: how long the coordinator waits for the part of a rank.
        node: name of this rank's machine.
        address: where other machines reach this one.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def own(self) -> frozenset[str]: ...

    @property
    def store(self) -> Store: ...

    @property
    def wait_seconds(self) -> float: ...

    @property
    def node(self) -> str: ...

    @property
    def address(self) -> str: ...

    def divides(self, path: tuple[Any, ...]) -> bool:
        """Whether the array at `path` is bit for bit the same on all ranks; if not, that of rank 0 counts."""
        ...
