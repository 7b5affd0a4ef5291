"""Chains of deltas stay short, and shortening them never makes one snapshot many times as large as the others."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy.sharing_bounds import replaced
from ckpt_engine.copy.write_plan import PLAIN
from ckpt_engine.store.decode import MAX_CHAIN, chain_of
from tests.copy.test_writing import Life, Table

PIECE = 1 << 20


class Chains:
    """The chains of an entry over many snapshots that touch rows at random."""

    def __init__(self, pieces: int, share: float) -> None:
        self.share = share
        self.levels: dict[int, list[int]] = {number * PIECE: [] for number in range(pieces)}
        """Snapshots that each delta stands for, the newest first."""
        self.written: list[float] = []
        """By each snapshot, against what it has touched."""

    def sizes(self) -> dict[int, list[int]]:
        return {start: [*map(self._nbytes, levels), PIECE] for start, levels in self.levels.items()}

    def _nbytes(self, snapshots: int) -> int:
        return int(PIECE * (1 - (1 - self.share) ** snapshots))

    def touch(self) -> None:
        plan = replaced(self.sizes(), PLAIN)
        written = 0
        for start, levels in self.levels.items():
            count = plan.get(start, 0)
            if count > len(levels):
                self.levels[start] = []
                written += PIECE
            else:
                self.levels[start] = [sum(levels[:count]) + 1, *levels[count:]]
                written += self._nbytes(self.levels[start][0])
        self.written.append(written / (self.share * PIECE * len(self.levels)))

    @property
    def stored(self) -> float:
        """Bytes of all deltas, against those of the entry."""
        deltas = sum(sum(sizes[:-1]) for sizes in self.sizes().values())
        return deltas / (PIECE * len(self.levels))


@given(pieces=st.integers(1, 70), share=st.floats(0.002, 0.2), snapshots=st.integers(1, 90))
@settings(max_examples=30, deadline=None)
def test_chains_are_bounded_in_number_and_bytes(pieces: int, share: float, snapshots: int) -> None:
    """A law: no more bases than readers follow, and hardly more bytes than a restore may read besides the entry."""
    chains = Chains(pieces, share)
    for _ in range(snapshots):
        chains.touch()
        assert max(len(levels) for levels in chains.levels.values()) <= PLAIN.most_bases < MAX_CHAIN
        assert chains.stored <= PLAIN.most_share + 1.1 * share


@pytest.mark.parametrize("share", [0.002, 0.01, 0.05])
def test_what_is_written_stays_near_what_is_touched(share: float) -> None:
    """On average at most 3.5 times; with 1 % of the rows, each of the first 20 snapshots what it touches."""
    chains = Chains(64, share)
    for _ in range(300):
        chains.touch()
    assert mean(chains.written[1:]) <= 3.5
    if share == 0.01:
        assert max(chains.written[:20]) <= 1.01 and max(chains.written) <= 8


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 2 * PIECE), min_size=1, max_size=60)))
@settings(deadline=None)
def test_a_plan_names_what_there_is(chains: dict[int, list[int]]) -> None:
    """A law: whatever the sizes are, each count is of that chain, and a chain that is too long is shortened."""
    plan = replaced(chains, PLAIN)
    for start, count in plan.items():
        assert 1 <= count <= len(chains[start])
    for start, sizes in chains.items():
        left = len(sizes) - plan.get(start, 0)
        assert left <= PLAIN.most_bases + 1 or len(sizes) > 2 * PLAIN.most_bases


@pytest.mark.slow
def test_no_snapshot_of_a_table_of_many_pieces_is_many_times_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real files over sixty snapshots: bytes written, space, and every bit."""
    monkeypatch.setattr("ckpt_engine.copy.write_snapshot.cut.__defaults__", (100_000,))
    life, table = Life(tmp_path / "run", keep={"last": 2}, writer="thread"), Table(100_000)
    states, sizes = {}, []
    with Checkpointer(life.root, **life.options) as ckpt:
        for _ in range(60):
            last = table.touch()
            ckpt.save(last, step=last["step"]).wait(60)
            states[last["step"]] = last
            newest = life.repository.read(life.repository.ids()[-1].id)
            sizes.append(life.written(newest) / (table.nbytes / 100))
            pieces = newest.entries["table"].placed()
            chains = [chain_of(newest, "table", start, piece) for start, piece in pieces]
            assert max(map(len, chains)) <= PLAIN.most_bases + 1
    assert len(chains) > 60
    assert max(sizes[1:20]) <= 1.5 and max(sizes[1:]) <= 9 and mean(sizes[1:]) <= 3.5, sizes
    stored = sum(path.stat().st_size for path in (life.root / "data").iterdir())
    assert stored <= 3 * table.nbytes
    life.check(states)
