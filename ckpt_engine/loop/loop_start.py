"""Where a loop without a loader begins: its random streams are put back there."""

from __future__ import annotations

from ckpt_engine.audit.carried import loops_around, loops_behind
from ckpt_engine.data import rng
from ckpt_engine.loop.shape import Ask, At, Home, does_anything


class LoopStart:
    """Where a loop without a loader goes on: as late as it can be seen, the random streams are put back there.

    What a script draws before, it draws in each of its processes. That a loop begins is seen by a read of the count of
    steps that no turn of a loop comes before. Training thread only.

    Args:
        home: as of `Ask`.

    Attributes:
        seen: such a read has come.
        over: an optimizer has made a step.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._outer = {(code, loop) for code, offset in Ask(frozenset()).at for loop in loops_around(code, offset)}
        self._places = set[At]()
        self.streams: rng.RngState | None = None
        """A resumed loop continues with these."""
        self.over = self.seen = False

    def read(self) -> bool:
        """The count of steps is read: whether a loop is about to begin. Cheap once there was a step."""
        if self.over:
            return False
        at = tuple(Ask(self._home).at)
        begins = at not in self._places and self._is_before_turns(at)
        self._places.add(at)
        self.seen = self.seen or begins
        if self.streams is not None and begins:
            rng.restore(self.streams)
        return begins

    def _is_before_turns(self, at: At) -> bool:
        """Whether no turn of a loop has begun, and one comes."""
        around = [(code, loop, offset) for code, offset in at for loop in loops_around(code, offset)]
        around = [one for one in around if one[:2] not in self._outer]
        if any(does_anything(code, loop.head, offset) for code, loop, offset in around):
            return False
        if around or any(loops_behind(code, offset) for code, offset in at):
            return True
        return at[0][0] in self._home and not any(loops_behind(code, -1) for code, _ in at)  # a function has the loop
