"""Local variables that a loop carries are named, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckpt_engine.audit.attributes import UsedObject, Variables
from ckpt_engine.audit.audit import HiddenState
from ckpt_engine.audit.carried import CarriedLocals, Carry, calls_now, objects_used, sentence


class Batches:
    """Gives numbers, and looks at its consumer before each of them."""

    def __init__(self, found: CarriedLocals, count: int = 4, known: Callable[[], Any] = tuple) -> None:
        self._found, self._count, self._known = found, count, known

    def __iter__(self) -> Iterator[float]:
        return _Pass(self._found, self._count, self._known)


class _Pass:
    def __init__(self, found: CarriedLocals, count: int, known: Callable[[], Any]) -> None:
        self._found, self._left, self._known = found, count, known

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> float:
        self._found.look(self._known())
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        return float(self._left)


def plain(found: CarriedLocals) -> None:
    """What is written before it is read in each step is not carried."""
    loss = 0.0
    for epoch in range(2):
        for index, batch in enumerate(Batches(found)):
            loss = batch * 2
            doubled = loss + index + epoch
            if doubled < 0:
                return
        print(loss)


def best(found: CarriedLocals) -> None:
    """A running best."""
    best_loss = float("inf")
    for batch in Batches(found):
        if batch < best_loss:
            best_loss = batch


def running(found: CarriedLocals) -> None:
    """A running sum, read after the loop."""
    total = 0.0
    for batch in Batches(found):
        total += batch
    print(total)


def prefetched(found: CarriedLocals) -> None:
    """The next batch is drawn before the step that uses it."""
    x = torch.rand(2)
    step = 0
    while True:
        y = x * 2
        x = torch.rand(2)
        found.look((step,))
        step += 1
        if step == 4:
            break
        print(y.sum())


def hidden(found: CarriedLocals) -> None:
    """The hidden state of a language model."""
    h = torch.zeros(2)
    for batch in Batches(found):
        h = (h + batch).detach()


def tuples(found: CarriedLocals) -> None:
    """Of a pair that is unpacked, both."""
    a, b = 0.0, 1.0
    for _ in Batches(found):
        a, b = b, a + b


def history(found: CarriedLocals) -> None:
    """A list that grows is most often a record."""
    losses: list[float] = []
    for batch in Batches(found):
        losses.extend([batch])


def outer(found: CarriedLocals) -> None:
    """A variable of the function around the one that iterates."""
    best_of_all = 10.0

    def epoch() -> float:
        last = 0.0
        for batch in Batches(found):
            last = batch
        return last

    for _ in range(3):
        best_of_all = min(best_of_all, epoch()) - 1.0


def constants(found: CarriedLocals) -> None:
    """What never changes is no state."""
    scale, names = 2.0, ["a"]
    for batch in Batches(found):
        print(batch * scale, names)


def by_try(found: CarriedLocals) -> None:
    """A loop in a `with` and a `try`."""
    count = 0
    try:
        with torch.no_grad():
            for batch in Batches(found):
                count += 1
                assert batch >= 0
    finally:
        print(count)


def searching(found: CarriedLocals) -> None:
    """What an inner `while` sets, which each step reads behind it."""
    for batch in Batches(found):
        tries = 0
        while tries < 2:
            step = batch / (1 + tries)
            tries += 1
        assert step >= 0


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (plain, []),
        (best, ["best_loss"]),
        (running, ["total"]),
        (prefetched, ["x"]),
        (hidden, ["h"]),
        (tuples, ["a", "b"]),
        (history, []),
        (outer, ["best_of_all"]),
        (constants, []),
        (by_try, ["count"]),
        (searching, []),
    ],
)
def test_what_is_carried_is_named(
    loop: Callable[[CarriedLocals], None], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of loop, by the docstring of its function."""
    found = CarriedLocals()
    loop(found)
    capsys.readouterr()
    assert found.names == names


def test_a_script_is_a_frame_too() -> None:
    """Variables at the top level of a module are found as those of a function."""
    found = CarriedLocals()
    code = "seen = 0\nfor batch in batches:\n    seen += 1\n    last = batch\n"
    exec(compile(code, "train.py", "exec"), {"batches": Batches(found)})
    assert found.names == ["seen"]


def test_a_function_that_calls_itself_carries_what_its_innermost_call_does() -> None:
    """A server of jobs that becomes a job: its variables of two calls are of one name, and do not change."""

    def serve(jobs: list[list[int]], found: CarriedLocals) -> int:
        done = 0
        for job in jobs:
            if len(job) < 3:
                serve([[*job, 2, 3]], found)
            else:
                for _ in Batches(found):
                    pass
            done = done + len(job)
        return done

    found = CarriedLocals()
    serve([[1]], found)
    assert found.names == []


def test_known_counters_are_not_named() -> None:
    """A counter that the tracker has already is not reported."""
    found = CarriedLocals()
    step = 0
    for _ in range(4):
        found.look((step,))
        step = step + 1
    assert found.names == []


def test_each_is_said_once() -> None:
    """A second look gives nothing new."""
    found = CarriedLocals()
    total, news = 0.0, []
    for _ in range(4):
        news.append(found.look())
        total += random.random()
    assert sum(map(len, news)) == len(found.names)
    assert total >= 0


def test_the_sentence_shows_the_code() -> None:
    """The sentence contains code that a user can copy."""
    assert "carry = Carry(X=…)" in sentence(["X", "Y"])


def test_a_carry_keeps_its_values() -> None:
    """It is an object that a snapshot has."""
    carry = Carry(best=1.0, hidden=torch.ones(2))
    other = Carry(best=9.0, hidden=None)
    other.load_state_dict(carry.state_dict())
    assert other.best == 1.0
    assert other.hidden.tolist() == [1.0, 1.0]


def test_a_trained_tensor_of_a_carry_stays_the_one_that_its_optimizer_has() -> None:
    """A temperature that is learned beside the model: the steps after a resume are seen in the carry."""
    carry = Carry(alpha=torch.zeros(1, requires_grad=True), last=None)
    alpha = carry.alpha
    optimizer = torch.optim.SGD([alpha], lr=1.0)
    carry.load_state_dict({"alpha": torch.full((1,), 5.0), "last": torch.ones(2)})
    carry.alpha.sum().backward()
    optimizer.step()
    assert carry.alpha is alpha and carry.alpha.tolist() == [4.0] and carry.last.tolist() == [1.0, 1.0]
    carry.layers = layers = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    both = list(layers)
    carry.load_state_dict({"alpha": torch.ones(1), "layers": [torch.ones(2), torch.ones(1)]})
    assert carry.layers[0] is both[0] and carry.layers[1] is both[1] and both[0].tolist() == [1.0, 1.0]
    carry.load_state_dict({"alpha": torch.ones(3)})  # of another shape
    assert carry.alpha.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("saves", [True, False])
def test_a_variable_that_a_carry_has_too_is_not_named(saves: bool) -> None:
    """A loop may go on with its own names, and hand their values over before the step ends."""
    found, carry = CarriedLocals(), Carry(x=None, best=0.0)
    x, best = torch.rand(2), 9.0
    for _ in range(4):
        best = min(best, float(x.sum()))
        x = torch.rand(2)
        if saves:
            carry.x, carry.best = x, best
        found.look((), [carry])
        best -= 1.0
    assert found.names == ([] if saves else ["best", "x"])


class Patience:
    """What a script counts with."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []


PATIENCE = Patience()


def test_objects_that_the_loop_uses_are_found() -> None:
    """Local and global ones that the body names; neither those of the calls around it nor what it does not use."""
    around, unused = Patience(), Patience()

    def run() -> dict[str, UsedObject | Variables]:
        outside, mine = calls_now(), Patience()
        found: dict[str, UsedObject | Variables] = {}
        for _ in range(2):
            mine.count += 1
            PATIENCE.count += 1
            found = objects_used(outside)
        return found

    for _ in range(2):
        around.count += 1
        found = run()
    assert unused.count == 0
    used = {name: type(one.owner) for name, one in found.items() if isinstance(one, UsedObject)}
    assert used == {"mine": Patience, "PATIENCE": Patience}


def test_a_container_of_a_used_object_that_grows_is_a_record() -> None:
    """It is not saved, as what training decides by has a bound."""
    patience, hidden = Patience(), HiddenState("auto")
    hidden.note("batch", {"patience": UsedObject(patience)})
    patience.count += 1
    patience.seen.append(patience.count)
    assert list(hidden.state()) == ["patience.count"]


class Kept:
    """A list that grows, and what each step does with it."""

    def __init__(self, rows: list[float]) -> None:
        self.rows = rows

    def write_down(self) -> None:
        self.rows.append(1.0)

    def count_them(self) -> None:
        self.rows.append(1.0)
        if len(self.rows) > 100:
            print("a hundred")

    def read_the_last(self) -> None:
        self.rows.append(1.0 + sum(self.rows[-3:]))

    def take_the_first(self) -> None:
        self.rows += [1.0, 2.0]
        self.rows.pop(0)

    def make_it_anew(self) -> None:
        self.rows = [*self.rows[-2:], 1.0]

    def give_it_on(self) -> None:
        self.rows.append(1.0)
        sorted(self.rows)


@pytest.mark.parametrize(
    ("step", "is_state"),
    [
        *(("write_down", False), ("read_the_last", True), ("take_the_first", True), ("make_it_anew", True)),
        *(("give_it_on", True), ("count_them", True)),
    ],
)
def test_a_list_that_grows_is_state_where_the_function_that_makes_it_grow_reads_it(step: str, is_state: bool) -> None:
    """To ask for its length is reading, too. Other functions may read a record, as to plot it."""
    functions = {"__init__": Kept.__init__, "step": vars(Kept)[step], "plot": lambda self: list(self.rows)}
    kept: Any = type("OneStep", (), functions)([])
    hidden = HiddenState("auto")
    hidden.note("batch", {"kept": UsedObject(kept)})
    for _ in range(2):
        kept.step()
    assert list(hidden.state()) == ["kept.rows"] * is_state


class Meters:
    """A script's logger with its running averages."""

    def __init__(self) -> None:
        self.by_name = {"loss": Patience()}
        self.others = [Patience()]
        self.lazy: dict[str, Any] = {}


@pytest.mark.parametrize(("value", "is_state"), [(2.0, True), (Patience(), True), ([2.0], False)])
def test_a_meter_that_the_first_step_makes_is_no_record(value: Any, is_state: bool) -> None:
    """A number or object that a dict gets is saved or named; a list that it gets is a record."""
    meters, hidden = Meters(), HiddenState("auto")
    hidden.note("batch", {"meters": UsedObject(meters)})
    for _ in range(2):
        meters.lazy["loss"] = value
        rows = hidden.state()
        assert list(rows) == ["meters.lazy"] * is_state
    assert bool(hidden.unsaved(rows)) == isinstance(value, Patience)


def test_objects_in_containers_of_a_used_object_are_looked_at() -> None:
    """They count as well as those that are attributes themselves."""
    meters, hidden = Meters(), HiddenState("auto")
    hidden.note("batch", {"meters": UsedObject(meters)})
    meters.by_name["loss"].count += 1
    meters.others[0].count += 2
    state = {path: row["value"] for path, row in hidden.state().items()}
    assert state == {"meters.by_name['loss'].count": 1, "meters.others[0].count": 2}
