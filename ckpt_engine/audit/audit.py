"""The audit of one run: what its snapshots have beside the declared state, and what they cannot have.

Hidden state: attributes that training changes and no `state_dict` names. Saved, and put back where that is safe.
"""

from __future__ import annotations

import itertools
import logging
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ckpt_engine.audit.attributes import REFERENCES, AttributeHolder, Walk
from ckpt_engine.audit.carried import CarriedLocals, Carry, sentence
from ckpt_engine.audit.roots import KeptDraws, of_modules
from ckpt_engine.audit.source import attribute_decides
from ckpt_engine.audit.values import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    PLAIN,
    Clocks,
    Frozen,
    Looked,
    address,
    changes_within,
    digest,
    exchanged,
    fill,
    freeze,
    is_drawn,
    is_iterator,
    nbytes_of,
    shapes,
    tensors_in,
    text_of,
    type_of,
)
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.plugins import is_library, of_framework
from ckpt_engine.state.flatten import Flattener, problems

Roots = Callable[[], Mapping[str, Any]]
_FIRST_LOOKS = 3


Mode = Literal["auto", "report", "off"]
MOST_BYTES = 256 << 20
"""Bytes of hidden tensors and arrays that one snapshot takes."""
_LARGE_BYTES = 1 << 20
_SHOWN_CHARACTERS = 40
_SIZED = frozenset({"dict", "list", "tuple", "deque", "set"})
_AHEAD = "its loader reads batches before the step that they are for begins, without workers"
_MOST_KEYS = 10_000
_NO_LIST = ((), ("list", -1))
"""Beside a key and its value, frozen: any list has more."""
_ONCE = "it is set in the first step of each process"
_UNSEEN = "nothing shows what it holds"
_PROCESS = Clocks(of_process=True)
_MOST_INPUTS, _MOST_NAMED = 1000, 5
_DIFFER = (
    "{} {} not what the first process had: seed the script before {} drawn, or keep {} in track(…, carry=Carry(…))"
)


class HiddenState:
    """What training changes beside the state that is saved anyway.

    A process begins at two moments: `note("start", …)` before its first epoch, and `note("batch", …)` right before
    its first batch. A resumed process compares itself with the first one at either.

    Args:
        mode: auto: save and restore; report: only name; off: nothing.
        skipped: attributes of the trainer's own classes.
    """

    def __init__(self, mode: Mode, skipped: Iterable[str] = ()) -> None:
        self._mode = mode
        self.on = mode != "off"
        """Whether anything is looked at."""
        self.skipped = frozenset(skipped)
        self._moments: dict[str, _Beginning] = {}
        self._before: _Beginning | None = None
        self._unrepeated: dict[str, _Unrepeated] = {}
        self._saved: Mapping[str, Any] = {}
        self._first: dict[str, Mapping[str, str]] = {}
        """Of attributes that an earlier process has changed: what they were when the run's first process began."""
        self._kept: frozenset[str] = frozenset()
        """Those of them that are no flags of a process."""
        self._flattener = Flattener()
        self._inputs: Mapping[str, Mapping[str, str]] = {}
        """What the run's first process began with and training did not change: by moment digests by path."""
        self._named: set[str] = set()
        self._once: frozenset[str] | None = None
        """Flags of objects that are no modules, which the first step of a process sets: most say that something, such
        as an open file, is ready in this process."""

    def note(self, moment: str, roots: Mapping[str, Any]) -> None:
        """Note what all attributes are now.

        Args:
            roots: the objects that take part in training, by the names that users know them by.
        """
        self._moments[moment] = begun = _Beginning(roots, self.skipped)
        if self._before is not None:
            self._unrepeated = dict(self._before.differences(begun))
            self._before = None
        begun.take_back(self._unrepeated)

    def note_unrepeated(self, roots: Mapping[str, Any]) -> None:
        """What follows, up to the first moment, only the run's first process does, such as a check of the validation.

        What it changes counts as changed: another process begins with what was there before.
        """
        self._before = _Beginning(roots, self.skipped)

    def stepped(self) -> None:
        """The process has made a step. The first one counts that can be compared with a beginning."""
        if self._once is None and (latest := self._latest) is not None:
            self._once = frozenset(
                path
                for path, value in latest.moved()
                if isinstance(value, bool) and path not in self._kept and not latest.is_of_module(path)
            )

    @property
    def _latest(self) -> _Beginning | None:
        return self._moments.get("batch") or self._moments.get("start")

    def state(self, ahead: Iterable[str] = ()) -> dict[str, Any]:
        """What has moved, for a snapshot: by path the class, what it was at the beginning, and the live value.

        Args:
            ahead: the beginnings of paths to what is further than training: no value of theirs fits the snapshot.
        """
        prefixes = tuple(f"{name}." for name in ahead)
        rows: dict[str, Any] = {}
        objects: dict[int, str] = {}
        nbytes = 0
        latest = self._latest
        for path, value in itertools.chain(latest.moved(), latest.states_of(self._first)) if latest is not None else ():
            if path in rows:
                continue
            why = _AHEAD if prefixes and f"{path}.".startswith(prefixes) else self._why_not(path, value)
            if not why and (size := nbytes_of(value)):
                nbytes += size
                why = f"it is larger than the {MOST_BYTES >> 20} MiB of hidden state" if nbytes > MOST_BYTES else ""
            begin = self._first.get(path) or self._begin_of(path)
            if why == _ONCE and latest is not None and latest.is_of_library(path):
                continue  # its package sets it in each process
            rows[path] = {"type": type_of(value), "begin": begin} | ({"why": why} if why else {"value": value})
            if latest is not None and not why and changes_within(value):
                rows[path] |= {"object": objects.setdefault(id(value), path), "kept": latest.kept(path, value)}
            if isinstance(value, torch.Tensor) and value.is_leaf and not why:
                rows[path]["requires_grad"] = value.requires_grad
        for path, value in latest.opaque(rows) if latest is not None else ():
            rows[path] = {"type": type_of(value), "begin": {}, "why": _UNSEEN}
        return rows

    def inputs(self, rows: Collection[str]) -> dict[str, dict[str, str]]:
        """What the run's first process began with and training only reads: by moment digests by path.

        Args:
            rows: of `state`.
        """
        found = {moment: one.inputs(rows) for moment, one in self._moments.items()}
        first = self._inputs
        return {
            moment: {path: first.get(moment, {}).get(path, was) for path, was in one.items()}
            for moment, one in found.items()
        }

    def ids(self) -> set[int]:
        """Of the objects that have moved and that a snapshot has."""
        rows = self._latest.moved() if self._latest else ()
        return {id(value) for path, value in rows if not self._why_not(path, value)}

    def frozen(self, *, quick: bool = False) -> dict[str, Frozen]:
        """What has moved, as values that compare.

        Args:
            quick: a tensor or array that is the same object, of the same version, is taken for what it was when it was
                looked at last. Compared with a look that is not quick, what was written unseen shows.
        """
        return {} if self._latest is None else {path: one for path, _, one in self._latest.changes(quick=quick)}

    def unsaved(self, rows: Mapping[str, Any]) -> list[str]:
        """Sentences about those of `state` that no snapshot has, each once in the life of this object."""
        new = [path for path, row in rows.items() if row.get("why", _ONCE) != _ONCE and path not in self._named]
        self._named.update(new)
        return [f"{path} ({rows[path]['type']}): {rows[path]['why']}" for path in new]

    def expect(self, rows: Mapping[str, Any], inputs: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        """A snapshot's hidden state, which `restore` puts back later, and what its first process began with."""
        self._saved, self._inputs = rows, inputs
        self._first = {path: row["begin"] for path, row in self._saved.items()}
        self._kept = frozenset(path for path, row in self._saved.items() if row.get("why") != _ONCE)

    def restore(self, moment: str) -> tuple[list[Restored], list[NotRestored]]:
        """Put back what was expected, where this process began as the run's first one did.

        Args:
            moment: of `note`, the one that the process is at.
        """
        saved, self._saved = self._saved, {}
        begun = self._moments.get(moment)
        if begun is None:
            return [], []
        done, missing, live = [], [], dict[int, Any]()
        for path, row in sorted(saved.items(), key=lambda one: isinstance(one[1].get("value"), CONTAINERS)):
            if "value" in row:
                row = {**row, "value": exchanged(row["value"], live)}
            if (why := _put_back(path, row, begun, row["begin"].get(moment))) is None:
                done.append(path)
                live[id(row["value"])] = begun.value_at(path)
            elif why:
                missing.append(NotRestored(f"hidden state {path}", f"{why}; {remedy(path, row['type'])}"))
        first = self._inputs.get(moment, {})
        if others := [path for path, was in first.items() if begun.input_at(path) not in ("", was)]:
            missing.append(NotRestored("values made at start", differing(others)))
        done.sort(key=list(saved).index)
        return [Restored("hidden state", ", ".join(done))] if done else [], missing

    def _why_not(self, path: str, value: Any) -> str:
        if path in (self._once or ()):
            return _ONCE
        if self._mode == "report":
            return "hidden: report only names it"
        if self._latest is not None and self._latest.is_saved(value):
            return "it shares the memory of a weight or buffer, which a copy of it would not follow"
        if isinstance(value, KeptDraws):
            return "its results were drawn at random, and functools keeps them"
        if is_iterator(value):
            return "it is a running iterator, whose position cannot be seen"
        return problems(value, (path,), self._flattener) or ""

    def _begin_of(self, path: str) -> Mapping[str, str]:
        return {moment: digest(one.frozen[path]) for moment, one in self._moments.items() if path in one.frozen}


class Audit(HiddenState):
    """Looks at the objects that take part in training, and at the loop's local variables.

    Args:
        mode: the option `hidden`.
        roots: the objects, by the names that users know them by.
        log: of the adapter.
        skipped: attributes of the trainer's own classes.
        ahead: the first names of objects that are further than training.
    """

    def __init__(
        self,
        mode: Mode,
        roots: Roots,
        log: logging.Logger,
        skipped: Iterable[str] = (),
        ahead: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        super().__init__(mode, skipped)
        self.roots, self._ahead, self._log = roots, ahead, log
        self._locals = CarriedLocals()
        self._looks, self.looks_early = 0, self.on
        """Whether `boundary` looks where no snapshot is taken."""
        self._carried: list[str] = []

    def begin(self, moment: str) -> None:
        """See `HiddenState.note`."""
        if self.on:
            self._locals.modules = of_modules()
            self.note(moment, {**self._locals.modules, **self.roots()})

    def begin_unrepeated(self) -> None:
        """See `HiddenState.note_unrepeated`."""
        if self.on:
            self.note_unrepeated({**of_modules(), **self.roots()})

    def boundary(self, known: Collection[Any], *, taking: bool) -> None:
        """The loop is between two steps, and its frames are on this thread's stack.

        Args:
            known: values of counters that the loop takes from the tracker.
            taking: a snapshot is taken here. Variables are compared there, before the first step and at the first
                boundaries: what a step has changed is then known to the first snapshot.
        """
        if not self.on or not (taking or self._looks < _FIRST_LOOKS):
            return
        self._looks += 1
        self.looks_early = self._looks < _FIRST_LOOKS
        roots = self.roots().values()
        carries = [one for one in roots if isinstance(one, Carry)]
        if new := self._locals.look(known, carries, self.ids):
            self._log.warning("%s", sentence(new))

    def for_snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Small plain values, and large ones by path. What no snapshot has is logged once."""
        rows = self.state(self._ahead()) if self.on else {}
        if new := self.unsaved(rows):
            self._log.warning("training changes state that no snapshot has: %s", "; ".join(new))
        small, large = taken_apart(rows)
        return {"attributes": small, "locals": self._locals.names, "inputs": self.inputs(rows)}, large

    def resumes(self, small: Mapping[str, Any], large: Mapping[str, Any]) -> None:
        """What `for_snapshot` gave for the snapshot that this process resumes from."""
        if small and self.on:
            self.expect(put_together(small["attributes"], large), small.get("inputs", {}))
            self._carried = list(small["locals"])

    def restore(self, moment: str) -> tuple[list[Restored], list[NotRestored]]:
        restored, missing = super().restore(moment)
        if self._carried:
            missing.append(NotRestored("local variables", sentence(self._carried)))
            self._carried = []
        return restored, missing


def all_attributes(roots: Mapping[str, Any], skipped: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Class and digest of every attribute that is looked at, by path, moved or not.

    Args:
        roots, skipped: as for `HiddenState`.
    """
    return _Beginning({**of_modules(), **roots}, skipped).described()


def taken_apart(rows: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of `HiddenState.state` with small values, and the large values alone, by path."""
    large = {path for path, row in rows.items() if nbytes_of(row.get("value")) > _LARGE_BYTES}
    small = {path: {k: v for k, v in row.items() if k != "value" or path not in large} for path, row in rows.items()}
    return small, {path: rows[path]["value"] for path in large}


def put_together(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `taken_apart`."""
    return {path: {**row, "value": large[path]} if path in large else row for path, row in small.items()}


@dataclass(frozen=True, slots=True)
class _Unrepeated:
    """An attribute before something that no other process does, frozen too, and as it was after that."""

    value: Any
    before: Frozen
    after: Frozen


class _Beginning:
    """What all attributes are at one moment."""

    def __init__(self, roots: Mapping[str, Any], skipped: Iterable[str]) -> None:
        walk = Walk(roots, skipped)
        self._opaque = walk.opaque
        self._clocks, self._readings = Clocks(), dict[str, bool]()
        """Of paths that have moved: whether they hold what a clock shows."""
        self._inputs: dict[str, str] = {}
        self._address_of_saved = frozenset(walk.saved)
        self._watched = [_Watched(holder) for holder in walk.found]
        self.frozen: dict[str, Frozen] = {
            f"{one.holder.path}.{name}": freeze(value, self._address_of_saved)
            for one in self._watched
            for name, value in one.before.items()
        }
        self._of = {f"{one.holder.path}.{name}": one for one in self._watched for name in one.before}
        self._by_path = {one.holder.path: one.holder for one in self._watched}
        self._looked = Looked()

    def differences(self, later: _Beginning) -> Iterator[tuple[str, _Unrepeated]]:
        """By path what has changed until then."""
        for one in self._watched:
            for name, value in one.before.items():
                path = f"{one.holder.path}.{name}"
                after = later.frozen.get(path)
                if after is not None and after != self.frozen[path]:
                    yield path, _Unrepeated(value, self.frozen[path], after)

    def take_back(self, unrepeated: Mapping[str, _Unrepeated]) -> None:
        """Those that have not changed since begin as they were before."""
        for one in self._watched if unrepeated else ():
            for name in one.before:
                path = f"{one.holder.path}.{name}"
                if (row := unrepeated.get(path)) is not None and row.after == self.frozen[path]:
                    self.frozen[path], one.before[name] = row.before, row.value
            one.look()

    def holder_of(self, path: str) -> AttributeHolder | None:
        """Whose attribute it is, one that is not there yet included."""
        return self._of[path].holder if path in self._of else self._by_path.get(path.rpartition(".")[0])

    def is_of_library(self, path: str) -> bool:
        """Whether it is an attribute of an object of an installed package."""
        holder = self.holder_of(path)
        return holder is not None and (of_framework(type(holder.owner)) or is_library(type(holder.owner)))

    def opaque(self, rows: Collection[str]) -> list[tuple[str, Any]]:
        """What nothing shows, of objects of packages of which something else has moved."""
        return [(path, one) for root, path, one in self._opaque if any(row.startswith(f"{root}.") for row in rows)]

    def inputs(self, rows: Collection[str]) -> dict[str, str]:
        """Digests of what may have been drawn and has not moved; see `HiddenState.inputs`."""
        for one in self._watched if not self._inputs else ():
            for name in one.before:
                path = f"{one.holder.path}.{name}"
                if len(self._inputs) < _MOST_INPUTS and self._is_input(one, name, path):
                    self._inputs[path] = self.input_at(path)
        left = {path: was for path, was in self._inputs.items() if path not in rows}
        return {
            path: was for path, was in left.items() if not self._of[path].holder.inputs_only or self._is_there(path)
        }

    def _is_there(self, path: str) -> bool:
        return freeze(self.value_at(path), self._address_of_saved) == self.frozen[path]

    def _is_input(self, one: _Watched, name: str, path: str) -> bool:
        frozen, value = self.frozen[path], one.holder.values.get(name, MISSING)
        if of_framework(type(one.holder.owner)) and not one.holder.states:
            return False
        if not is_drawn(value) or not (one.holder.states or (frozen[-1] != "saved" and "trained" not in frozen)):
            return False
        return not _PROCESS.are_read(value) and self._is_there(path)

    def input_at(self, path: str) -> str:
        """A short digest of what was there at that moment; empty: nothing."""
        return digest(self.frozen[path])[:8] if path in self.frozen else ""

    def kept(self, path: str, value: Any) -> str:
        """What of it is still the objects of that moment: all, the container, or nothing."""
        one, name = self._of.get(path), path.rpartition(".")[2]
        if one is None or one.before[name] is not value:
            return "nothing"
        same = [*map(id, tensors_in(value))] == [id(ref()) for ref in one.within[name]]
        return "all" if same else "container"

    def is_saved(self, value: Any) -> bool:
        """Whether it is memory of what a `state_dict` has, or holds such."""
        tensors = (one for one in tensors_in(value) if isinstance(one, torch.Tensor))
        return any(address(one) in self._address_of_saved for one in tensors)

    def same_at(self, path: str, value: Any) -> str:
        """Another path that had the same object at that moment; empty: none."""
        rows = ((other, one.before[other.rpartition(".")[2]]) for other, one in self._of.items() if other != path)
        return next((other for other, was in rows if was is value), "")

    def value_at(self, path: str) -> Any:
        """What is there now, or `MISSING`."""
        holder = self.holder_of(path)
        return MISSING if holder is None else holder.values.get(path.rpartition(".")[2], MISSING)

    def described(self) -> dict[str, tuple[str, str]]:
        """Class and digest of all attributes."""
        return {
            path: (type_of(value), digest(self.frozen[path]))
            for one in self._watched
            for name, value in one.before.items()
            for path in (f"{one.holder.path}.{name}",)
        }

    def states_of(self, paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of modules, moved or not: a fresh process may begin with any other."""
        for path in paths:
            one, name = self._of.get(path), path.rpartition(".")[2]
            if one is not None and one.holder.states and name in one.holder.values:
                yield path, one.holder.values[name]

    def is_of_module(self, path: str) -> bool:
        """Whether it is an attribute of an nn.Module: a flag there says something of the model."""
        holder = self.holder_of(path)
        return holder is not None and isinstance(holder.owner, torch.nn.Module)

    def moved(self) -> Iterator[tuple[str, Any]]:
        """The attributes that are not what they were at that moment."""
        return ((path, value) for path, value, _ in self.changes())

    def changes(self, *, quick: bool = False) -> Iterator[tuple[str, Any, Frozen]]:
        """The same with their frozen values; `quick` as in `HiddenState.frozen`."""
        self._looked.again()
        for one in self._watched:
            if one.holder.inputs_only:
                continue
            if not one.untouched():
                one.look()
            for name, path, value in one.rows:
                was = one.before.get(name, MISSING)
                if was is MISSING and value is getattr(type(one.holder.owner), name, MISSING):
                    continue  # `self.seen += …` of a list of the class: the class has it
                frozen = self._moved_to(path, value, was, quick=quick)
                before = self.frozen.get(path, ())
                if frozen is None or self._is_reading(path, value):
                    continue
                if one.holder.kept_only and value is not was and isinstance(value, torch.Tensor | np.ndarray):
                    continue
                if one.holder.records and _is_record(value, frozen, before, one.holder.in_place):
                    owner = one.holder.owner
                    kind = owner if isinstance(owner, type) else type(owner)
                    if one.holder.in_place or kind.__module__ == "builtins" or not attribute_decides(kind, name):
                        continue
                yield path, value, frozen
        self._clocks.look()

    def _is_reading(self, path: str, value: Any) -> bool:
        """Whether it was, when it had moved first, what a clock shows, and may still be."""
        if path not in self._readings:
            self._readings[path] = self._clocks.are_read(value)
        return self._readings[path]

    def _moved_to(self, path: str, value: Any, before: Any, *, quick: bool) -> Frozen | None:
        """What it is now; None: what it was."""
        same = value is before
        if (same and type(value) in PLAIN) or isinstance(value, REFERENCES):
            return None
        if is_iterator(value) and not isinstance(value, itertools.count):
            return ("iterator",)
        saved = self._address_of_saved
        frozen = freeze(value, saved, arrays=lambda one: self._looked.freeze(one, saved, quick=quick))
        return frozen if frozen != self.frozen.get(path) or (frozen[0] == "object" and not same) else None


class _Watched:
    """One holder, with its attributes as they were at the beginning, and as they were looked at last.

    Attributes:
        before: those of the beginning.
        within: the tensors and arrays that they were then, or had inside.
        rows: name, path and value of those that may have moved: what is another object, or may change within.
    """

    __slots__ = ("_all_names", "_all_values", "before", "holder", "rows", "within")

    def __init__(self, holder: AttributeHolder) -> None:
        self.holder = holder
        self.before = {name: holder.values[name] for name in holder.names()}
        self.within = {name: list(map(weakref.ref, tensors_in(value))) for name, value in self.before.items()}
        self.look()

    def look(self) -> None:
        """Look at every attribute."""
        path, values, before = self.holder.path, self.holder.values, self.before
        self._all_names, self._all_values = list(values), list(values.values())
        rows = ((name, f"{path}.{name}", values[name]) for name in self.holder.names())
        self.rows = [row for row in rows if changes_within(row[2]) or row[2] is not before.get(row[0], MISSING)]

    def untouched(self) -> bool:
        """Whether every attribute is the object that was looked at last. Cheap."""
        values = self.holder.values
        return list(values) == self._all_names and all(map(operator.is_, values.values(), self._all_values))


def _is_record(value: Any, now: Frozen, before: Frozen, of_variable: bool) -> bool:
    """Whether a container only writes down what happens: it grows, without a bound, and is no dict of tensors.

    A dict with more keys remembers something, but for lists in it that grow.

    Args:
        of_variable: it is no attribute: lists in it that are new are none that have grown.
    """
    if not isinstance(value, CONTAINERS) or isinstance(value, tuple) or getattr(value, "maxlen", None) is not None:
        return False
    if isinstance(value, dict) and all(isinstance(one, torch.Tensor) for one in value.values()):
        return False
    if isinstance(value, dict) and before and len(value) <= _MOST_KEYS:
        new = itertools.repeat(() if of_variable else _NO_LIST)
        return any(map(_has_grown, now[2:], itertools.chain(before[2:], new)))
    return _has_grown(now, before)


def _has_grown(now: Any, before: Any) -> bool:
    """Whether a frozen container, or one in it, has more items than before."""
    if not (isinstance(now, tuple) and isinstance(before, tuple)):
        return False
    if now and now[0] in _SIZED and before[:1] != ("NoneType",) and (now[:1] != before[:1] or now[1] > before[1]):
        return True
    return any(map(_has_grown, now, before))


def _put_back(path: str, row: Mapping[str, Any], begun: _Beginning, first: str | None) -> str | None:
    """None: it was put back. Else why not, or "" where it is already what it was.

    Args:
        first: the digest of what the attribute was when the run's first process began; None: it was not there.
    """
    changes = f"training changes it (its type is {row['type']})"
    holder = begun.holder_of(path)
    if holder is None:
        return f"{changes}, and there is no such attribute now"
    if "value" not in row:
        return f"{changes}, and a snapshot does not have it: {row['why']}"
    name = path.rpartition(".")[2]
    now, saved = holder.values.get(name, MISSING), row["value"]
    if now is not MISSING and freeze(now) == freeze(saved) and freeze(now)[0] != "object":
        return ""
    begin = begun.frozen.get(path)
    if holder.in_place and type(now) is not type(saved):
        return f"{changes}, and it is another object now"
    of_shapes = holder.states or (holder.in_place and shapes(saved))
    if isinstance(saved, GENERATORS) and type(now) is type(saved):
        first = None if begin is None else digest(begin)  # wherever a stream begins, it continues there
    if of_shapes and shapes(now) == shapes(saved):
        pass
    elif holder.states:
        return f"{changes}, and it has another shape now"
    elif (None if begin is None else digest(begin)) != first:
        return f"{changes}, and this process begins with another value ({_shown(now)}) than the first one did"
    kept, shared = row.get("kept", "all"), begun.value_at(row.get("object", path))
    if holder.in_place and kept == "nothing" and (other := begun.same_at(path, now)):
        return f"{changes}, and it begins as the same object as {other}"
    if not (holder.in_place or holder.states) and freeze(shared) == freeze(saved):
        holder.assign(name, shared)
        return None
    if not _assign(holder, name, now, saved, kept):
        return f"{changes}, and it has another shape now"
    if "requires_grad" in row:
        holder.values[name].requires_grad_(row["requires_grad"])
    return None


def _assign(holder: AttributeHolder, name: str, now: Any, saved: Any, kept: str) -> bool:
    """In place where training changes it so, as others may refer to the object, else as a new value."""
    replaced = holder.shares or (kept == "nothing" and not (holder.in_place or holder.states))
    if not replaced and fill(now, saved, within=kept == "all"):
        return True
    if not holder.in_place:
        both = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor)
        holder.assign(name, saved.to(now.device) if both else saved)
    return not holder.in_place


def differing(paths: Sequence[str]) -> str:
    """What users read of values that another process made otherwise."""
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    is_one = len(paths) == 1
    words = ("is", "it is", "it") if is_one else ("are", "they are", "them")
    return _DIFFER.format(", ".join(paths[:_MOST_NAMED]) + more, *words)


def _shown(value: Any) -> str:
    if value is MISSING:
        return "none"
    text = text_of(value) if isinstance(value, PLAIN) else type_of(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def remedy(path: str, kind: str) -> str:
    """The one line of code that makes it exact."""
    owner, _, name = path.rpartition(".")
    if owner.endswith("()"):
        return f"to make it exact: carry = Carry({name}=…), track(…, carry=carry), and use carry.{name}"
    if kind.endswith(KeptDraws.__name__):
        return "to make it exact, draw from torch.Generator().manual_seed(…) of its arguments"
    if kind.endswith("Tensor"):
        return f"to make it exact: {owner}.register_buffer({name!r}, …)"
    return f"to make it exact, give {owner} a state_dict() and load_state_dict() with {name!r}, or set it at each start"
