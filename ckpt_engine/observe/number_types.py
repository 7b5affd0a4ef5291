"""Numbers of records that anybody may have written, as types with a range: msgspec refuses what is outside."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 1 << 60
"""No count of bytes or elements is larger."""
LATEST_SECONDS = 253_000_000_000
"""The year 9987: later times are no dates."""

Size = Annotated[int, Meta(ge=0, le=MOST)]
"""A count, or an index."""
Positive = Annotated[int, Meta(ge=1, le=MOST)]
"""A count of things of which there is one at least."""
OptionalSize = Annotated[int, Meta(ge=-1, le=MOST)]
"""The same, where -1 means that it is not known."""
Seconds = Annotated[float, Meta(ge=0, le=LATEST_SECONDS)]
"""A duration, or a time since 1970."""
SignedSeconds = Annotated[float, Meta(ge=-LATEST_SECONDS, le=LATEST_SECONDS)]
"""A difference of two durations."""
