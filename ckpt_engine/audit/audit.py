"""The audit of one run: what its snapshots have beside the declared state, and what they cannot have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.audit.attributes import Frozen
from ckpt_engine.audit.carried import CarriedLocals, Carry, sentence
from ckpt_engine.audit.hidden import HiddenState, Mode, put_together, taken_apart
from ckpt_engine.observe.resume_report import NotRestored, Restored

Roots = Callable[[], Mapping[str, Any]]
_FIRST_LOOKS = 3


class Audit:
    """Looks at the objects that take part in training, and at the loop's local variables.

    Args:
        mode: the option `hidden`.
        roots: the objects, by the names that users know them by.
        log: of the adapter.
        skipped: attributes of the trainer's own classes.
        ahead: the first names of objects that are further than training.
    """

    def __init__(
        self,
        mode: Mode,
        roots: Roots,
        log: logging.Logger,
        skipped: Iterable[str] = (),
        ahead: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.roots, self.skipped = roots, frozenset(skipped)
        self._hidden = HiddenState(mode, self.skipped)
        self._ahead = ahead
        self._log = log
        self._locals = CarriedLocals()
        self._looks = 0
        self._carried: list[str] = []

    def begin(self, moment: str) -> None:
        """See `HiddenState.begin`."""
        if self._hidden.on:
            self._hidden.begin(moment, self.roots())

    def boundary(self, known: Collection[Any], *, taking: bool) -> None:
        """The loop is between two steps, and its frames are on this thread's stack.

        Args:
            known: values of counters that the loop takes from the tracker.
            taking: a snapshot is taken here. Variables are compared there, and at the first boundaries.
        """
        if not self._hidden.on or not (taking or self._looks < _FIRST_LOOKS):
            return
        self._looks += 1
        carries = [one for one in self.roots().values() if isinstance(one, Carry)]
        if new := self._locals.look(known, carries):
            self._log.warning("%s", sentence(new))

    def stepped(self) -> None:
        """See `HiddenState.stepped`."""
        if self._hidden.on:
            self._hidden.stepped()

    def frozen(self, *, quick: bool = False) -> dict[str, Frozen]:
        """The attributes that training has changed so far, as values that compare; see `HiddenState.frozen`."""
        return self._hidden.frozen(quick=quick) if self._hidden.on else {}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """For a snapshot: small plain values, and large ones by path. What no snapshot has is logged once."""
        rows = self._hidden.state(self._ahead()) if self._hidden.on else {}
        if new := self._hidden.unsaved(rows):
            self._log.warning("training changes state that no snapshot has: %s", "; ".join(new))
        small, large = taken_apart(rows)
        return {"attributes": small, "locals": self._locals.names}, large

    def expect(self, small: Mapping[str, Any], large: Mapping[str, Any]) -> None:
        """What `state` gave for the snapshot that this process resumes from."""
        if small and self._hidden.on:
            self._hidden.expect(put_together(small["attributes"], large))
            self._carried = list(small["locals"])

    def restore(self, moment: str) -> tuple[list[Restored], list[NotRestored]]:
        """See `HiddenState.restore`."""
        restored, missing = self._hidden.restore(moment)
        if self._carried:
            missing.append(NotRestored("local variables", sentence(self._carried)))
            self._carried = []
        return restored, missing


def roots_of_loader(name: str, loader: Any) -> dict[str, Any]:
    """What of a loader lives in this process and may count: positions and samplers are followed on their own."""
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, Any] = {f"{name}.collate_fn": loader.collate_fn, f"{name}.worker_init_fn": loader.worker_init_fn}
    if not isinstance(loader.dataset, IterableDataset):
        found[f"{name}.dataset"] = loader.dataset
    return {path: value for path, value in found.items() if value is not None}
