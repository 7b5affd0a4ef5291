"""What a tracker asks of the engine that takes and restores its snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ckpt_engine.config import Config
from ckpt_engine.config.live import LiveFile
from ckpt_engine.observe.events import EventSink
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.choose import Candidate, Check
from ckpt_engine.restore.load import Live, Loaded
from ckpt_engine.snapshot.ownership import Tenure
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.store.manifest import SnapshotInfo

T = TypeVar("T")
U = TypeVar("U")


class Ending(Protocol):
    """What the end of a run has to know of what stops it."""

    @property
    def stops(self) -> bool:
        """Whether the run was told to stop: what is late then is only said."""
        ...

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for."""
        ...

    @property
    def hurries(self) -> bool:
        """Whether a wait that can be done without ends now."""
        ...

    def leave(self) -> None:
        """The run is closed: of several ranks this one has nothing more to do."""
        ...


class NobodyStops:
    """The ending of a run that nobody watches."""

    stops = hurries = False

    def seconds_left(self, at_most: float) -> float:
        return at_most

    def leave(self) -> None:
        """There is nobody to tell."""


class Engine(Protocol):
    """The part of `ckpt_engine.Checkpointer` that a tracker uses."""

    config: Config
    live: LiveFile | None
    events: EventSink
    loaded: Loaded | None
    ending: Ending
    tenure: Tenure

    @property
    def root_url(self) -> str: ...

    @property
    def prepare_seconds(self) -> float: ...

    @property
    def memory(self) -> bool: ...

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def divided(self) -> bool: ...

    @property
    def count(self) -> int: ...

    def miss(self, step: int, why: str, *, durable: bool = True) -> None: ...

    def agree(self, make: Callable[[], T]) -> T: ...

    def meet(self, make: Callable[[], T], combine: Callable[[list[T | None]], U]) -> U: ...

    def begin_step(self, step: int) -> None: ...

    def start(self, *, resumes: bool = False) -> None: ...

    def start_fresh(self, how: str) -> None: ...

    def prepare(self, state: Any, *, lazy: LazyPredicate | None = None, share: float | None = None) -> None: ...

    def ready(self, *, durable: bool = True) -> bool: ...

    def save(
        self,
        state: Any,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        epoch: int | None = None,
        reason: str = "manual",
        lazy: LazyPredicate | None = None,
        notes: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> SaveHandle: ...

    def before_update(self) -> float: ...

    def poll(self) -> None: ...

    def choose(self, step: int | None = None, *, check: Check | None = None) -> Candidate | None: ...

    def load(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        live: Live | None = None,
        check: Check | None = None,
        back: bool = False,
    ) -> Any | None: ...

    def snapshots(self, *, nearest: bool = False) -> list[SnapshotInfo]: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    @property
    def snapshot_bytes(self) -> int: ...

    def close(self) -> None: ...
