"""The ledger: where each tier stands, what is in flight, and how fast it goes, from events alone."""

from __future__ import annotations

from ckpt_engine.observe.durability import Ledger, TierStanding
from ckpt_engine.observe.events import (
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotFound,
    SnapshotReplicated,
    SnapshotStaged,
    TierDegraded,
    TierRecovered,
    WriterLost,
)

NEAR, FAR = "/run", "s3://bucket/run"


class Time:
    """A clock that tests own."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def ledger() -> tuple[Ledger, Time]:
    clock = Time()
    return Ledger([NEAR, FAR], clock), clock


def committed(step: int, seconds: float, nbytes: int = 1000, tier: str = NEAR) -> SnapshotCommitted:
    return SnapshotCommitted(f"s{step}", step, tier, nbytes, nbytes, 1.0, seconds, 0.0, 0.0)


def test_a_snapshot_is_in_flight_until_it_is_durable() -> None:
    """Then the tier has it, with the age of the instant at which it was taken."""
    book, clock = ledger()
    book.emit(SnapshotStaged("", 7, 0.5, 1000))
    assert [(one.step, one.nbytes, one.since) for one in book.standing.in_flight] == [(7, 1000, 99.5)]
    assert (book.standing.state_bytes, book.standing.stall_seconds) == (1000, 0.5)
    clock.now = 104.0
    book.emit(committed(7, 2.0))
    assert book.standing.in_flight == ()
    assert book.standing.tiers == (TierStanding(NEAR, 500.0, 7, 99.5), TierStanding(FAR))


def test_a_snapshot_that_only_stays_in_memory_is_never_in_flight() -> None:
    """It is not written, so no plan waits for it; its size and its stall are those of the next durable one."""
    book, _ = ledger()
    for step in range(7, 10):
        book.emit(SnapshotStaged("", step, 0.5, 1000, durable=False))
    assert book.standing.in_flight == ()
    assert (book.standing.state_bytes, book.standing.stall_seconds) == (1000, 0.5)


def test_a_run_that_goes_on_from_memory_has_no_tier_of_that_name() -> None:
    """Nothing is known to be durable yet, and memory is no place that a stop could reach."""
    book, _ = ledger()
    book.resumed(5, "memory")
    assert book.standing.tiers == (TierStanding(NEAR), TierStanding(FAR))
    book.resumed(5, NEAR)
    assert book.standing.tiers[0].newest_step == 5


def test_a_failed_one_and_a_lost_writer_leave_nothing_in_flight() -> None:
    """What was durable before stays."""
    book, _ = ledger()
    book.emit(committed(6, 1.0))
    for end in (SnapshotFailed("", 7, NEAR, "CKPT300", "no"), WriterLost("gone")):
        book.emit(SnapshotStaged("", 7, 0.5, 1000))
        book.emit(end)
        assert book.standing.in_flight == ()
        assert book.standing.tiers[0].newest_step == 6


def test_the_speed_is_the_median_of_the_newest_writes() -> None:
    """One slow write, such as the first one, does not decide a plan."""
    book, _ = ledger()
    for step, seconds in enumerate((100.0, 1.0, 1.0, 2.0, 4.0)):
        book.emit(committed(step, seconds))
    assert book.standing.tiers[0].bytes_per_second == 500.0
    book.emit(committed(9, 0.0))  # measured nothing
    assert book.standing.tiers[0].bytes_per_second == 500.0


def test_further_tiers_have_their_own_speed_and_newest_snapshot() -> None:
    """An older snapshot that is copied late does not make the tier older."""
    book, clock = ledger()
    for step in (8, 5):
        book.emit(SnapshotReplicated("s", step, FAR, 1000, 4.0, 10.0, 0.0))
    far = book.standing.tiers[1]
    assert (far.bytes_per_second, far.newest_step, far.newest_instant) == (250.0, 8, clock.now - 10.0)
    book.emit(TierDegraded(FAR, "CKPT300", "no"))
    assert book.standing.tiers[1].away
    book.emit(TierRecovered(FAR, 1.0))
    assert not book.standing.tiers[1].away


def test_what_is_left_of_a_write_follows_the_speed() -> None:
    """Never nothing: sync and commit come last. The second one waits for the first."""
    book, clock = ledger()
    book.emit(committed(1, 1.0))  # 1000 bytes per second
    for step in (2, 3):
        book.emit(SnapshotStaged("", step, 0.0, 2000))
    assert book.standing.left_bytes(clock.now + 1.5) == (500.0, 2000.0)
    assert book.standing.left_bytes(clock.now + 9.0) == (200.0, 2000.0)
    clock.now += 3.0
    book.emit(committed(2, 2.0, 2000))
    assert book.standing.left_bytes(clock.now + 1.0) == (1000.0,)


def test_a_resumed_run_has_what_it_resumed_from() -> None:
    """On the tier that served it; other events change nothing."""
    book, clock = ledger()
    book.resumed(40, FAR)
    book.emit(Notice("INFO", "hello"))
    assert book.standing.tiers == (TierStanding(NEAR), TierStanding(FAR, None, 40, clock.now))


def test_a_folder_has_one_name() -> None:
    """Options and events say a path or a file URL; people see the path."""
    book, _ = ledger()
    book.emit(committed(1, 1.0, tier="file:///run"))
    assert book.standing.tiers[0].newest_step == 1
    assert len(book.standing.tiers) == 2


def test_what_only_stays_in_memory_is_known_until_it_is_durable_or_lost() -> None:
    """`held_step` is the newest snapshot if it is only in memory; a lost writer leaves nothing."""
    book, _ = ledger()
    book.emit(SnapshotStaged("", 7, 0.5, 1000, durable=False))
    assert book.standing.held_step == 7
    book.emit(SnapshotStaged("", 8, 0.5, 1000))
    assert book.standing.held_step is None
    book.emit(SnapshotStaged("", 9, 0.5, 1000, durable=False))
    book.emit(committed(8, 1.0))
    assert book.standing.held_step == 9
    book.emit(committed(9, 1.0))
    assert book.standing.held_step is None
    book.emit(SnapshotStaged("", 10, 0.5, 1000, durable=False))
    book.emit(WriterLost("killed"))
    assert book.standing.held_step is None


def test_a_resume_from_memory_counts_as_durable_when_the_writer_says_so() -> None:
    """The two events may come in any order. An older snapshot, where the rescue failed, has an unknown age."""
    for order in (0, 1):
        book, clock = ledger()
        news = [lambda book=book: book.resumed(7, "memory"), lambda book=book: book.emit(SnapshotFound("s7", 7, NEAR))]
        news[order]()
        assert book.standing.tiers[0].newest_step is None
        news[1 - order]()
        assert book.standing.tiers[0] == TierStanding(NEAR, None, 7, clock.now)
    book, _ = ledger()
    book.resumed(7, "memory")
    book.emit(SnapshotFound("s5", 5, NEAR))
    assert book.standing.tiers[0] == TierStanding(NEAR, None, 5, None)
    book, _ = ledger()
    book.emit(SnapshotFound("s5", 5, NEAR))
    assert book.standing.tiers[0] == TierStanding(NEAR), "a run that did not resume has nothing durable of its own"
