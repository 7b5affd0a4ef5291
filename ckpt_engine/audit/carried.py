"""Local and global variables that a training loop carries from step to step: named, as no snapshot can have them.

A variable is carried if its value of one step is read in a later one: it is *live* where the loop's body begins
(backward liveness analysis over the function's bytecode; Aho, Sethi, Ullman, "Compilers", section 10.6). Of those only
numbers, tensors, tuples and objects that differ from look to look count: lists and the like are most often records.
"""

from __future__ import annotations

import bisect
import dis
import itertools
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine.audit.attributes import UsedObject, Variables
from ckpt_engine.audit.roots import OURS, of_modules, roots_of_loader
from ckpt_engine.audit.values import (
    MISSING,
    Clocks,
    Frozen,
    attributes_of,
    changes_in_place,
    digest,
    fill,
    freeze,
    is_drawn,
    is_used,
    items_of,
    reached,
    tensors_in,
)
from ckpt_engine.data.position import followed_by
from ckpt_engine.whose_code import is_library_file, of_framework

_MOST_FRAMES = 16
_ITER = "iter("
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "DELETE_FAST", "DELETE_NAME", "DELETE_DEREF")
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_KINDS = (int, float, complex, torch.Tensor, np.ndarray, np.generic, tuple, nn.Module)
_CARRIED = (
    "{0} {1} carried from step to step in local variables, and no snapshot has them: carry = Carry({2}=…), "
    "track(…, carry=carry), and use carry.{2}"
)
_BESIDE = (
    "{0} keeps its workers or has a random stream of its own, and is not followed: its next pass after a resume is "
    "another one: track(…, {1}={0})"
)


class Carry(SimpleNamespace):
    """What a loop carries from step to step, as one object that a snapshot has.

    Args:
        **values: the variables and what they are at a fresh start: numbers, strings, tensors and containers of them.

    Examples:
        >>> carry = Carry(best_loss=float("inf"), hidden=None)
        >>> tracker = ckpt.track(model=model, optimizer=optimizer, loader=loader, carry=carry)
        >>> carry.best_loss = min(carry.best_loss, loss)
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a snapshot. Tensors that are trained stay the same objects: their optimizers have them.

        Args:
            state: from `state_dict`; what it does not name goes.
        """
        kept = {
            name: one
            for name, one in vars(self).items()
            if any(getattr(part, "requires_grad", False) for part in tensors_in(one))
            and fill(one, state.get(name), within=True)
        }
        vars(self).clear()
        vars(self).update({**state, **kept})


@dataclass(eq=False)
class CarriedLocals:
    """Looks at the frames of the loop, at boundaries, and names what they carry."""

    _before: dict[tuple[CodeType, str], _Compared] = field(default_factory=dict)
    _clocks: Clocks = field(default_factory=Clocks)
    modules: dict[str, Any] | None = None
    """What `of_modules` has found."""
    names: list[str] = field(default_factory=list)
    """The variables that changed and are carried, in the order they were found."""

    def look(self, known: Collection[Any] = (), carries: Iterable[Carry] = ()) -> list[str]:
        """The names found now for the first time; called where the loop asks for its next batch.

        Args:
            known: values that the loop takes from the tracker, such as counters.
            carries: a variable whose value one of them has by the same name is in the snapshot.
        """
        self.modules = of_modules() if self.modules is None else self.modules
        saved = {name: value for carry in carries for name, value in vars(carry).items()}
        count = len(self.names)
        for frame in frames_of_users(sys._getframe(1)):
            code, values = frame.f_code, frame.f_locals
            root = self.modules.get(frame.f_globals.get("__name__", "")) if values is frame.f_globals else None
            for name in _carried(code, instruction_at(frame)):
                value, before = values.get(name), self._before.get((code, name))
                is_known = isinstance(root, Variables) and name in root.assigned
                if is_known or (now := _compared(value, known)) is None:
                    continue
                self._before[code, name] = now
                if name in saved and (value is saved[name] or freeze(saved[name], depth=2) == now.frozen):
                    continue
                if before is not None and now.frozen != before.frozen and before.live() is not value:
                    is_new = name not in self.names and not self._clocks.are_read(value)
                    self.names += [name] if is_new else []
        self._clocks.look()
        self.names += sorted(loaders_beside().difference(self.names))
        return self.names[count:]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A variable at one look.

    Args:
        live: returns its value, if that changes within: what changes there is saved, or named with its object.
        frozen: what compares.
    """

    live: Callable[[], Any]
    frozen: Frozen


def _compared(value: Any, known: Collection[Any]) -> _Compared | None:
    """What of a variable may be state; None: nothing."""
    if isinstance(value, nn.Module):
        return _Compared(_reference(MISSING), ("module", id(value)))
    if is_used(value) and not isinstance(value, FunctionType | type):
        return _Compared(_reference(value), freeze(attributes_of(value), depth=2))
    if not isinstance(value, _KINDS) or isinstance(value, bool) or (isinstance(value, int) and value in known):
        return None
    return _Compared(_reference(value if changes_in_place(value) else MISSING), freeze(value, depth=2))


def calls_now() -> frozenset[tuple[CodeType, int]]:
    """The calls that are under way."""
    return frozenset((one.f_code, one.f_lasti) for one in frames_of_users(sys._getframe(1)))


def taking_part(
    own: Mapping[str, Any], sources: Mapping[str, Any], outside: frozenset[tuple[CodeType, int]]
) -> dict[str, Any]:
    """What takes part in training, by name: `own`, what these loaders read, and what `objects_used` finds."""
    read = (roots_of_loader(name, one.base) for name, one in sources.items())
    known = {**own, **{path: root for found in read for path, root in found.items()}}
    return {**known, **{name: value for name, value in objects_used(outside).items() if name not in known}}


def objects_used(outside: frozenset[tuple[CodeType, int]]) -> dict[str, UsedObject | Variables]:
    """Objects of the user's own classes, and functions, that the loops on the stack use, by the names that they have
    there, and variables of the loops whose values change within. Before a loop: of those that are behind.

    Args:
        outside: calls that are around the run: their loops are not part of it.
    """
    found: dict[str, UsedObject | Variables] = {}
    frames = list(frames_of_users(sys._getframe(1)))
    within_loop = any(
        loops_around(one.f_code, instruction_at(one)) for one in frames if (one.f_code, one.f_lasti) not in outside
    )
    for frame in frames:
        code = frame.f_code
        here = instruction_at(frame)
        around = loops_around(code, here)[-1:] or ([] if within_loop else loops_behind(code, here))
        if not around or (code, frame.f_lasti) in outside:
            continue
        values = {**frame.f_globals, **frame.f_locals}
        for name, value in reached(frozenset[str]().union(*(one.reads for one in around)), values):
            if not isinstance(value, DataLoader):
                found.setdefault(name, UsedObject(value))
        heads = [here] if within_loop else [one.head for one in around]
        carried = {name for head in heads for name in _carried(code, head)}
        carried -= {name for name in carried if name.startswith("__")}
        within = frozenset(name for name in carried if changes_in_place(frame.f_locals.get(name)))
        read = carried.difference(within, *(one.writes for one in loops_around(code, heads[0])))
        inputs = frozenset(name for name in read if is_drawn(frame.f_locals.get(name)))
        path = f"{code.co_name}()" if code.co_name.isidentifier() else "the loop()"
        if within or inputs:
            found.setdefault(path, Variables(partial(_variable, code), within=within, inputs=inputs))
    return found


def loaders_beside() -> set[str]:
    """Loaders that the loops on the stack use, that have a state between two passes, and that are not followed."""
    found = set()
    for frame in frames_of_users(sys._getframe(1)):
        for loop in loops_around(frame.f_code, instruction_at(frame))[-1:]:
            values = {**frame.f_globals, **frame.f_locals}
            read = dict(reached(loop.reads, values)) | {name: values.get(name) for name in loop.reads}
            for name, one in itertools.chain.from_iterable(_loaders_of(*row) for row in read.items()):
                if (one.persistent_workers or one.generator is not None) and followed_by(one) is None:
                    found.add(f"{_ITER}{name})")
    return found


def _loaders_of(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, DataLoader[Any]]]:
    """A loader, or those that something iterable has, as a prefetcher does, by how the script reaches them."""
    if isinstance(value, DataLoader):
        yield name, value
    elif depth and hasattr(type(value), "__iter__") and not of_framework(type(value)):
        rows = [(f"{name}[{key!r}]", one) for key, one in items_of(value)]
        rows += [(f"{name}.{key}", one) for key, one in (attributes_of(value) or {}).items()]
        yield from itertools.chain.from_iterable(_loaders_of(*row, depth - 1) for row in rows)


def _variable(code: CodeType, name: str) -> Any:
    """The value of a variable of a function that is running."""
    frame = next((one for one in frames_of_users(sys._getframe(1)) if one.f_code is code), None)
    return MISSING if frame is None else frame.f_locals.get(name, MISSING)


def _reference(value: Any) -> Any:
    """Without keeping the object alive, where its class allows that."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def sentence(names: Sequence[str]) -> str:
    """What users read of such variables."""
    plain = [name for name in names if not name.startswith(_ITER)]
    beside = [name.removeprefix(_ITER)[:-1] for name in names if name.startswith(_ITER)]
    said = [_CARRIED.format(", ".join(plain), "is" if len(plain) == 1 else "are", plain[0])] if plain else []
    return "; ".join([*said, *(_BESIDE.format(name, re.split(r"\W", name)[0]) for name in beside)])


def frames_around(frame: FrameType) -> Iterator[FrameType]:
    """The frames that are not our own, innermost first."""
    others = (one for one, _ in traceback.walk_stack(frame) if not _is_ours(one.f_code.co_filename))
    return itertools.islice(others, _MOST_FRAMES)


@cache
def _is_ours(file: str) -> bool:
    return file.startswith("<frozen") or any(part in file for part in OURS)


def is_of_user(frame: FrameType) -> bool:
    """Whether this is the user's own code, and no library's."""
    return not is_library_file(frame.f_code.co_filename)


def frames_of_users(frame: FrameType) -> Iterator[FrameType]:
    """The frames of the user's own code, innermost first; of a function that calls itself the innermost one only."""
    seen = set[CodeType]()
    for one in filter(is_of_user, frames_around(frame)):
        if one.f_code not in seen:
            seen.add(one.f_code)
            yield one


@dataclass(frozen=True, slots=True)
class Repeated:
    """One loop in a function's bytecode.

    Args:
        head: offset of its first instruction; of a `for`, of the one that asks the iterator.
        end: offset of its last jump back.
        targets: variables that a `for` sets itself.
        writes: variables that its body sets.
        reads: variables that its body reads, global ones too.
    """

    head: int
    end: int
    targets: frozenset[str]
    writes: frozenset[str]
    reads: frozenset[str]


def loops_around(code: CodeType, offset: int) -> list[Repeated]:
    """The loops that this instruction is in, innermost first; the one that asks a `for`'s iterator is in that loop."""
    return [one for one in _loops(code) if one.head <= offset <= one.end]


def loops_behind(code: CodeType, offset: int) -> list[Repeated]:
    """The loops of a function that come after this instruction."""
    return [one for one in _loops(code) if one.head > offset]


def instruction_at(frame: FrameType) -> int:
    """The offset of the instruction that this frame is at; in a call, `f_lasti` may be that of a cache entry."""
    rows, offsets = instructions(frame.f_code)
    here = bisect.bisect_right(offsets, frame.f_lasti) - 1
    return offsets[here + (rows[here].opname == "PRECALL")]  # of 3.11: a call that has run often is at the first of two


def counters_of(frame: FrameType) -> dict[str, int]:
    """Whole numbers that the loops around this frame's instruction count on: they say which step this is."""
    code, here = frame.f_code, instruction_at(frame)
    around = loops_around(code, here)
    names = {name for loop in around if loop.head != here for name in loop.targets}
    names |= set(_carried(code, here)) & {name for loop in around for name in loop.writes}
    values = frame.f_locals
    return {name: values[name] for name in sorted(names) if type(values.get(name)) is int}


def made_before(frame: FrameType) -> dict[str, str]:
    """Digests of tensors and arrays that a turn of the loops makes before this frame's instruction, and reads later."""
    code, here = frame.f_code, instruction_at(frame)
    written = frozenset[str]().union(*(loop.writes - loop.targets for loop in loops_around(code, here)))
    names = sorted(written & _read_behind(code, here) - set(_carried(code, here))) if written else []
    values = ((name, frame.f_locals.get(name)) for name in names)
    return {name: digest(freeze(one)) for name, one in values if isinstance(one, torch.Tensor | np.ndarray)}


def local_values(frame: FrameType) -> tuple[list[Any], list[Any]]:
    """Values of local variables that this frame may read again, and of those that it does not."""
    code, here = frame.f_code, instruction_at(frame)
    values = dict(frame.f_locals)
    if not loops_around(code, here):
        return list(values.values()), []
    read = _read_behind(code, here)
    return [values[name] for name in values if name in read], [values[name] for name in values if name not in read]


def _read_behind(code: CodeType, here: int) -> frozenset[str]:
    """The variables that may be read behind this instruction before they are set."""
    rows, offsets = instructions(code)
    live, position = _liveness(code), bisect.bisect_left(offsets, here)
    return frozenset[str]().union(*(live[one] for one in _next(rows, offsets, position, {})))


@lru_cache(maxsize=256)
def instructions(code: CodeType) -> tuple[list[dis.Instruction], list[int]]:
    """Those of a function, without cache entries, and their offsets."""
    rows = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    return rows, [one.offset for one in rows]


@lru_cache(maxsize=256)
def _loops(code: CodeType) -> list[Repeated]:
    rows, _ = instructions(code)
    found = []
    for head, end in _ends_of(rows).items():
        body = [one for one in rows if head <= one.offset <= end]
        targets = _targets_of(body) if body[0].opname == "FOR_ITER" else frozenset[str]()
        writes = frozenset[str]().union(*(_uses(one)[1] for one in body))
        reads = frozenset(one.argval for one in body if one.opname == "LOAD_GLOBAL")
        reads = reads.union(*(_uses(one)[0] for one in body))
        found.append(Repeated(head, end, targets, writes, reads))
    return sorted(found, key=lambda loop: loop.end - loop.head)


def _ends_of(rows: list[dis.Instruction]) -> dict[int, int]:
    """The offsets of the last jumps back, by those of the first instructions of loops."""
    return {row.argval: row.offset for row in rows if row.opcode in dis.hasjrel and row.argval <= row.offset}


@lru_cache(maxsize=256)
def _carried(code: CodeType, offset: int) -> tuple[str, ...]:
    """Variables that a loop around the instruction at `offset` may read before it writes them in the same step."""
    rows, offsets = instructions(code)
    heads = [bisect.bisect_left(offsets, one.head) for one in loops_around(code, offset)]
    if not heads:
        return ()
    live = _liveness(code)
    begins = (head + (rows[head].opname == "FOR_ITER") for head in heads)
    return tuple(sorted(frozenset[str]().union(*(live[one] for one in begins)) - _loop_targets(rows)))


@lru_cache(maxsize=256)
def _liveness(code: CodeType) -> list[frozenset[str]]:
    """The variables that may be read from each instruction of a function on before they are set."""
    rows, offsets = instructions(code)
    ends = _ends_of(rows)
    following = [_next(rows, offsets, position, ends) for position in range(len(rows))]
    uses = [_uses(row) for row in rows]
    live: list[frozenset[str]] = [frozenset()] * (len(rows) + 1)
    changed = True
    while changed:
        changed = False
        for position in range(len(rows) - 1, -1, -1):
            after = frozenset[str]().union(*(live[one] for one in following[position]))
            reads, writes = uses[position]
            before = (after - writes) | reads
            if before != live[position]:
                live[position], changed = before, True
    return live


def _next(rows: list[dis.Instruction], offsets: list[int], position: int, ends: Mapping[int, int]) -> list[int]:
    """The instructions that may come after one; of a loop that begins, its body: loops of no step do not train.

    Args:
        ends: of loops, by their heads.
    """
    row = rows[position]
    then = rows[position + 1] if position + 1 < len(rows) else row
    begins = then.opname == "FOR_ITER"
    following = [] if row.opname in _ENDS or row.opname in _JUMPS else [position + 1 + begins]
    jumps = row.opcode in dis.hasjrel or row.opcode in dis.hasjabs
    if jumps and (begins or row.argval <= ends.get(then.offset, len(rows) << 8)):
        following.append(bisect.bisect_left(offsets, row.argval))
    return [one for one in following if one < len(rows)]


def _uses(row: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that an instruction reads, and those it writes."""
    names = row.argval if isinstance(row.argval, tuple) else (row.argval,)
    texts = [str(name) for name in names]
    if row.opname.startswith("STORE_FAST_LOAD_FAST"):
        return frozenset(texts[1:]) - frozenset(texts[:1]), frozenset(texts[:1])
    if row.opname.startswith(_LOADS):
        return frozenset(texts), frozenset()
    if row.opname.startswith(_STORES):
        return frozenset(), frozenset(texts)
    return frozenset(), frozenset()


def _loop_targets(rows: list[dis.Instruction]) -> frozenset[str]:
    """Variables that a `for` sets itself: the loop goes on where its iterable does."""
    begins = (position for position, row in enumerate(rows) if row.opname == "FOR_ITER")
    return frozenset[str]().union(*(_targets_of(rows[position:]) for position in begins))


def _targets_of(rows: list[dis.Instruction]) -> frozenset[str]:
    """Those of the `for` that these instructions begin with."""
    found: set[str] = set()
    pending = 1
    for one in rows[1:]:
        if one.opname == "UNPACK_SEQUENCE":
            pending += int(one.arg or 0) - 1
        elif one.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF")):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            found.update(map(str, names))
            pending -= len(names)
        else:
            break
        if pending <= 0:
            break
    return frozenset(found)
