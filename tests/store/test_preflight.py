"""What preflight says."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.store.retention_preflight import preflight
from ckpt_engine.store.retention_rules import policy_from

GB = 10**9


@pytest.mark.parametrize(
    ("keep", "used", "free", "text"),
    [
        ({"last": 6}, 0, 180, "this run needs 214 GB (6 snapshots of 36 GB), 180 GB are free: last: 5 fits"),
        ({"last": 6}, 20, 180, "this run needs 214 GB (6 snapshots of 36 GB), 200 GB are available: last: 5 fits"),
        ({"last": 6}, 40, 180, None),
        ({"last": 1}, 0, 80, None),
        ({"last": 2}, 0, 50, "not even two snapshots fit"),
        ({"last": 3, "hourly": 4}, 0, 180, "needs 250 GB (7 snapshots of 36 GB), 180 GB are free: last: 1"),
        ({"last": 3, "daily": 9}, 0, 180, "only 5 snapshots fit; keep fewer"),
        ({"every_n_steps": 9}, 0, 60, "needs at least 71 GB (2 snapshots of 36 GB), 60 GB are free: not even two"),
        ({"every_n_steps": 9}, 0, 180, None),
        ({"last": 3, "quota": 100 * GB}, 0, 900, "(3 snapshots of 36 GB), 100 GB are available: last: 2"),
        ({"last": 3, "min_free": 100 * GB}, 0, 180, "80 GB are free: last: 2 fits"),
        ({"last": 3}, 0, None, None),
    ],
)  # fmt: skip
def test_the_text_says_needs_room_and_what_would_fit(
    keep: dict[str, Any], used: int, free: int | None, text: str | None
) -> None:
    """Numbers people can act on, from the rules, the size of one snapshot, and the disk; nothing where all fits."""
    free_bytes = None if free is None else free * GB
    found = preflight(policy_from(keep), 35_700_000_000, used_bytes=used * GB, free_bytes=free_bytes)
    assert found is None if text is None else text in (found or "")
