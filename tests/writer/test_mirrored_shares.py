"""The writer of rank 0 counts which shares are kept on other machines."""

from __future__ import annotations

from typing import Any

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.writer.messages import Kind
from ckpt_engine.writer.mirrored_shares import MirroredShares
from ckpt_engine.writer.peer_link import PeerLink


def counted(size: int) -> tuple[MirroredShares, list[dict[str, Any]]]:
    said: list[dict[str, Any]] = []
    ranks = RankConfig(0, size, "session", None, 1.0, "node0", True)
    return MirroredShares(ranks, said.append, PeerLink("session", ("", 0))), said


def test_a_snapshot_counts_once_the_shares_of_all_ranks_are_kept() -> None:
    """In any order, and a rank that says it twice counts once."""
    shares, said = counted(3)
    shares.count("a", 2)
    shares.count("a", 2)
    shares.note("a")
    assert said == []
    shares.count("a", 1)
    assert said == [{"kind": Kind.MIRRORED, "snapshot": "a"}]


def test_what_is_never_kept_by_all_is_forgotten() -> None:
    """Else each snapshot that a rank has missed would stay in memory until the writer ends."""
    shares, said = counted(2)
    for number in range(17):
        shares.count(f"{number}", 1)
    shares.count("0", 0)
    assert said == []
    shares.count("16", 0)
    assert [one["snapshot"] for one in said] == ["16"]
