"""The life of a tracked loop, which may begin on its way to the place of a snapshot."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt_engine.loop import components
from ckpt_engine.loop.components import Components
from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.phases import ARRIVED, CLOSED, FRESH, RESTORING, TRAINING, LoopPhase


@dataclass(eq=False)
class LoopLife:
    """Where a loop is in its life, see `LoopPhase`.

    Attributes:
        phase: of the loop.
        resumed: the loader whose pass the snapshot was taken in, until that pass is over.
        batches: of that pass, which were trained before the resume.
        put_back: loaders that are at their saved place again, as nothing was trained on what they have given.
    """

    phase: LoopPhase = field(default=FRESH, init=False)
    resumed: Feed | None = field(default=None, init=False)
    batches: int = field(default=0, init=False)
    put_back: list[Feed] = field(default_factory=list, init=False)
    _gradient_hooks: ExitStack = field(default_factory=ExitStack, init=False)

    def resume(self, feed: Feed) -> None:
        """The loop is on its way to the place where it asked `feed` for a batch."""
        self.resumed, self.batches = feed, feed.delivered
        self.phase = self.phase.to(RESTORING)

    def continue_after(self, feed: Feed, batches: int) -> None:
        """The loop continues after so many batches of the epoch, which none of our snapshots has recorded."""
        self.resumed, self.batches = feed if batches else None, batches

    def awaits(self, feed: Feed) -> bool:
        """Whether a resumed loop has not asked for the first batch of this loader yet."""
        return self.phase is RESTORING and feed.resumed is not None

    def watch(self, parts: Components) -> None:
        """The saved pass begins. If it sees no gradient, it does not use up the saved position."""
        self.put_back.clear()
        self._gradient_hooks.close()
        components.watch_gradients(parts, self.begin_training, self._gradient_hooks)

    def forget_place(self) -> None:
        """The resumed pass is over, or its place does not count any more."""
        self.resumed = None
        if self.phase is RESTORING:
            self.phase = self.phase.to(FRESH)

    def arrive(self) -> None:
        """The loop is where it asked for the batch after the snapshot: from here on it does as it did then."""
        self.phase = self.phase.to(ARRIVED)
        self.settle()

    def begin_training(self) -> None:
        """Something was trained: nothing is put back any more."""
        # Hooks stay until `settle`: this may be one of autograd's own threads, which walks through them right now.
        if self.phase is FRESH or self.phase is RESTORING:
            self.phase = self.phase.to(ARRIVED)
        while self.put_back:
            self.put_back.pop().forget()  # batches of that pass were only kept for later

    def settle(self) -> None:
        """The run has begun to train again."""
        if self.phase is ARRIVED:
            self.phase = self.phase.to(TRAINING)
            self._gradient_hooks.close()

    def close(self) -> None:
        """The loop takes no snapshots any more."""
        self.phase = self.phase.to(CLOSED)
        self._gradient_hooks.close()
