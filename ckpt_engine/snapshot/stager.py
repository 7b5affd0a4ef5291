"""Copies the states of one run into slots of the arena, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.state.layout import CapturedState, Planner


@dataclass(eq=False)
class Stager:
    """What captures a state and the copy that is under way, of which training must not change the sources.

    Training thread only.

    Args:
        planner: of the states.
        is_eager: everything is copied before training continues; also where a lazy copy was torn, from then on.

    Attributes:
        copier: helps to copy.
        staging: the copy that devices make while training continues; None: there is none.
    """

    planner: Planner
    is_eager: bool
    copier: Copier = field(default_factory=Copier, init=False)
    staging: Staging | None = field(default=None, init=False)

    def capture(self, state: Any, lazy: LazyPredicate | None) -> CapturedState:
        """This instant of a state. `lazy`: which of its tensors are copied while training continues."""
        return self.planner.capture(state, None if self.is_eager else lazy)

    def fence(self) -> float:
        """Return when the weights may change; seconds waited."""
        staging = self.staging
        if staging is None:
            return 0.0
        try:
            waited = staging.fence()
        except Exception:
            self.staging = None
            raise  # after a Ctrl-C it is still there: the next update has to wait as well
        if staging.complete:  # else devices still copy: the next update may be queued in another stream
            self.staging = None
        return waited

    def finish(self, timeout: float) -> bool:
        """After the fence: wait until the copy is with the writer; False if it takes too long."""
        if self.staging is not None and not self.staging.wait(timeout):
            return False
        self.staging = None
        return True
