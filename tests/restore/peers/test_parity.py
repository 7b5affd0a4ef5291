"""Parity groups: what is lost comes back bit for bit, and what is torn never counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ConfigError
from ckpt_engine.ranks.world import group_of, neighbours
from ckpt_engine.restore import memory_of_ranks
from ckpt_engine.restore.memory_of_ranks import ShareSource, plan_shares
from ckpt_engine.store.container import digest
from ckpt_engine.store.lease import read_holder
from ckpt_engine.store.names import session_id
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import control, part_records
from ckpt_engine.writer.channel import Received
from ckpt_engine.writer.messages import Body, Reply
from ckpt_engine.writer.parity import chunk, number_of, restore_chunk, xor_into
from ckpt_engine.writer.peer_service import PeerConnection, connect
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.restore.peers.writers import RUN, SECRET, Writer, meet, until
from tests.writer.staged import WAIT_SECONDS, weight_bytes

IDS = [session_id(SECRET, number, number) for number in range(9)]


@given(st.integers(0, 100), st.integers(3, 9))
def test_the_chunks_of_a_share_are_the_share(nbytes: int, members: int) -> None:
    """The chunks are in order and without gaps, and each other member gets another one."""
    cuts = [chunk(nbytes, members, number) for number in range(members - 1)]
    assert [at for cut in cuts for at in range(cut.start, cut.stop)] == list(range(nbytes))
    group = list(range(10, 10 + members))
    for sender in group:
        assert sorted(number_of(group, sender, keeper) for keeper in group if keeper != sender) == list(
            range(members - 1)
        )


@given(st.lists(st.binary(max_size=70), min_size=3, max_size=7), st.randoms(use_true_random=False))
def test_any_lost_share_is_made_from_the_others(images: list[bytes], draw: Any) -> None:
    """Of any lengths; whichever member looks at the group, and in whatever order chunks had come."""
    group = list(range(len(images)))
    draw.shuffle(group)
    blocks = {rank: memoryview(image) for rank, image in zip(group, images, strict=True)}
    parity: dict[int, memoryview] = {}
    for keeper in group:
        pieces = [
            blocks[one][chunk(blocks[one].nbytes, len(group), number_of(group, one, keeper))]
            for one in group
            if one != keeper
        ]
        draw.shuffle(pieces)
        parity[keeper] = memoryview(bytearray(max(piece.nbytes for piece in pieces)))
        for piece in pieces:
            xor_into(parity[keeper], piece)
    turn = draw.randrange(len(group))
    seen = group[turn:] + group[:turn]
    for lost in group:
        out = memoryview(bytearray(os.urandom(blocks[lost].nbytes)))
        for keeper in group:
            if keeper != lost:
                others = {rank: image for rank, image in blocks.items() if rank != lost}
                restore_chunk(out, lost, keeper, seen, parity[keeper], others)
        assert out == blocks[lost]


@given(st.integers(1, 8), st.integers(1, 3), st.integers(3, 4), st.randoms(use_true_random=False))
def test_a_group_has_one_rank_on_each_of_its_machines(machines: int, each: int, members: int, draw: Any) -> None:
    """So that a lost machine takes one share from each group, wherever the ranks are."""
    nodes = [f"node{machine}" for machine in range(machines) for _ in range(each)]
    draw.shuffle(nodes)
    groups = [group_of(rank, nodes, members) for rank in range(len(nodes))]
    if machines % members:
        assert set(groups) == {None}
        return
    for rank, group in enumerate(groups):
        assert group is not None
        assert rank in group
        assert len({nodes[one] for one in group}) == members
        assert all(groups[one] == group for one in group)
        assert neighbours(rank, nodes, members).keepers[0] == group[(group.index(rank) + 1) % members]


@pytest.mark.parametrize(
    ("nodes", "numbers"),
    [(["a", "b", "c", "d"], "4, with 1, 1, 1, 1 ranks"), (["a", "a", "b", "c"], "3, with 2, 1, 1 ranks")],
)
def test_machines_that_make_no_groups_are_refused(nodes: list[str], numbers: str) -> None:
    """The message has the numbers."""
    with pytest.raises(ConfigError, match=f"parity: 3 needs .* in groups of 3 machines; there are {numbers}"):
        neighbours(0, nodes, 3)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[list[Writer]]:
    """Three machines with a rank each, whose shares differ in length; in a group, or with partners where 2 is asked."""
    machines = getattr(request, "param", 3)
    made = [Writer(rank, 3, machines, (64 + 37 * rank) << 10) for rank in range(3)]
    meet(made)
    yield made
    for one in made:
        one.close()


def offer_all(group: list[Writer], step: int) -> str:
    """A snapshot of all, whose parity is complete everywhere."""
    (snapshot,) = {one.offer(step) for one in group}
    until(lambda: all(snapshot in one.kept for one in group))
    return snapshot


def serve(writer: Writer, snapshot: str) -> None:
    """Answer as when the trainer is gone."""

    def answer(request: Body) -> Reply | None:
        if request["what"] == control.Question.PARITY:
            found = writer.peers.parity.get(request["snapshot"])
            assert found is not None
            said = [asdict(share) for share in found.shares]
            return Reply({"snapshot": snapshot, "shares": said, "nbytes": found.nbytes}, (found.fd,))
        order = writer.orders[-1]
        staged = order.staged(snapshot)
        manifest = staged.manifest(RUN.run, staged.timed_digest()[0])
        part = part_records.encode(part_records.part_of(manifest, staged.cut_layout.layout, writer.ranks))
        body = {"snapshot": snapshot, "manifest": part.decode(), "record": "{}", "beat": None, "durable": False}
        body |= {"file": staged.data.name, "nbytes": staged.data.nbytes}
        return Reply(body, (staged.slot.reading_fd(),))

    writer.peers.answer = answer


def source(writer: Writer, snapshot: str) -> ShareSource:
    parity = writer.peers.parity
    rank = writer.ranks.rank
    return ShareSource(rank, [snapshot], "127.0.0.1", writer.peers.server.port, SECRET, parity.group, parity.ids())


@pytest.mark.parametrize(("group", "lost"), [(3, 0), (3, 1), (3, 2), (2, 0), (2, 2)], indirect=["group"])
def test_a_lost_share_comes_from_the_others_over_the_network(group: list[Writer], lost: int) -> None:
    """Bit for bit, as a data file of the snapshot, by real sockets; of partners it is what the one keeps."""
    (*_, snapshot) = [offer_all(group, step) for step in range(1, 6)]  # memory of older parity is used again
    until(lambda: snapshot in group[0].mirrored)
    gone = group[lost].orders[-1].staged(snapshot).data
    group[lost].peers.close()
    for one in group:
        serve(one, snapshot)
    found = [[source(one, snapshot)] for one in group if one is not group[lost]]
    chosen = plan_shares(3, [*found, []])
    assert chosen is not None
    assert list(chosen.lost) == [str(lost)]
    got: dict[int, Received] = {}
    memory_of_ranks._gather(got, "/nowhere", chosen, [], 3, time.monotonic() + WAIT_SECONDS, 1)
    assert got[lost].body["file"] == gone.name
    for rank, one in enumerate(group):
        nbytes = one.orders[-1].staged(snapshot).data.nbytes
        data = os.pread(got[rank].fds[0], nbytes, 0)
        assert data == os.pread(one.stage.fd, nbytes, 0)
        weight, *_ = one.stage.layout.entries
        assert data[weight.offset : weight.offset + weight.nbytes] == weight_bytes(5, weight.nbytes)
        os.close(got[rank].fds[0])


def test_a_share_that_is_not_what_it_was_is_noticed(group: list[Writer]) -> None:
    """One bit of a survivor's share spoils what is made: its digests say so."""
    snapshot = offer_all(group, 5)
    group[0].peers.close()
    for one in group[1:]:
        serve(one, snapshot)
    group[1].stage.fill(6)
    chosen = plan_shares(3, [[source(one, snapshot)] for one in group[1:]])
    assert chosen is not None
    place, why = memory_of_ranks._assembled("/nowhere", chosen, [], 3, time.monotonic() + WAIT_SECONDS, 1)
    assert place is None
    assert "of the share of rank 0 does not match its digest" in why


def test_each_rank_sends_its_share_once_and_keeps_part_of_it(group: list[Writer]) -> None:
    """S / W over the network, and S / W / (g - 1) of memory for each snapshot that is kept."""
    sent = [0, 0, 0]
    for rank, one in enumerate(group):

        def pace(nbytes: int, rank: int = rank) -> None:
            sent[rank] += nbytes

        one.peers._pace = pace  # type: ignore[method-assign]
    snapshot = offer_all(group, 1)
    sizes = [one.orders[-1].staged(snapshot).data.nbytes for one in group]
    assert sent == sizes
    for rank, one in enumerate(group):
        found = one.peers.parity.get(snapshot)
        assert found is not None
        assert found.nbytes == max(-(-nbytes // 2) for other, nbytes in enumerate(sizes) if other != rank)
        assert os.fstat(found.fd).st_size == found.nbytes
        assert {share.rank for share in found.shares} == {0, 1, 2} - {rank}
        os.close(found.fd)


def test_the_two_newest_complete_ones_are_kept(group: list[Writer]) -> None:
    """Ranks may be one snapshot apart."""
    made = [offer_all(group, step) for step in range(1, 6)]
    for one in group:
        assert one.kept == [made[4], made[3]]
        assert one.peers.parity.get(made[2]) is None


class Sender:
    """A member that sends its chunks by hand to the writer of rank 0."""

    def __init__(self, writer: Writer, to: Writer, number: int) -> None:
        self.writer, self.to = writer, to
        self.line: PeerConnection = connect("127.0.0.1", to.peers.server.port, SECRET)
        self.number = number

    def begin(self, of: str, **changes: Any) -> bytes:
        """Announce a chunk of that snapshot; its bytes."""
        step = IDS.index(of)
        self.writer.changes = True  # its own sender keeps out
        self.writer.offer(step)
        staged = self.writer.orders[-1].staged(of)
        manifest = staged.manifest(RUN.run, staged.timed_digest()[0])
        part = part_records.encode(part_records.part_of(manifest, staged.cut_layout.layout, self.writer.ranks)).decode()
        with staged.slot.image(staged.data.nbytes) as image:
            data = bytes(image[chunk(image.nbytes, 3, self.number)])
        said = {"rank": self.writer.ranks.rank, "snapshot": of, "part": part, "record": "{}"}
        said |= {"file": staged.data.name, "nbytes": staged.data.nbytes, "digest": digest(data)}
        self.line.send({"what": "add", **said, **changes})
        return data

    def send(self, of: str, **changes: Any) -> dict[str, Any]:
        """The reply to a chunk."""
        self.line.send_file(memoryview(self.begin(of, **changes)))
        return self.line.receive()


@pytest.fixture
def senders(group: list[Writer]) -> Iterator[list[Sender]]:
    """Ranks 1 and 2, who send to rank 0: for the one it is the last, for the other one the first of its chunks."""
    made = [Sender(group[1], group[0], 1), Sender(group[2], group[0], 0)]
    yield made
    for one in made:
        one.line.close()


def test_half_a_chunk_never_counts(group: list[Writer], senders: list[Sender]) -> None:
    """The parity that it went into is given up; what was complete stays, and the next one works."""
    assert senders[0].send(IDS[1])["ok"]
    assert group[0].kept == []
    assert senders[1].send(IDS[1])["ok"]
    assert group[0].kept == [IDS[1]]
    data = senders[0].begin(IDS[2])
    senders[0].line.send_file(memoryview(data)[: len(data) // 2])
    until(lambda: group[0].peers.parity._open)
    senders[0].line.close()
    until(lambda: not group[0].peers.parity._open)
    assert "given up" in senders[1].send(IDS[2])["why"]
    again = [Sender(one.writer, one.to, one.number) for one in senders]
    assert all(one.send(IDS[3])["ok"] for one in again)
    assert group[0].kept == [IDS[3], IDS[1]]
    for one in again:
        one.line.close()


def test_a_chunk_that_is_damaged_on_the_way_never_counts(group: list[Writer], senders: list[Sender]) -> None:
    """Its digest comes with it."""
    assert senders[0].send(IDS[1])["ok"]
    assert "does not match its digest" in senders[1].send(IDS[1], digest=digest(b"else"))["why"]
    assert group[0].kept == []


def test_a_durable_snapshot_may_follow_one_that_is_on_its_way(group: list[Writer], senders: list[Sender]) -> None:
    """Two may be incomplete; of three the oldest is given up, also while it comes in."""
    for number in (1, 2):
        assert senders[0].send(IDS[number])["ok"]
    assert senders[1].send(IDS[1])["ok"]
    assert senders[1].send(IDS[2])["ok"]
    assert group[0].kept == [IDS[2], IDS[1]]
    data = senders[0].begin(IDS[3])
    senders[0].line.send_file(memoryview(data)[:-1])
    for number in (4, 5):
        until(lambda number=number: len(group[0].peers.parity._open) == min(2, number - 3))
        assert senders[1].send(IDS[number])["ok"]
    senders[0].line.send_file(memoryview(data)[-1:])
    assert "given up" in senders[0].line.receive()["why"]
    assert sorted(group[0].peers.parity._open) == [4, 5]


@pytest.mark.parametrize(
    "changes",
    [{"rank": 2}, {"snapshot": "x"}, {"snapshot": IDS[4]}, {"part": "{}"}],
    ids=["another rank", "no snapshot", "another snapshot", "no part record"],
)
def test_unexpected_messages_are_refused(group: list[Writer], senders: list[Sender], changes: dict[str, Any]) -> None:
    """Before any of it is taken in."""
    senders[0].begin(IDS[1], **changes)
    assert "why" in senders[0].line.receive()
    assert not group[0].peers.parity._open


def test_who_is_of_another_group_is_refused(group: list[Writer]) -> None:
    """Memory is for the members."""
    stranger = Writer(7, 9, 3)
    sender = Sender(stranger, group[0], 0)
    sender.begin(IDS[1])
    assert "rank 7 are not kept here" in sender.line.receive()["why"]
    sender.line.close()
    stranger.close()


def test_a_chunk_comes_once(group: list[Writer], senders: list[Sender]) -> None:
    """A second one would take the first one out again."""
    assert senders[0].send(IDS[1])["ok"]
    assert "here already" in senders[0].send(IDS[1])["why"]
    assert senders[1].send(IDS[1])["ok"]
    assert group[0].kept == [IDS[1]]


def test_a_member_that_is_gone_is_reported_and_its_successor_takes_part(group: list[Writer]) -> None:
    """The next writer of that rank says where it is; the next snapshot is complete again."""
    first = offer_all(group, 1)
    until(lambda: first in group[0].mirrored)  # no sender waits for the one that goes now
    group[1].peers.close()
    for keeper in (group[0].peers._keepers[1], group[2].peers._keepers[1]):
        keeper.hang_up()
    group[0].offer(2)
    until(lambda: any("does not take the share of rank 0" in one for one in group[0].notices))
    assert group[0].kept == [first]
    successor = Writer(1, 3, 3)
    meet([group[0], successor, group[2]], moved=1)
    address = ("127.0.0.1", successor.peers.server.port)
    until(lambda: all(group[rank].peers._keepers[1].address == address for rank in (0, 2)))
    offer_all([group[0], successor, group[2]], 3)
    successor.close()


def test_the_plan_makes_one_lost_share_of_each_group(group: list[Writer]) -> None:
    """Two of a group cannot be made, and one of two groups each can; parity of another snapshot does not help."""
    del group
    ranks = range(6)

    def there(writer: int, parity: list[str]) -> ShareSource:
        mine = [0, 2, 4] if writer % 2 == 0 else [1, 3, 5]
        turned = mine[mine.index(writer) :] + mine[: mine.index(writer)]
        return ShareSource(writer, [IDS[2], IDS[1]], "host", 1, SECRET, turned, parity)

    both, old = [IDS[2], IDS[1]], [IDS[1]]
    one_machine = [[there(rank, both)] for rank in ranks if rank not in (2, 3)]
    found = plan_shares(6, one_machine)
    assert found is not None
    assert (found.snapshot, found.missing) == (IDS[2], [])
    assert {rank: sorted(members) for rank, members in found.lost.items()} == {"2": [0, 2, 4], "3": [1, 3, 5]}
    behind = plan_shares(6, [[there(rank, old if rank == 0 else both)] for rank in ranks if rank != 2])
    assert behind is not None
    assert (behind.snapshot, behind.missing) == (IDS[1], [])
    two = [[there(rank, both)] for rank in ranks if rank not in (2, 4)]
    lacking = plan_shares(6, two)
    assert lacking is not None
    assert (lacking.snapshot, lacking.missing) == (IDS[2], [2, 4])
    assert plan_shares(6, [[]]) is None


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        ({"url": "memory", "parity": 2}, "parity is a number of machines from 3 on"),
        ({"url": "/x", "parity": 3}, "parity is a number of machines from 3 on, and for the memory tier only"),
        ({"url": "memory", "parity": 3, "replicate": 1}, "either replicate or parity"),
    ],
)
def test_impossible_parity_is_refused(tier: dict[str, Any], why: str) -> None:
    """The error says the reason."""
    with pytest.raises(ConfigError, match=why):
        Checkpointer(tiers=[tier, "/y"] if tier["url"] == "memory" else [tier])


def test_parity_needs_several_ranks(tmp_path: Any) -> None:
    """A run of one process gets an error that says so."""
    with pytest.raises(ConfigError, match="parity needs several ranks on several machines"):
        Checkpointer(tiers=[{"url": "memory", "parity": 3}, str(tmp_path / "run")])


@pytest.mark.slow
def test_parity_needs_groups_of_machines(tmp_path: Any) -> None:
    """Ranks on two machines get an error that says so when they start, and no writer is left."""
    tiers = [{"url": "memory", "parity": 3, "bandwidth": "1 GB/s"}, str(tmp_path / "run")]
    store = SharedStore()
    made = [Checkpointer(tiers=tiers, ranks=ThreadRanks(rank, 2, store, node=f"node{rank}")) for rank in range(2)]

    def start(rank: int) -> None:
        with pytest.raises(ConfigError, match="in groups of 3 machines; there are 2, with 1, 1 ranks"):
            made[rank].engine.start()

    on_all(start, 2)
    for one in made:
        one.close()
    assert read_holder(LocalStorage(str(tmp_path / "run"))) is None, "a writer is left"
