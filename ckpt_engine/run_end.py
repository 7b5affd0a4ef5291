"""What the code that ends a run has to know."""

from __future__ import annotations

import math
import time


class Ending:
    """What the end of a run has to know of what stops it; here nothing does."""

    @property
    def stopped_by(self) -> str | None:
        """Who has asked the run to stop, if that is so."""
        return None

    @property
    def tells(self) -> bool:
        """Whether the end says what is late: as an error, or in the log if the run is to stop. Else others say it."""
        return True

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for."""
        return at_most

    def hurries(self, copies: bool) -> bool:  # noqa: ARG002
        """Whether a wait ends now; `copies`: one for what further tiers lack, which can be done without."""
        return False

    def leave(self) -> None:
        """The run is closed: of several ranks this one has nothing more to do."""

    def ended(self) -> None:
        """Everything is durable."""


class ClosingTime:
    """How long the end of a run may take.

    Attributes:
        has_begun: the run is being closed, or is closed.
        in_vain_seconds: the newest wait since a snapshot was taken took so long, and did not see the end of what is in
            flight.
    """

    def __init__(self) -> None:
        self.has_begun, self.in_vain_seconds, self._until = False, 0.0, math.inf

    def limit(self, seconds: float) -> None:
        """What comes from here on takes so long in all, less what was waited in vain."""
        self._until = time.monotonic() + seconds - self.in_vain_seconds

    @property
    def seconds_left(self) -> float:
        """Infinite where there is no limit yet."""
        return max(0.0, self._until - time.monotonic())
