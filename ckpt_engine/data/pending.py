"""A loaded state that no batch was fetched under yet: trainers may ask for an iterator several times before they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ckpt_engine.data import adapting, streams
from ckpt_engine.data.dealing import Dealing
from ckpt_engine.data.exactness import Exactness

__all__ = ["Pending"]


class Pending:
    """What the next iterators of a loader start from until one of them is asked for a batch.

    Args:
        state: the loaded state.
        phase: "within" or "fresh": what it resumes into.
        rng: global streams to install at the last moment, or None.
    """

    def __init__(self, state: Mapping[str, Any], phase: str, rng: Mapping[str, Any] | None) -> None:
        self.state, self.phase = dict(state), phase
        self.rng = None if rng is None else dict(rng)
        self.begun = False
        self._before: streams.Counters = {}
        self._after: streams.Counters = {}
        self._generators: dict[str, Any] = {}
        self._samplers: dict[str, Any] = {}

    @property
    def batches(self) -> int:
        """Batches of the running epoch that are behind us."""
        return 0 if self.phase == "fresh" else int(self.state["batches"])

    @property
    def dealt(self) -> tuple[Dealing, int] | None:
        """See `LoaderPosition.dealt`."""
        found = self.state.get("order", {}).get("dealt") if self.phase == "within" else None
        return None if found is None else (Dealing.of_state(found["dealing"]), int(found["total"]))

    def install(self, loader: DataLoader[Any]) -> Exactness:
        """At load time: samplers of a fresh epoch get their counters now, so that a later `set_epoch` still counts.

        Returns:
            How exactly samplers that change with training are as they were.
        """
        if self.phase != "fresh":
            return Exactness()
        streams.restore_holders(loader, self.state)
        return adapting.compared(loader, self.state, between_epochs=True)

    def before_iterator(self, loader: DataLoader[Any]) -> None:
        """Take back what building an earlier iterator moved in the samplers, but nothing that the user set since."""
        if self.begun and self.phase == "fresh":
            now = streams.counters(loader)
            moved = {path: value for path, value in self._before.items() if now.get(path) == self._after.get(path)}
            streams.restore_holders(
                loader, {"counters": moved, "generators": self._generators, "samplers": self._samplers}
            )
        self._before = streams.counters(loader)
        self._generators = streams.capture_generators(loader)
        self._samplers = streams.capture_samplers(loader)

    def after_iterator(self, loader: DataLoader[Any]) -> None:
        """Remember what building the iterator made of the samplers."""
        self._after = streams.counters(loader)
        self.begun = True
