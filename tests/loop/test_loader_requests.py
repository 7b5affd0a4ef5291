"""When and from where a loader is asked, and what passes over it have shown."""

from __future__ import annotations

from ckpt_engine.loop.loader_requests import LoaderRequests, clock
from ckpt_engine.loop.pass_progress import PassProgress
from ckpt_engine.loop.shape import Home, code_now


def begin(requests: LoaderRequests) -> None:
    requests.begun_at = next(clock)


def ask(requests: LoaderRequests, home: Home, *, begins: bool) -> bool:
    """Ask for a batch; whether a place came of it."""
    requests.asked_at = next(clock)
    return requests.note(home, begins=begins) is not None


def test_the_place_is_only_looked_for_where_a_pass_begins() -> None:
    """Each later request from the same line keeps it."""
    requests, home = LoaderRequests(), code_now()
    begin(requests)
    found, places = [], []
    for number in range(3):
        found.append(ask(requests, home, begins=number == 0))
        places.append(requests.place)
    assert found == [True, False, False]
    assert places[0] is places[1] is places[2]


def test_a_pass_that_was_asked_for_nothing_took_no_time() -> None:
    """An evaluation that is left before its first batch is none."""
    requests, home = LoaderRequests(), code_now()
    begin(requests)
    assert requests.pass_seconds() is None
    ask(requests, home, begins=True)
    assert (requests.pass_seconds() or -1.0) >= 0.0
    begin(requests)
    assert requests.pass_seconds() is None


def test_a_request_between_two_passes_over_another_loader_is_known() -> None:
    """Its batch is used in the second one, which a resumed run may begin without it."""
    inner, outer, home = LoaderRequests(), LoaderRequests(), code_now()
    begin(inner)
    inner.left_at = next(clock)
    ask(outer, home, begins=True)
    assert not outer.came_before(inner)
    begin(inner)
    assert outer.came_before(inner)
    ask(outer, home, begins=False)
    assert not outer.came_before(inner)


def test_a_step_takes_the_batches_since_the_step_before() -> None:
    """Those before a resume do not count."""
    progress = PassProgress(stepped_at=5)
    assert [progress.step(delivered) for delivered in (7, 7, 10)] == [2, 0, 3]
    assert progress.trained
