"""The audit of one run: what its snapshots have beside the declared state, and what they cannot have.

Hidden state: attributes that training changes and no `state_dict` names. Saved, and put back where that is safe.
"""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from ckpt_engine.audit.attributes import AttributeHolder
from ckpt_engine.audit.carried import CarriedLocals, Carry, sentence
from ckpt_engine.audit.roots import Beginning, Unrepeated, of_modules
from ckpt_engine.audit.values import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    PLAIN,
    Frozen,
    changes_within,
    digest,
    exchanged,
    fill,
    freeze,
    is_iterator,
    nbytes_of,
    shapes,
    text_of,
    type_of,
)
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.observe.units import first
from ckpt_engine.state.flatten import Flattener, problems

_FIRST_LOOKS = 3


Mode = Literal["auto", "report", "off"]
MOST_BYTES = 256 << 20
"""Bytes of hidden tensors and arrays that one snapshot takes."""
_LARGE_BYTES = 1 << 20
_SHOWN_CHARACTERS = 40
_AHEAD = "its loader reads batches before the step that they are for begins, without workers"
_ONCE = "it is set in the first step of each process"
_UNSEEN = "nothing shows what it holds"
_MOST_NAMED = 5
_DIFFER = (
    "{} {} not what the first process had: seed the script before {} drawn, or keep {} in track(…, carry=Carry(…))"
)


_KEYS: Mapping[str, Callable[[Any], Any]] = {"id": id, "parameter": lambda one: one}
"""How the keys of a dict stand for parameters."""


class HiddenState:
    """What training changes beside the state that is saved anyway.

    A process begins at two moments: `note("start", …)` before its first epoch, and `note("batch", …)` right before
    its first batch. A resumed process compares itself with the first one at either. What follows
    `note("unrepeated", …)` up to the next moment only the run's first process does, such as a check of the validation:
    what that changes counts as changed, as another process begins with what was there before.

    Args:
        mode: auto: save and restore; report: only name; off: nothing.
        skipped: attributes of the trainer's own classes.
    """

    def __init__(self, mode: Mode, skipped: Iterable[str] = ()) -> None:
        self._mode = mode
        self.is_watched = mode != "off"
        """Whether anything is looked at."""
        self._skipped = frozenset(skipped)
        self._moments: dict[str, Beginning] = {}
        self._unrepeated: dict[str, Unrepeated] = {}
        self._saved: Mapping[str, Any] = {}
        self._first: dict[str, Mapping[str, str]] = {}
        """Of attributes that an earlier process has changed: what they were when the run's first process began."""
        self._kept: frozenset[str] = frozenset()
        """Those of them that are no flags of a process."""
        self._flattener = Flattener()
        self._parameters: Mapping[str, torch.Tensor] = {}
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
        before = self._moments.pop("unrepeated", None)
        self._moments[moment] = begun = Beginning(roots, self._skipped)
        modules = [(name, one) for name, one in roots.items() if isinstance(one, torch.nn.Module)]
        self._parameters = {f"{name}.{key}": p for name, one in modules for key, p in one.named_parameters()}
        if before is not None:
            self._unrepeated = dict(before.differences(begun))
        begun.take_back(self._unrepeated)

    def stepped(self) -> None:
        """The process has made a step. The first one counts that can be compared with a beginning."""
        if self._once is None and (latest := self._latest) is not None:
            self._once = frozenset(
                path
                for path, value in latest.moved()
                if isinstance(value, bool) and path not in self._kept and latest.sets_in_each_process(path)
            )

    @property
    def _latest(self) -> Beginning | None:
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
        flagged = {path.rpartition(".")[0] for path in self._once or ()}
        for path, value in itertools.chain(latest.moved(), latest.states_of(self._first)) if latest is not None else ():
            if path in rows:
                continue
            why = _AHEAD if prefixes and f"{path}.".startswith(prefixes) else self._why_not(path, value)
            if not why and (size := nbytes_of(value)):
                nbytes += size
                why = f"it is larger than the {MOST_BYTES >> 20} MiB of hidden state" if nbytes > MOST_BYTES else ""
            begin = self._first.get(  # empty where the first process began without it
                path, {moment: digest(one.frozen[path]) for moment, one in self._moments.items() if path in one.frozen}
            )
            is_left = why == _ONCE or (value is None and path.rpartition(".")[0] in flagged)
            if is_left and latest is not None and latest.is_of_library(path):
                continue  # its package sets it in each process, or uses it up there
            rows[path] = {"type": type_of(value), "begin": begin} | ({"why": why} if why else self._by_name(value))
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
        return {
            moment: {path: self._inputs.get(moment, {}).get(path, was) for path, was in one.inputs(rows).items()}
            for moment, one in self._moments.items()
        }

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
            if "keys" in row:
                row = {**row, "value": self._by_parameter(row)}
            if "value" in row:
                row = {**row, "value": exchanged(row["value"], live)}
            try:
                why = _put_back(path, row, begun, row["begin"].get(moment))
            except Exception as err:  # noqa: BLE001 - of a class of the user's, or of a layer that was pruned
                why = f"training changes it (its type is {row['type']}), and it cannot be assigned: {err}"
            if why is None:
                done.append(path)
                live[id(row["value"])] = begun.value_at(path)
            elif why:
                missing.append(NotRestored(f"hidden state {path}", f"{why}; {remedy(path, row['type'])}"))
        first = self._inputs.get(moment, {})
        if others := [path for path, was in first.items() if begun.is_drawn_again(path, was)]:
            missing.append(NotRestored("values made at start", differing(others)))
        done.sort(key=list(saved).index)
        return [Restored("hidden state", ", ".join(done))] if done else [], missing

    def _why_not(self, path: str, value: Any) -> str:
        shares_memory = self._latest is not None and self._latest.is_saved(value)
        rows = (
            (path in (self._once or ()), _ONCE),
            (self._mode == "report", "hidden: report only names it"),
            (shares_memory, "it shares the memory of a weight or buffer, which a copy of it would not follow"),
            (is_iterator(value), "it is a running iterator, whose position cannot be seen"),
        )
        why = next((why for holds, why in rows if holds), None)
        return why or problems(self._by_name(value)["value"], (path,), self._flattener) or ""

    def _by_name(self, value: Any) -> dict[str, Any]:
        """A value as it is stored: a dict whose keys are parameters, or their ids, by their names."""
        first = next(iter(value)) if type(value) is dict and value else None
        if type(first) is int or isinstance(first, torch.Tensor):
            kind = "id" if type(first) is int else "parameter"
            names = {_KEYS[kind](parameter): name for name, parameter in self._parameters.items()}
            if all(type(key) is type(first) and key in names for key in value):
                return {"value": {names[key]: one for key, one in value.items()}, "keys": kind}
        return {"value": value}

    def _by_parameter(self, row: Mapping[str, Any]) -> Any:
        """The inverse, with the parameters of this process; those that are not here any more stay names."""
        return {
            _KEYS[row["keys"]](self._parameters[key]) if key in self._parameters else key: one
            for key, one in row["value"].items()
        }


class Audit:
    """Looks at the objects that take part in training, and at the loop's local variables.

    Args:
        mode: the option `hidden`.
        roots: the objects, by the names that users know them by.
        log: of the adapter.
        skipped: attributes of the trainer's own classes.
        ahead: the first names of objects that are further than training.

    Attributes:
        hidden: what training changes of the objects.
    """

    def __init__(
        self,
        mode: Mode,
        roots: Callable[[], Mapping[str, Any]],
        log: logging.Logger,
        skipped: Iterable[str] = (),
        ahead: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.hidden = HiddenState(mode, skipped)
        self._roots, self._ahead, self._log = roots, ahead, log
        self._locals = CarriedLocals()
        self.early_looks = _FIRST_LOOKS if self.hidden.is_watched else 0
        """How often `boundary` still looks where no snapshot is taken."""
        self._carried: list[str] = []

    def begin(self, moment: str) -> None:
        """See `HiddenState.note`."""
        if self.hidden.is_watched:
            self._locals.modules = of_modules()
            self.hidden.note(moment, {**self._locals.modules, **self._roots()})

    def boundary(self, known: Collection[Any], *, taking: bool) -> None:
        """The loop is between two steps, and its frames are on this thread's stack.

        Args:
            known: values of counters that the loop takes from the tracker.
            taking: a snapshot is taken here. Variables are compared there, before the first step and at the first
                boundaries: what a step has changed is then known to the first snapshot.
        """
        if not (self.early_looks or (taking and self.hidden.is_watched)):
            return
        self.early_looks = max(0, self.early_looks - 1)
        carries = [one for one in self._roots().values() if isinstance(one, Carry)]
        if new := self._locals.look(known, carries):
            self._log.warning("%s", sentence(new))

    def for_snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Small plain values, and large ones by path. What no snapshot has is logged once."""
        rows = self.hidden.state(self._ahead()) if self.hidden.is_watched else {}
        if new := self.hidden.unsaved(rows):
            self._log.warning("training changes state that no snapshot has: %s", "; ".join(new))
        small, large = taken_apart(rows)
        return {"attributes": small, "locals": self._locals.names, "inputs": self.hidden.inputs(rows)}, large

    def resumes(self, small: Mapping[str, Any], large: Mapping[str, Any]) -> None:
        """What `for_snapshot` gave for the snapshot that this process resumes from."""
        if small and self.hidden.is_watched:
            self.hidden.expect(put_together(small["attributes"], large), small.get("inputs", {}))
            self._carried = list(small["locals"])

    def restore(self, moment: str) -> tuple[list[Restored], list[NotRestored]]:
        """See `HiddenState.restore`."""
        restored, missing = self.hidden.restore(moment)
        if self._carried:
            missing.append(NotRestored("local variables", sentence(self._carried)))
            self._carried = []
        return restored, missing


def taken_apart(rows: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of `HiddenState.state` with small values, and the large values alone, by path."""
    large = {path for path, row in rows.items() if nbytes_of(row.get("value")) > _LARGE_BYTES}
    small = {path: {k: v for k, v in row.items() if k != "value" or path not in large} for path, row in rows.items()}
    return small, {path: rows[path]["value"] for path in large}


def put_together(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `taken_apart`."""
    return {path: {**row, "value": large[path]} if path in large else row for path, row in small.items()}


def _put_back(path: str, row: Mapping[str, Any], begun: Beginning, first: str | None) -> str | None:
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
    begin = digest(begun.frozen[path]) if path in begun.frozen else None
    if holder.in_place and type(now) is not type(saved):
        return f"{changes}, and it is another object now"
    of_shapes = holder.states or (holder.in_place and shapes(saved))
    if isinstance(saved, GENERATORS) and type(now) is type(saved):
        first = begin  # wherever a stream begins, it continues there
    if not (of_shapes and shapes(now) == shapes(saved)):
        if holder.states:
            return f"{changes}, and it has another shape now"
        if begin != first:
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
    is_one = len(paths) == 1
    words = ("is", "it is", "it") if is_one else ("are", "they are", "them")
    return _DIFFER.format(first(paths, _MOST_NAMED), *words)


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
    if kind.endswith("Tensor"):
        return f"to make it exact: {owner}.register_buffer({name!r}, …)"
    return f"to make it exact, give {owner} a state_dict() and load_state_dict() with {name!r}, or set it at each start"
