"""Several ranks that die together resume from the memory of their writers: the newest snapshot that all have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer import control
from ckpt_engine.writer.crash_recovery import follow
from tests.ranks.runs import SharedStore, on_all
from tests.ranks.train_plain import check, state_of
from tests.restore.memory_tier.lives import until
from tests.restore.memory_tier.rank_host import open_rank
from tests.support import interpreters
from tests.support.writers import writers_of

REPOSITORY = Path(__file__).parents[3]
MOST_LOST = 2


class Host:
    """A process with several ranks."""

    def __init__(
        self,
        root: Path,
        size: int,
        durable_every: int = 10**6,
        nodes: int = 1,
        replicate: int = 0,
        codec: str = "raw",
    ) -> None:
        numbers = map(str, (size, durable_every, nodes, replicate))
        command = [sys.executable, "-m", "tests.restore.memory_tier.rank_host", str(root), *numbers, codec]
        self.process = interpreters.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        self.resumed = self._line()

    def _line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def until_step(self, step: int) -> None:
        while int(self._line()[1]) < step:
            pass

    def kill(self) -> int:
        """The last step that it had begun."""
        self.process.kill()
        assert self.process.stdout is not None
        rest = [line.split() for line in self.process.stdout.read().splitlines()]
        self.process.wait(60)
        self.process.stdout.close()
        return int(rest[-1][1]) if rest else -1


def opened(root: Path, size: int, nodes: int = 1, replicate: int = 0) -> list[Checkpointer]:
    store = SharedStore()
    return [open_rank(str(root), rank, size, store, nodes, replicate) for rank in range(size)]


def resumed(root: Path, size: int, nodes: int = 1, replicate: int = 0) -> tuple[int, str]:
    """Where all ranks resume, and from which places; then everything is closed."""
    made = opened(root, size, nodes, replicate)
    states = on_all(lambda rank: made[rank].load(), size)
    steps = {check(state, rank) for rank, state in enumerate(states)}
    loaded = [one.loaded for one in made]
    on_all(lambda rank: made[rank].engine.start(), size)
    on_all(lambda rank: made[rank].close(), size)
    (step,) = steps
    return step, " ".join(sorted({one.place for one in loaded if one is not None}))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_die_resume_from_memory(tmp_path: Path, size: int) -> None:
    """Every rank has all shares, bit for bit, and its own component; the snapshot is durable as well by then."""
    root = tmp_path / "run"
    host = Host(root, size)
    host.until_step(12)
    begun = host.kill()
    step, place = resumed(root, size)
    assert place == "memory"
    assert begun - step <= MOST_LOST
    with Checkpointer(str(root)) as alone:
        assert [info.step for info in alone.snapshots()] == [step]
    assert not list((root / names.PARTS).glob("*"))


@pytest.mark.long
def test_what_dead_ranks_leave_is_stored_as_the_tier_stores_snapshots(tmp_path: Path) -> None:
    """The writers encode the shares that they make durable after a crash, as they would have before."""
    root = tmp_path / "run"
    host = Host(root, 2, codec="zstd")
    host.until_step(5)
    begun = host.kill()
    step, _ = resumed(root, 2)
    assert begun - step <= MOST_LOST
    repository = Repository(open_storage(root))
    newest = repository.read(repository.ids()[-1].id)
    assert newest.info.step == step
    assert {piece.codec for _, piece in stored_pieces(newest)} == {"zstd"}


@pytest.mark.long
@pytest.mark.parametrize("replicate", [0, 1])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_nodes_with_folders_lose_no_more(tmp_path: Path, size: int, replicate: int) -> None:
    """Each node makes durable all that its ranks have in memory, so also what all of them have. Replicas stay there."""
    host = Host(tmp_path, size, nodes=2, replicate=replicate)
    host.until_step(12)
    begun = host.kill()
    step, place = resumed(tmp_path, size, 2, replicate)
    assert begun - step <= MOST_LOST
    assert (place == "memory") == bool(replicate)
    for node in ("n0", "n1"):
        repository = Repository(open_storage(tmp_path / node))
        assert step in [parsed.step for parsed in repository.ids()]
        assert not list((tmp_path / node / names.PARTS).glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_lives_on_nodes_with_folders_that_end_at_random_moments(tmp_path: Path, number: int) -> None:
    """Snapshots in memory and durable ones in turn; no life loses more than two steps."""
    begun = 0
    for life in range(4):
        host = Host(tmp_path, 4, durable_every=3 + number, nodes=2)
        assert begun - int(host.resumed[1]) <= MOST_LOST, (life, host.resumed, begun)
        host.until_step(int(host.resumed[1]) + 5 + 3 * life)
        begun = host.kill()
    step, _ = resumed(tmp_path, 4, 2)
    assert begun - step <= MOST_LOST


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_lives_that_end_at_random_moments(tmp_path: Path, number: int) -> None:
    """Snapshots in memory and durable ones in turn; no life loses more than two steps."""
    root = tmp_path / "run"
    begun = 0
    for life in range(4):
        host = Host(root, 3, durable_every=3 + number)
        assert begun - int(host.resumed[1]) <= MOST_LOST, (life, host.resumed, begun)
        assert life == 0 or host.resumed[2] == "memory"
        host.until_step(int(host.resumed[1]) + 5 + 3 * life)
        begun = host.kill()
    step, place = resumed(root, 3)
    assert begun - step <= MOST_LOST
    assert place == "memory"


@pytest.mark.slow
def test_a_share_that_is_gone_with_its_writer_makes_the_durable_tier_serve(tmp_path: Path) -> None:
    """No rank restores a part of a snapshot: without one of the shares the last durable snapshot counts."""
    root = tmp_path / "run"
    host = Host(root, 2, durable_every=4)
    host.until_step(12)
    until(lambda: list((root / names.MANIFESTS).glob("*-s0000000004-*")), lambda: "step 4 is not durable")
    writers_of(host.process.pid)[1].kill()
    host.kill()
    step, place = resumed(root, 2)
    assert place == f"file://{root}"
    assert step >= 4
    assert step % 4 == 0


@pytest.mark.slow
def test_one_process_is_not_given_the_share_of_a_rank(tmp_path: Path) -> None:
    """A checkpointer alone waits for the durable tier; it must not take the share of rank 0 for the snapshot."""
    root = tmp_path / "run"
    host = Host(root, 2)
    host.until_step(5)
    host.kill()
    reply = control.ask(str(root), {"what": control.Question.SNAPSHOT}, 60.0)
    assert reply is not None
    assert reply.body["snapshot"] is None
    assert "share" in reply.body["why"]
    for fd in reply.fds:
        os.close(fd)
    until(lambda: list((root / names.MANIFESTS).glob("*")), lambda: "nothing becomes durable")
    with Checkpointer(tiers=["memory", str(root)]) as alone:
        state = alone.load()
        assert state is not None
        check(state, 0)
        assert alone.loaded is not None
        assert not alone.loaded.from_memory


def test_the_writers_agree_on_the_newest_snapshot_that_all_have() -> None:
    """A writer that is ahead follows the others; in whatever order they look, all arrive at the same snapshot."""
    kept = {0: ["9", "8", "7"], 1: ["8", "7", "6"], 2: ["7", "6", "5"]}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]):
        there: dict[str, set[int]] = {}
        for rank in order:
            there.setdefault(kept[rank][0], set()).add(rank)
            for other in order:  # everybody who is there looks again
                if any(other in ranks for ranks in there.values()):
                    while (wanted := follow(kept[other], there, other, range(3))) is not None:
                        there.setdefault(wanted, set()).add(other)
        assert [snapshot for snapshot, ranks in there.items() if len(ranks) == 3] == ["7"]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_another_number_of_ranks_waits_for_what_the_writers_make_durable(tmp_path: Path, size: int) -> None:
    """Shares of another division in memory are useless; the snapshot that all had is on the tier when `load` looks."""
    root = tmp_path / "run"
    host = Host(root, 3)
    host.until_step(12)
    begun = host.kill()
    made = opened(root, size)
    states = on_all(lambda rank: made[rank].load(), size)
    assert all(state is not None for state in states)
    loaded = made[0].loaded
    assert loaded is not None and loaded.info.step >= begun - MOST_LOST and not loaded.from_memory
    on_all(lambda rank: made[rank].close(), size)


def test_one_process_waits_for_what_the_writers_of_ranks_make_durable(tmp_path: Path) -> None:
    """As another number of ranks does."""
    root = tmp_path / "run"
    host = Host(root, 2)
    host.until_step(12)
    begun = host.kill()
    with Checkpointer(tiers=["memory", str(root)]) as ckpt:
        assert ckpt.load() is not None
        assert ckpt.loaded is not None and ckpt.loaded.info.step >= begun - MOST_LOST


def failing(root: Path, *, with_newest: list[int]) -> tuple[list[Checkpointer], list[psutil.Process]]:
    """Two ranks in this process with the steps 1 and 2 in memory, and step 3 for good where said; and their writers."""
    made = opened(root, 2)
    on_all(lambda rank: made[rank].engine.start(), 2)
    for step in (1, 2, 3):
        ranks = with_newest if step == 3 else [0, 1]
        handles = [made[rank].save(state_of(step, rank), step=step, durable=step == 3) for rank in ranks]
        for handle in handles:
            handle.wait(60)
    replies = [control.ask(str(root), {"what": control.Question.STATUS}, 60.0, rank) for rank in range(2)]
    return made, [psutil.Process(reply.body["pid"]) for reply in replies if reply is not None]


def test_a_written_share_is_not_taken_for_a_committed_snapshot(tmp_path: Path) -> None:
    """Rank 1 fails when its share of step 3 is written, and rank 0 before it takes step 3: step 2 is what both have."""
    root = tmp_path / "run"
    made, _ = failing(root, with_newest=[1])
    assert [path.name for path in (root / names.PARTS).glob("*-s0000000003-*")] != []
    on_all(lambda rank: made[rank].close(60, failed=True), 2)
    assert resumed(root, 2) == (2, "memory")


def test_writers_do_not_linger_with_what_is_committed(tmp_path: Path) -> None:
    """As after a stop, which ends a loop by an exception: rank 1 leaves before the commit, and nothing newer exists."""
    root = tmp_path / "run"
    made, writers = failing(root, with_newest=[1])

    def end(rank: int) -> None:
        if not rank:
            made[rank].save(state_of(3, rank), step=3).wait(60)
        made[rank].close(60, failed=True)

    on_all(end, 2)
    assert len(writers) == 2
    assert psutil.wait_procs(writers, 60)[1] == []
    with Checkpointer(str(root)) as alone:
        assert [info.step for info in alone.snapshots()] == [3]
