"""Where in the script a loop asks its loaders, through which iterators, and how far ahead of training; whether a
resumed script does the same.
"""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import linecache
import operator
import re
import sys
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

import torch

from ckpt_engine.audit.carried import (
    counters_of,
    frames_around,
    instruction_at,
    instructions,
    is_of_user,
    local_values,
    loops_around,
    made_before,
)
from ckpt_engine.audit.source import only_shows_its_count
from ckpt_engine.data.streams import Proxy
from ckpt_engine.data.walk import leaves, walk
from ckpt_engine.whose_code import is_framework_name

At = Sequence[tuple[CodeType, int]]
"""Functions on the stack and the instructions they are at, innermost first."""
Home = frozenset[CodeType]
"""Of the functions that were running when tracking began: what is around them is not part of the loop."""
Place = list[list[Any]]
"""Rows of the functions on the stack, innermost first: name, digest of the code, line in it, text of the line."""

_KEEPS: tuple[type, ...] = (itertools.cycle, itertools.zip_longest, type(itertools.tee(())[0]))
_AROUND = (enumerate, zip, itertools.islice, itertools.chain, itertools.starmap, map, filter, *_KEEPS)
_LOOKED_AT = frozenset(map(id, (*_AROUND, GeneratorType)))
"""Ids, as not every class can be hashed; most programs have half a million objects."""
Count = tuple[str, int | None, int]
"""An iterator's kind, where it is, None if that cannot be known, and what each batch adds to that."""
_NAMES = frozenset(one.__name__ for one in (enumerate, zip, itertools.islice))
_MOST_PASSES = 2
_MOST_TENSORS = 1000
_COUNT = re.compile(r"count\((-?\d+)")


class Ask:
    """The place from which a loader is asked for a batch, right now.

    Args:
        home: of the loop.
    """

    def __init__(self, home: Home) -> None:
        self.frames: list[FrameType] = []
        for frame in frames_around(sys._getframe(1)):
            self.frames.append(frame)
            if frame.f_code in home:
                break
        self.at: At = [(frame.f_code, instruction_at(frame)) for frame in self.frames]

    @property
    def of_user(self) -> bool:
        """Whether the user's own code is part of the loop; else a library runs it."""
        return any(map(is_of_user, self.frames))

    def line(self) -> str:
        """File and line of the user's code, for messages."""
        frame = next(filter(is_of_user, reversed(self.frames)))
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    def numbers(self) -> dict[str, int]:
        """What the user's loops count, by function and variable."""
        return {
            f"{frame.f_code.co_qualname}.{name}": value
            for frame in self.frames
            if is_of_user(frame)
            for name, value in counters_of(frame).items()
        }

    def made_before(self) -> dict[str, str]:
        """What a turn of the user's loops makes before it asks, by function and variable."""
        frames = filter(is_of_user, self.frames)
        return {f"{one.f_code.co_qualname}.{name}": made for one in frames for name, made in made_before(one).items()}

    def local_values(self) -> tuple[list[Any], list[Any]]:
        """Values of local variables that the loop may read again, and of those that it does not."""
        found = [local_values(frame) for frame in self.frames]
        return [value for live, _ in found for value in live], [value for _, dead in found for value in dead]

    def name_of(self, value: Any) -> str | None:
        """What the user calls an object; None: each turn of a loop makes it, and no later one reads it."""
        live, dead = map(frozenset, (map(id, values) for values in self.local_values()))
        if id(value) in dead - live:
            return None
        for frame in filter(is_of_user, self.frames):
            for name, one in frame.f_locals.items():
                if one is value:
                    return name
                for inner, other in getattr(one, "__dict__", {}).items():
                    if other is value:
                        return f"{name}.{inner}"
        return type(value).__name__

    def only_shows_its_count(self) -> bool:
        """Whether the counter of the `enumerate` that the loop is over is only printed or logged."""
        return any(is_of_user(frame) and only_shows_its_count(frame) for frame in self.frames)

    def keeps(self, iterator: Any) -> bool:
        """Whether the loop itself has this iterator, in a variable or an attribute: others around it come and go."""
        values = [value for frame in self.frames for value in frame.f_locals.values()]
        return any(one is iterator for value in values for one in (value, *getattr(value, "__dict__", {}).values()))

    def kept_in_generators(self) -> set[int] | None:
        """Ids of the tensors in variables that generators around the loader read later; None: there is no generator.

        Those of trainers do not count: what they read ahead is known.
        """
        inside = [one for one in self.frames if _is_generator(one) and not is_framework_name(one.f_globals["__name__"])]
        live = [value for frame in inside for value in local_values(frame)[0]]
        return _ids_in(live) if inside else None

    def is_in_generator(self) -> bool:
        """Whether a generator asks, which may begin one pass after the other."""
        return any(map(_is_generator, self.frames))

    def may_wrap(self) -> bool:
        """Whether the loop's code names an iterator that counts."""
        return any(not _NAMES.isdisjoint(frame.f_code.co_names) for frame in self.frames)


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def code_now() -> Home:
    """Of the functions that are running."""
    return frozenset(frame.f_code for frame in frames_around(sys._getframe(1)))


def way_here(home: Home) -> list[tuple[CodeType, int]]:
    """Functions around the caller and where they are, ours too: who asks again from the same place has the same."""
    way: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        way.append((frame.f_code, frame.f_lasti))
        if frame.f_code in home:
            break
        frame = frame.f_back
    return way


def is_here(way: Sequence[tuple[CodeType, int]]) -> bool:
    """Whether that is the way that `way_here` would find. It hashes no code, which takes longer than all of this."""
    frame: FrameType | None = sys._getframe(2)
    for code, offset in way:
        if frame is None or frame.f_code is not code or frame.f_lasti != offset:
            return False
        frame = frame.f_back
    return bool(way)


def place_of(at: At) -> Place:
    """As a snapshot stores it."""
    return [list(_row(code, offset)) for code, offset in at]


def is_same(saved: Place, now: Place) -> bool:
    """Whether two places are the same one; of code that was edited since, whether the lines are the same."""
    pairs = list(zip(saved, now, strict=False))
    return bool(pairs) and all(a[0] == b[0] and (a[2] == b[2] if a[1] == b[1] else a[3] == b[3]) for a, b in pairs)


def is_in_body(outer: At, inner: At) -> bool:
    """Whether `inner` asks from the body of a `for` that asks from `outer`."""
    here = dict(reversed(inner))
    loops = ((code, one) for code, offset in outer for one in loops_around(code, offset) if one.head == offset)
    return any(one.head < here.get(code, -1) <= one.end for code, one in loops)


def is_before(first: At, then: At) -> tuple[bool, bool]:
    """Whether each turn of a loop asks from `first` before `then`; and whether that one is in a loop inside."""
    here = dict(reversed(then))
    for code, offset in first:
        loop = next(iter(loops_around(code, offset)), None)
        if loop is not None and code in here and loop.head < offset < here[code] <= loop.end:
            return True, loops_around(code, here[code])[0] != loop
    return False, False


def does_anything(code: CodeType, begin: int, end: int) -> bool:
    """Whether there is more than a condition between two instructions."""
    rows = (one.opname for one in instructions(code)[0] if begin <= one.offset < end)
    return any(name.startswith(("STORE", "CALL", "POP_TOP", "YIELD")) for name in rows)


@lru_cache(maxsize=256)
def _row(code: CodeType, offset: int) -> tuple[Any, ...]:
    line = line_of(code, offset)
    text = linecache.getline(code.co_filename, line).strip()
    return code.co_qualname, zlib.crc32(code.co_code), line - code.co_firstlineno, text


def line_of(code: CodeType, offset: int) -> int:
    starts = (line for start, line in dis.findlinestarts(code) if start <= offset and line)
    *_, line = (code.co_firstlineno, *starts)
    return line


# ---- iterators between a loader and the loop


class Around:
    """The iterators of Python between a pass and the loop that asks it, which count by themselves.

    Args:
        inner: the pass.
        ask: from where it is asked right now.
        everywhere: look at every object, and not only at those that were made a moment ago.
    """

    def __init__(self, inner: Any, ask: Ask, *, everywhere: bool) -> None:
        objects = gc.get_objects() if everywhere else gc.get_objects(0) + gc.get_objects(1)
        objects = [*itertools.compress(objects, map(_LOOKED_AT.__contains__, map(id, map(type, objects))))]
        frames = set(map(id, ask.frames))
        inside = {id(inner)} | {id(one) for one in map(_receiver, ask.frames) if one is not None}
        inside |= {id(g) for g in objects if type(g) is GeneratorType and g.gi_running and id(g.gi_frame) in frames}
        candidates = [one for one in objects if type(one) is not GeneratorType]
        self._found: list[Any] = []
        while new := [one for one in candidates if id(one) not in inside and inside & set(map(id, _members(one)))]:
            inside |= set(map(id, new))
            self._found += new
        self._inside = inside

    @property
    def keeps(self) -> str:
        """The kind of one that keeps batches or an end for itself, or ""."""
        return next((type(one).__name__ for one in self._found if isinstance(one, _KEEPS)), "")

    def counts(self) -> list[Count]:
        """Where each is."""
        return [(type(one).__name__, *found) for one in self._found for found in self._count(one)]

    def advance(self, saved: Sequence[Sequence[Any]]) -> None:
        """Let each `islice` that starts again count what was given before."""
        for one, (kind, before, _) in zip(self._found, saved, strict=False):
            state = _slice(one)
            if state is not None and kind == "islice" and before is not None and state[0] == state[1] and state[2] == 1:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    one.__setstate__(before)

    def _count(self, one: Any) -> Iterator[tuple[int | None, int]]:
        if isinstance(one, enumerate):
            yield int(one.__reduce__()[1][1]), 1
        elif isinstance(one, itertools.islice):
            state = _slice(one)
            yield None if state is None else state[0], 1
        elif isinstance(one, zip):
            for other in _members(one):
                if isinstance(other, Iterator) and id(other) not in self._inside and not _is_followed(other):
                    yield _where(other)


def later(counts: Sequence[Count], batches: int) -> list[Count]:
    """Where they are after so many more batches."""
    return [(kind, None if number is None else number + sign * batches, sign) for kind, number, sign in counts]


def differences(name: str, saved: Sequence[Sequence[Any]], now: Sequence[Count], given: int, ask: Ask) -> list[str]:
    """Sentences about iterators around loader `name` that do not go on where they were after `given` batches."""
    found, line = [], ask.line()
    alone = sum(kind == "enumerate" for kind, _, _ in now) == 1
    for number, (kind, count, _) in enumerate(now):
        before = saved[number][1] if number < len(saved) and saved[number][0] == kind else None
        if count is not None and count == (given if before is None and kind != "zip" else before):
            continue
        if kind == "enumerate" and alone and ask.only_shows_its_count():
            continue
        start = "" if before in (None, given) else f"{before - given} + "
        again = {
            "enumerate": f"counts again after {given} batches: enumerate(…, {start}run.resumed_batches)",
            "islice": f"gives as many batches again after {given}: stop at n - run.resumed_batches",
            "zip": f"takes the other values from their beginning again after {given} batches: start them at "
            "run.resumed_batches, as in range(run.resumed_batches, n), or track the loader they come from",
        }
        found.append(f"{kind} around {name!r} ({line}) {again[kind]}")
    return found


def _receiver(frame: FrameType) -> Any:
    """What a method that is running belongs to."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_name == "__next__" else None


def _members(one: Any) -> Iterable[Any]:
    referents = gc.get_referents(one)
    inner = itertools.chain(referents, *(each for each in referents if type(each) is tuple))
    return {id(each): each for each in inner}.values()


def _is_followed(other: Any) -> bool:
    """Whether it takes from a pass, through however many iterators: that one's `Around` has its count."""
    return any(isinstance(one, Proxy) for _, one in walk(("", other), _iterators_in, sys.maxsize))


def _iterators_in(path: str, one: Any) -> list[tuple[str, Any]]:
    return [(path, each) for each in _members(one) if isinstance(each, Iterator)]


def _slice(one: Any) -> tuple[int, int, int] | None:
    """Of an `islice`: its count, the next item it gives, and its step; None where this Python does not tell."""
    if not isinstance(one, itertools.islice) or not hasattr(one, "__setstate__"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        reduced: Any = one.__reduce__()
    if len(reduced[1]) != 4:
        return None  # it has ended
    _, following, _, step = reduced[1]
    return int(reduced[2]), int(following), int(step)


def _where(other: Any) -> tuple[int | None, int]:
    """How far an iterator is, and what a step adds to that."""
    counts = _COUNT.match(repr(other)) if isinstance(other, itertools.count) else None
    if counts:
        return int(counts[1]), 1
    try:
        return (operator.length_hint(other) if hasattr(other, "__length_hint__") else None), -1
    except TypeError:
        return None, -1


# ---- reading ahead


class Lead:
    """How many batches a loop has asked for at a boundary and trains on later.

    Its first step of a pass takes that many more batches than each later one, and it asks for them from another line,
    or keeps them.
    """

    def __init__(self) -> None:
        self.ahead: int | None = None
        """None: not known yet."""
        self.unclear = 0
        """Batches that the first step took more, for no reason that was seen."""
        self.recorded = 0
        """Batches given since their positions are recorded."""
        self._first: int | None = None
        self._before = set[int]()
        """What the generators around the loader kept when the pass was asked for its first batch."""
        self._since = self._elsewhere = self._kept = self._vain = 0
        self._asked: list[At] = []
        self._given: list[weakref.ref[torch.Tensor]] = []

    @property
    def is_recorded(self) -> bool:
        """Whether the position of the first batch that is to be asked for again was recorded."""
        return self.recorded >= (self.ahead or 0)

    def begin(self) -> None:
        """A pass begins."""
        if self.ahead is None and self._first is not None:
            self._vain += 1
            if self._vain == _MOST_PASSES:  # passes of one step: no later step to compare with
                self.ahead, self.unclear = 0, self._first - 1
        self._first, self._since = None, 0
        self._asked, self._given = [], []

    def starts(self, ask: Ask) -> None:
        """The loop asks for the first batch of the pass."""
        self._before = ask.kept_in_generators() or set()

    def asked(self, at: At) -> None:
        """The loop asks from there."""
        self._asked.append(at)

    def given(self, batch: Any) -> None:
        """It gets that."""
        self._since += 1
        self._given.extend(weakref.ref(one) for one in itertools.islice(tensors_of(batch), 1))

    def boundary(self, ask: Ask) -> None:
        """A step is complete and the loop asks for the next batch."""
        asked, self._since = self._since, 0
        if not asked:
            return
        if self._first is None:
            self._first = asked
            live, dead = ask.local_values()
            dropped = _ids_in(dead) - _ids_in(live)
            # A compiler may have put the condition of a loop into two places: lines are compared.
            places = [place_of(at) for at in self._asked]
            self._elsewhere = sum(one != places[-1] for one in places[:asked])
            kept = sum((one := each()) is not None and id(one) not in dropped for each in self._given)
            # A generator may keep a changed copy of what it has read ahead.
            in_generators = ask.kept_in_generators()
            self._kept = max(kept, len((in_generators or set()) - self._before))
            if asked == 1 or not (self._elsewhere or self._kept or in_generators is not None):
                self.ahead = 0
        else:
            extra = max(self._first - asked, 0)
            evident = self._elsewhere >= extra or self._kept >= extra
            self.ahead, self.unclear = (extra, 0) if evident else (0, extra)
        if self.ahead is not None:
            self._asked, self._given = [], []


def _ids_in(values: Iterable[Any]) -> set[int]:
    return {id(one) for value in values for one in itertools.islice(tensors_of(value), _MOST_TENSORS)}


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Those in any nesting."""
    return (one for one in leaves(batch) if isinstance(one, torch.Tensor))
