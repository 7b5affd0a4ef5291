"""Changes the state of a snapshot before a run resumes from it, as the option `resume` says.

A name is the path of a value with dots, `optimizer.param_groups.0.lr`. In a snapshot of Lightning the `state_dict` is
called `model`, its optimizers `optimizer`, `optimizer_1` and so on, and its schedulers likewise.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, TypeGuard

import torch

from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.errors import MismatchError
from ckpt_engine.observe.resume_report import ChangedPart
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import OWN_KEY, Manifest
from ckpt_engine.store.repository import CHANGED, FORKED

_FROM = "from"
OTHER_WAY = "resumed with changes"
_KEPT = {"imported"}
"""The notes of a snapshot that count where training begins at step 0."""
_STREAMS = "rng"
_LIGHTNING = "pytorch-lightning_version"
_PLACE = {"counters", "data", "epoch", "global_step", "loader", "loaders", "loops", "position", "sampler", _LIGHTNING}
"""What a trainer's snapshot has of the place in the run: restored together, or not at all."""
_ALIASES = {"state_dict": "model", "current_model_state": "model"}
_OPTIMIZERS, _SCHEDULERS = "optimizer_states", "lr_schedulers"
_LISTS = {_OPTIMIZERS: "optimizer", _SCHEDULERS: "scheduler"}
_SCHEDULED = re.compile(r".*\.param_groups\.\d+\.(lr|initial_lr|max_lr|min_lr|base_momentum|max_momentum)")
"""What a schedule writes into the groups of its optimizer."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MADE = "as the program made it"
_SHOWN = 3
_GONE: Any = object()
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_Path = tuple[Any, ...]


def digest_of(section: object) -> str | None:
    """What names a section `resume`; None: the option is a word, changes nothing, or is not given."""
    if not isinstance(section, ResumeChanges) or not section.model_dump(exclude_defaults=True).keys() - {_FROM}:
        return None
    rows = section.model_dump(mode="json").items()
    return digest(json.dumps({key: one for key, one in rows if key != _FROM or one}, sort_keys=True).encode())


def is_due(section: object, notes: Mapping[str, Any]) -> TypeGuard[ResumeChanges]:
    """Whether a section is to be applied to a snapshot with these notes: it was not the last one of its line."""
    return isinstance(section, ResumeChanges) and digest_of(section) not in (None, notes.get(CHANGED))


def restarts(section: object, notes: Mapping[str, Any]) -> bool:
    """Whether a snapshot with these notes gives parts only, and training begins at step 0."""
    return is_due(section, notes) and section.only is not None


class _Glob:
    """One pattern of an option: it matches names, and all that is below them."""

    def __init__(self, option: str, text: str, value: Any = None) -> None:
        marks = {"*": "(.*)", "?": "(.)"}
        self.option, self.text, self.value, self.used = option, text, value, False
        self._pattern = re.compile("".join(marks.get(one, re.escape(one)) for one in text) + r"(\..*)?", re.DOTALL)

    def match(self, name: str) -> tuple[str, ...]:
        """What its marks match, and last what is below; empty: it does not match."""
        found = self._pattern.fullmatch(name)
        self.used = self.used or found is not None
        return () if found is None else found.groups("")


class Changes:
    """What is changed in the state of one snapshot; without a section nothing.

    Args:
        section: the option `resume`, if it is to be applied.
        state: of the snapshot, as it was read.

    Attributes:
        rows: for the report, as far as the state is changed already.
        new_streams: random streams are those of this process.

    Raises:
        MismatchError: a pattern is of what cannot be changed.
    """

    def __init__(self, section: ResumeChanges | None = None, state: Any = _NOTHING) -> None:
        self.rows, self._left, self._seen = list[ChangedPart](), set[str](), set[str]()
        self._section, self._lightning = section, _LIGHTNING in state
        self.new_streams = self._new_schedule = False
        self._globs: list[_Glob] = []
        if section is None:
            return
        self._globs += [_Glob(key, text) for key in ("only", "skip") for text in getattr(section, key) or ()]
        self._globs += [_Glob(key, *row) for key in ("map", "override") for row in getattr(section, key).items()]
        for glob in self._globs if OWN_KEY in state else ():
            if glob.text.partition(".")[0] in _PLACE:
                raise MismatchError(
                    f"resume.{glob.option}: {glob.text!r} is of the place in the run, which is restored whole",
                    hint="only: [...] begins at step 0; data: restart_epoch begins the epoch again",
                )
        if OWN_KEY in state:
            self.new_streams = _STREAMS not in state and self._matches("skip", _STREAMS)
            self.rows += [ChangedPart("left", _STREAMS, "the random streams of this process")] * self.new_streams
            named = [(("", key), one) for key, one in state.items()]
            named += [((_SCHEDULERS, n), one) for n, one in enumerate(state.get(_SCHEDULERS, ()))] * self._lightning
            schedules = [self._name("", path) for path, one in named if isinstance(one, dict) and "last_epoch" in one]
            self._new_schedule = not all(self._keeps(f"{name}.last_epoch") for name in schedules)

    def __bool__(self) -> bool:
        return self._section is not None

    @property
    def restarts(self) -> bool:
        """Whether training begins at step 0."""
        return self._section is not None and self._section.only is not None

    @property
    def loose(self) -> bool:
        """Whether weights that only one side has stay as they are."""
        return self._section is not None and not self._section.strict

    def require_used(self) -> None:
        """After the last change. Raises MismatchError where a pattern matches nothing."""
        for glob in self._globs:
            if not glob.used:
                near = [  # first those with the same last word: a user may not know where a value is
                    one
                    for same in (True, False)
                    for one in difflib.get_close_matches(glob.text, self._seen, len(self._seen) + 1, cutoff=0.5)
                    if one.endswith("." + glob.text.rpartition(".")[2]) is same
                ]
                raise MismatchError(
                    f"resume.{glob.option}: {glob.text!r} matches nothing in the snapshot",
                    hint=f"similar names: {', '.join((near or sorted(self._seen))[:_SHOWN])}",
                )

    # ---- names

    def _name(self, above: str, path: _Path) -> str:
        last = path[-1]
        if self._lightning and path[:-1] in ((_OPTIMIZERS,), (_SCHEDULERS,)):
            return f"{_LISTS[path[0]]}_{last}" if last else _LISTS[path[0]]
        return f"{above}.{last}" if above else _ALIASES.get(last, str(last)) if self._lightning else str(last)

    def _matches(self, option: str, name: str) -> bool:
        """Whether one does; all are asked, so that each one learns that it is of use."""
        return len([glob for glob in self._globs if glob.option == option and glob.match(name)]) > 0

    def _keeps(self, name: str) -> bool:
        """Whether a leaf is restored."""
        skipped, wanted = self._matches("skip", name) or self._is_scheduled(name), self._matches("only", name)
        return wanted and not skipped if self.restarts else not skipped or name.partition(".")[0] in _PLACE

    def _is_scheduled(self, name: str) -> bool:
        return self._new_schedule and _SCHEDULED.fullmatch(name) is not None

    def leaves(self, name: str) -> bool:
        """Whether a weight or a component is as the program made it."""
        return any(f"{name}.".startswith(f"{one}.") for one in self._left)

    def touches(self, component: str) -> bool:
        """Whether something in a component is left out, renamed or set."""
        return any(f"{row.name}.".startswith(f"{component}.") for row in self.rows)

    def renamed(self, name: str) -> str:
        """The new name of a component or of what is right below it."""
        for glob in self._globs:
            if glob.option == "map" and (found := glob.match(name)):
                parts, (*marks, below) = glob.value.split("*"), found
                return "".join(chain.from_iterable(zip_longest(parts, marks[: len(parts) - 1], fillvalue=""))) + below
        return name

    # ---- states

    def change(self, state: dict[str, Any], live: Mapping[str, Any] = _NOTHING, *keys: str) -> None:
        """Change components of a state, all or some. What is left out is as the live state has it; a component that is
        left out is absent.

        Raises:
            MismatchError: a value cannot become what it is to be.
        """
        for key in (keys or tuple(state)) if self._section is not None else ():
            if key != OWN_KEY and key in state:
                name, saved = self._name("", (key,)), state.pop(key)
                new = self._new_key(key, key, "", state)
                value = self._changed(saved, name, (key,), live.get(new, _GONE))
                if not self.leaves(name):
                    state[new] = value

    def _changed(self, saved: Any, name: str, path: _Path, live: Any) -> Any:
        self._seen.add(_NUMBER.sub("*", name))
        for glob in self._globs:
            if glob.option == "override" and (found := glob.match(name)) and not found[-1]:
                self.rows.append(ChangedPart("set", name, f"{_shown(saved)} becomes {glob.value}"))
                return _as(name, glob.value, saved)
        is_list = self._lightning and len(path) == 1 and path[0] in _LISTS  # required, also where nothing is in it
        if not (children := _children(saved)):
            return saved if is_list or self._keeps(name) else self._leave(name, live)
        mark, made, gone = len(self.rows), dict[Any, Any](), 0
        for key, value in children:
            inner = self._name(name, (*path, key))
            new = self._new_key(inner, key, f"{self.renamed(name)}.", made) if len(path) == 1 else key
            made[new] = self._changed(value, inner, (*path, key), _at(live, new))
            gone += self.leaves(inner)
        if gone == len(made) and not is_list:
            del self.rows[mark:]
            return self._leave(name, live)
        if self.loose and len(path) == 1 and any(isinstance(one, torch.Tensor) for _, one in _children(live)):
            self._fit(made, live, name)
        return _like(saved, made)

    def _new_key(self, name: str, key: Any, above: str, others: Container[Any]) -> Any:
        """The new key of what has this name.

        Args:
            above: what the new name begins with.
            others: the new keys beside it.
        """
        new = self.renamed(name)
        found = key if new == name else new.removeprefix(above)
        if found in others or not (new == name or new.startswith(above)):
            raise MismatchError(
                f"resume.map: {name!r} cannot become {new!r}", hint="a name stays in its component, and is given once"
            )
        if found != key:
            self.rows.append(ChangedPart("renamed", name, f"is {new}"))
        return found

    def _fit(self, made: dict[Any, Any], live: Mapping[Any, Any], name: str) -> None:
        """With `strict: no`, leave the weights alone that only one of both has, or that have another shape."""
        for key in {**live, **made}:
            one, saved = live.get(key, _GONE), made.get(key, _GONE)
            if getattr(saved, "shape", None) != getattr(one, "shape", None):
                shapes = [list(getattr(side, "shape", ())) if side is not _GONE else "none" for side in (saved, one)]
                made[key] = self._leave(f"{name}.{key}", one, f"{_MADE}: {shapes[0]} saved, {shapes[1]} here")

    def _leave(self, name: str, live: Any, why: str = "") -> Any:
        if name not in _PLACE:
            scheduled = "as the new schedule has set it" if self._is_scheduled(name) else _MADE
            self.rows.append(ChangedPart("left", name, why or scheduled))
        self._left.add(name)
        return live


UNCHANGED = Changes()


def note_of(section: object) -> dict[str, Any]:
    """The note of the snapshots of a run that has this section; nothing without one."""
    return {} if (found := digest_of(section)) is None else {CHANGED: found}


def planned(section: object, manifest: Manifest, state: Any) -> tuple[Changes, Manifest, dict[str, Any]]:
    """What is to be changed in a snapshot that was read, its manifest, and the note of those that continue it.

    If training begins at step 0, the notes of the manifest are those of no run.
    """
    notes = manifest.notes
    line = {key: notes[key] for key in (CHANGED, FORKED) if key in notes} | note_of(section)
    if not is_due(section, notes):
        return UNCHANGED, manifest, line
    changes = Changes(section, state if isinstance(state, dict) else {})
    kept = notes.keys() & _KEPT if changes.restarts else notes.keys()
    return changes, replace(manifest, notes={one: notes[one] for one in kept}), line


def _children(value: Any) -> Collection[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return list(enumerate(value)) if type(value) in (list, tuple) else ()


def _like(saved: Any, made: dict[Any, Any]) -> Any:
    """A container like the saved one."""
    if not isinstance(saved, dict):
        return type(saved)(None if one is _GONE else one for one in made.values())
    found = copy.copy(saved)  # with what else its class has
    found.clear()
    found.update((key, value) for key, value in made.items() if value is not _GONE)
    return found


def _at(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (LookupError, TypeError):
        return _GONE


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor | dict) else str(value)


def _as(name: str, new: Any, old: Any) -> Any:
    """A value in the form of the one that it replaces."""
    is_number = isinstance(old, int | float | torch.Tensor)
    same = is_number == isinstance(new, int | float) and isinstance(old, list | tuple) == isinstance(new, list)
    if isinstance(old, dict) or (old is not None and not same):
        raise MismatchError(
            f"resume.override: {name!r} is {_shown(old)}, and cannot become {new!r}",
            hint="override sets numbers, texts and flags, and lists of them where there is a list",
        )
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, new)
    return tuple(new) if type(old) is tuple else float(new) if type(old) is float else new
