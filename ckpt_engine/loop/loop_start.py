"""Where a loop without a loader begins, and what may draw random numbers between that and its first turn."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ckpt_engine.audit.carried import instructions, loops_around, loops_behind
from ckpt_engine.data import rng
from ckpt_engine.loop.shape import Ask, At, line_of
from ckpt_engine.plugins import is_function_of_user, is_standard_name


class LoopStart:
    """Where a loop without a loader goes on: as late as it can be seen, the random streams are put back there.

    What a script draws before, it draws in each of its processes. That a loop begins is seen by a read of the count of
    steps that no turn of a loop comes before. Training thread only.

    Args:
        home: as of `Ask`.

    Attributes:
        seen: such a read has come.
    """

    def __init__(self, home: frozenset[CodeType]) -> None:
        self._home = home
        self._since, self._is_read = Ask(frozenset()).at, False
        """The call of `track`, or a read: nothing was drawn before it that is known of."""
        self._outer = {(code, loop) for code, offset in self._since for loop in loops_around(code, offset)}
        self._places: set[tuple[tuple[CodeType, int], ...]] = set()
        self._streams: rng.RngState | None = None
        self._then: rng.RngState = {}
        self._over = self.seen = False

    def expect(self, streams: rng.RngState, *, later: bool) -> None:
        """A resumed loop goes on with these; `later`: not before such a read, as the saved run had one."""
        self._streams, self._then = streams, {} if later else rng.capture()

    def read(self) -> bool:
        """The count of steps is read: whether a loop is about to begin. Cheap once there was a step."""
        if self._over:
            return False
        ask = Ask(self._home)
        place = tuple(ask.at)
        begins = place not in self._places and self._is_before_turns(ask.at)
        self._places.add(place)
        self.seen = self.seen or begins
        if self._streams is not None and begins:
            rng.restore(self._streams)
            self._then = rng.capture()
        if self._streams is not None and self._then == rng.capture():
            self._since, self._is_read = ask.at, True
        return begins

    def stepped(self) -> None:
        """An optimizer has made a step."""
        self._over = True

    def problem(self) -> str | None:
        """At the end of the first turn: why it may have drawn other numbers than it would have."""
        streams, self._streams = self._streams, None
        if streams is None or self._then == rng.capture():
            return None
        ask, since = Ask(self._home), list(self._since)
        codes = [code for code, _ in ask.at]
        left = next((number for number, (code, _) in enumerate(since) if code in codes), 0)
        where = f"{Path(since[left][0].co_filename).name}:{line_of(*since[left])}"
        if not self._then:
            return f"the random streams were not put back: nothing behind {where} read run.global_step before the loop"
        names = self._between(ask, left) if since[left][0] in codes else None
        if names is None:
            return _UNSEEN_LOOP.format(where)
        return _DRAWS.format(", ".join(dict.fromkeys(names)), where) if names else None

    def _is_before_turns(self, at: At) -> bool:
        """Whether no turn of a loop has begun, and one comes."""
        around = [(code, loop, offset) for code, offset in at for loop in loops_around(code, offset)]
        around = [one for one in around if one[:2] not in self._outer]
        if any(_does_anything(code, loop.head, offset) for code, loop, offset in around):
            return False
        if around or any(loops_behind(code, offset) for code, offset in at):
            return True
        return at[0][0] in self._home and not any(loops_behind(code, -1) for code, _ in at)  # a function has the loop

    def _between(self, ask: Ask, left: int) -> list[str] | None:
        """What may draw between the place and the loop that is in its first turn; None: that loop is not seen.

        Args:
            left: so many of the functions of that place have returned.
        """
        now = list(zip(ask.frames, ask.at, strict=True))
        codes = [code for code, _ in ask.at]
        code, begin = self._since[left]
        common = codes.index(code)
        loops = [[one for one in loops_around(*at) if (at[0], one) not in self._outer] for _, at in now[: common + 1]]
        inner = next((number for number, found in enumerate(loops) if found), None)
        if inner is None:
            return None
        head = loops[inner][0].head
        if inner == common and head <= begin:
            return []
        found = [name for at in self._since[:left] for name in _may_draw(None, at[0], at[1] + 1, sys.maxsize)]
        for number in range(common, inner - 1, -1):
            frame, (code, offset) = now[number]
            values = {**frame.f_globals, **frame.f_locals}
            first = 0 if number != common else _statement_of(code, begin) if self._is_read else begin + 1
            if number > inner:  # functions are called there one in the other
                call = _statement_of(code, offset)
                found += _may_draw(values, code, first, call)
                found += _may_draw(values, code, max(first, call), offset, under_way=codes)
            else:
                found += _may_draw(values, code, first, head)
        return found


_DRAWS = (
    "{0} (behind {1}, before the loop) may draw random numbers, which come again after a resume: read run.global_step "
    "in the loop's own line, as in range(run.global_step, n), or keep what is drawn in track(…, carry=Carry(…))"
)
_UNSEEN_LOOP = (
    "no loop is seen around run.step(): what the script has drawn behind {0} may come again after a resume: let a for "
    "or while read run.global_step in its own line"
)
_QUIET = ("tqdm", "torch.nn.modules.module", "torch.optim", "ckpt_engine")
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_GLOBAL")
_DRAWING_METHODS = frozenset(
    (
        *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_"),
        *("log_normal_", "multinomial", "normal_", "random_", "uniform_"),
    )
)
"""Of tensors; all their other methods draw nothing."""
_DEEPEST = 4
"""Functions that call each other are read so deep."""


def _does_anything(code: CodeType, begin: int, end: int) -> bool:
    """Whether there is more than a condition between two instructions."""
    rows = (one.opname for one in instructions(code)[0] if begin <= one.offset < end)
    return any(name.startswith(("STORE", "CALL", "POP_TOP", "YIELD")) for name in rows)


def _statement_of(code: CodeType, offset: int) -> int:
    """The first instruction of the statement that this one belongs to."""
    rows = [one for one in instructions(code)[0] if one.offset < offset]
    ends = (one.offset for one in reversed(rows) if one.opname.startswith(("STORE", "POP_TOP", "POP_JUMP")))
    return next(ends, -1) + 1


def _may_draw(
    values: Mapping[str, Any] | None,
    code: CodeType,
    begin: int,
    end: int,
    *,
    under_way: Sequence[CodeType] = (),
    depth: int = _DEEPEST,
) -> list[str]:
    """Names of what these instructions of a function use that may draw random numbers.

    Args:
        values: of its variables; None: it has returned.
        under_way: they are the call of one of these functions, which says itself what it does with its arguments.
        depth: so many functions that it calls, each from the one before, are read too.
    """
    rows = [one for one in instructions(code)[0] if begin <= one.offset < end]
    if not any("CALL" in one.opname or one.opname in ("FOR_ITER", "BINARY_SUBSCR") for one in rows):
        return []
    known = values or {}
    found: list[str] = []
    name, value, owner = "", _Unknown, None
    for row in (*rows, None):
        opname = "" if row is None else row.opname
        if row is not None and opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            attribute = str(row.argval)
            name, value, owner = f"{name or '(…)'}.{attribute}", _attribute(value, attribute), value
            continue
        if name and not _is_quiet(value, name, owner, depth) and (not under_way or _is_called(value, under_way)):
            found.append(name)
        name, value, owner = "", _Unknown, None
        if row is not None and opname.startswith(_LOADS):
            *others, name = map(str, row.argval if isinstance(row.argval, tuple) else (row.argval,))
            found += [one for one in others if not _is_quiet(_value(one, known), one, None, depth)]
            value = _value(name, known)
        elif row is not None and isinstance(row.argval, CodeType):
            found += _may_draw(values, row.argval, 0, sys.maxsize, depth=depth)
    return found


class _Unknown:
    """What a name means that cannot be seen."""


class _Own:
    """What a variable of a function is that is read and does not run."""


def _value(name: str, values: Mapping[str, Any]) -> Any:
    return values.get(name, getattr(builtins, name, _Unknown))


def _attribute(value: Any, name: str) -> Any:
    """Without running code of the user's."""
    return inspect.getattr_static(value, name, _Unknown)


def _is_called(value: Any, under_way: Sequence[CodeType]) -> bool:
    """Whether it is a function or class, and none of these functions."""
    is_function = isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type)
    return is_function and getattr(value, "__code__", None) not in under_way


def _is_quiet(value: Any, name: str, owner: Any, depth: int) -> bool:
    """Whether it draws nothing when it is used: a value, or what comes with Python, shows progress or sets a mode.

    Args:
        name: as it is written.
        owner: of what it is an attribute; None: it is a variable.
        depth: as of `_may_draw`.
    """
    method = name.rpartition(".")[2] if owner is not None else ""
    if (value is _Unknown and method) or (
        hasattr(value, "__objclass__") and issubclass(torch.Tensor, value.__objclass__)
    ):
        return hasattr(torch.Tensor, method) and method not in _DRAWING_METHODS
    if value is _Unknown or isinstance(value, Iterator):
        return False
    if isinstance(value, ModuleType | torch.Tensor | np.ndarray | np.generic):
        return True
    if not callable(value) and not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
        return True
    if isinstance(value, FunctionType) and is_function_of_user(value) and depth:
        # What its own variables are comes from arguments, which the caller names, or from what it calls itself.
        own = value.__code__.co_varnames
        known = {
            **value.__globals__,
            **dict.fromkeys(own, _Own),
            **({} if owner is None else dict.fromkeys(own[:1], owner)),
        }
        return not _may_draw(known, value.__code__, 0, sys.maxsize, depth=depth - 1)
    kind = value if callable(value) else type(value)
    module = str(getattr(kind, "__module__", None) or getattr(getattr(kind, "__objclass__", None), "__module__", ""))
    return module.startswith(_QUIET) or (is_standard_name(module) and not module.startswith("random"))
