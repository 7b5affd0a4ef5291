"""The life of a loop and of its passes: the table of what follows what, the picture of it, and the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.loop import phases
from ckpt_engine.loop.phases import MOVES, LoopPhase, PassPhase
from tests.house.source import nodes_of

ROOT = Path(__file__).parents[2]
LOOP = sorted((ROOT / "ckpt_engine" / "loop").glob("*.py"))
STATES = [*LoopPhase, *PassPhase]
LEGAL = {(state, other) for state in STATES for other in MOVES[state]}
PAIRS = [(state, other) for kind in (LoopPhase, PassPhase) for state in kind for other in kind if state is not other]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


def drawn() -> Iterator[tuple[str, str]]:
    """The rows of the table in docs/architecture.md, each state with each that follows."""
    rows = (ROOT / "docs" / "architecture.md").read_text().partition("| from | to | when |")[2].split("\n\n")[0]
    for row in rows.strip().splitlines()[1:]:
        first, then = (cell.strip().split(", ") for cell in row.split("|")[1:3])
        yield from ((one, other) for one in first for other in then)


def assigned() -> Iterator[tuple[str, ast.expr]]:
    """What the code of the loop gives an attribute that holds a state, and where."""
    for path in LOOP:
        for node in nodes_of(path):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                pairs = [(target, node.value)] if isinstance(node, ast.Assign) else []
                if isinstance(target, ast.Tuple) and isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for one, value in pairs:
                    if isinstance(one, ast.Attribute) and one.attr in ("phase", "_phase"):
                        yield f"{path.name}:{node.lineno}", value


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    assert set(drawn()) == {(state.name, other.name) for state, other in LEGAL}


@pytest.mark.parametrize("first", [phases.FRESH, phases.UNBEGUN])
def test_every_state_can_be_reached(first: LoopPhase | PassPhase) -> None:
    found, new = {first}, {first}
    while new := {other for state in new for other in MOVES[state]} - found:
        found |= new
    assert found == set(type(first))


@pytest.mark.parametrize(("state", "other"), ILLEGAL)
def test_no_other_state_follows(state: LoopPhase, other: LoopPhase) -> None:
    with pytest.raises(AssertionError, match=f"{state} -> {other}"):
        state.to(other)


@pytest.mark.parametrize("state", STATES)
def test_a_state_may_stay(state: LoopPhase) -> None:
    assert state.to(state) is state


def test_the_code_changes_a_state_through_the_table_only() -> None:
    entered = set()
    for where, value in assigned():
        if isinstance(value, ast.Name):
            assert value.id in ("FRESH", "UNBEGUN"), f"{where} assigns {value.id}, and does not ask the table"
        else:
            assert ast.unparse(value).startswith("self."), where
            assert isinstance(value, ast.Call), where
            entered.add(ast.unparse(value.args[0]))
    others = {"phase"}  # a parameter
    assert entered - others == {state.name for state in STATES} - {"ENDED", "LEFT"}
