"""A resume with changes: what of the state of a snapshot is left out, renamed and set, by name. Pure.

A name is the path of a value with dots, `optimizer.param_groups.0.lr`. In a snapshot of Lightning the `state_dict` is
called `model`, its optimizers `optimizer`, `optimizer_1` and so on, and its schedulers likewise.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any

import torch

from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.errors import MismatchError
from ckpt_engine.observe.resume_report import Change
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import OWN_KEY

NOTE = "resumed_with"
"""The note of a snapshot whose line has changes: the digest of the section `resume` that was applied last."""
OTHER_WAY = "resumed with changes"
KEPT = {"imported"}
"""The notes of a snapshot that count where training begins at step 0."""
_STREAMS = "rng"
_LIGHTNING = "pytorch-lightning_version"
_PLACE = {"counters", "data", "epoch", "global_step", "loader", "loaders", "loops", "position", "sampler", _LIGHTNING}
"""What a trainer's snapshot has of the place in the run: restored together, or not at all."""
_ALIASES = {"state_dict": "model", "current_model_state": "model"}
_LISTS = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
_SCHEDULED = re.compile(r".*\.param_groups\.\d+\.(lr|initial_lr|max_lr|min_lr|base_momentum|max_momentum)")
"""What a schedule writes into the groups of its optimizer."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MADE = "as the program made it"
_TAKEN = "leave out with skip what has that name"
_SHOWN = 3
_GONE: Any = object()
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_Path = tuple[Any, ...]


def digest_of(section: object) -> str | None:
    """What names a section `resume`; None: the option is a word, or not given."""
    if not isinstance(section, ResumeChanges):
        return None
    return digest(json.dumps(section.model_dump(mode="json"), sort_keys=True).encode())


def is_due(section: object, notes: Mapping[str, Any]) -> bool:
    """Whether a section is to be applied to a snapshot with these notes: it was not the last one of its line."""
    return isinstance(section, ResumeChanges) and notes.get(NOTE) != digest_of(section)


def restarts(section: object, notes: Mapping[str, Any]) -> bool:
    """Whether a snapshot with these notes gives parts only, and training begins at step 0."""
    return is_due(section, notes) and isinstance(section, ResumeChanges) and section.only is not None


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
        left: names of what is as the program made it.
        restarts: training begins at step 0.
        loose: weights that only one side has stay as they are.
        new_streams: random streams are those of this process.

    Raises:
        MismatchError: a pattern matches nothing, or what it matches cannot be changed so.
    """

    def __init__(self, section: ResumeChanges | None = None, state: Any = _NOTHING) -> None:
        self.rows, self.left = list[Change](), set[str]()
        self._section, self._lightning = section, _LIGHTNING in state
        self._kept, self._names, self._values = set[str](), dict[str, str](), dict[str, Any]()
        self.restarts = self.new_streams = self._new_schedule = False
        self.loose = section is not None and not section.strict
        if section is None:
            return
        self.restarts = section.only is not None
        self._only = [_Glob("only", text) for text in section.only or ()]
        self._skip = [_Glob("skip", text) for text in section.skip]
        self._map = [_Glob("map", *row) for row in section.map.items()]
        self._override = [_Glob("override", *row) for row in section.override.items()]
        globs = [*self._only, *self._skip, *self._map, *self._override]
        if OWN_KEY in state:
            _refuse_place(globs)
            self.new_streams = _STREAMS not in state and _matches(self._skip, _STREAMS)
        named = [row for key, value in state.items() if key != OWN_KEY for row in self._named(value, (), (key,))]
        schedules = [names[-1] for names, _ in named if re.fullmatch(r"[^.]*\.last_epoch", names[-1])]
        self._new_schedule = not all(map(self._keeps, schedules))
        for names, value in named:
            if not _children(value) and self._keeps(names[-1]):
                self._kept.update(names)
            self._plan(names, value)
        for glob in globs:
            if not glob.used:
                _refuse(glob, [names[-1] for names, _ in named])

    def __bool__(self) -> bool:
        return self._section is not None

    def _named(self, value: Any, above: tuple[str, ...], path: _Path) -> Iterator[tuple[tuple[str, ...], Any]]:
        """A value and all below it, each with the names above it and its own."""
        names = (*above, self._name(above[-1] if above else "", path))
        yield names, value
        for key, child in _children(value):
            yield from self._named(child, names, (*path, key))

    def _name(self, above: str, path: _Path) -> str:
        last = path[-1]
        if self._lightning and len(path) == 1:
            return _ALIASES.get(last, _LISTS.get(last, last))
        if self._lightning and len(path) == 2 and path[0] in _LISTS:
            return f"{_LISTS[path[0]]}_{last}" if last else _LISTS[path[0]]
        return f"{above}.{last}" if above else str(last)

    def _keeps(self, name: str) -> bool:
        """Whether a leaf is restored."""
        skipped = _matches(self._skip, name) or self._is_scheduled(name)
        wanted = _matches(self._only, name)
        if self.restarts:
            return wanted and not skipped
        return not skipped or name.partition(".")[0] in _PLACE

    def _is_scheduled(self, name: str) -> bool:
        return self._new_schedule and _SCHEDULED.fullmatch(name) is not None

    def _plan(self, names: tuple[str, ...], value: Any) -> None:
        name = names[-1]
        for glob in self._override:
            found = glob.match(name)
            if found and not found[-1]:
                _require_settable(name, value, glob.value)
                self._values[name] = glob.value
                self._kept.update(names)
        for glob in self._map if len(names) <= 2 else ():
            if found := glob.match(name):
                *marks, below = found
                text = chain.from_iterable(zip_longest(glob.value.split("*"), marks, fillvalue=""))
                self._names[name] = "".join(text) + below

    # ---- of states

    def leaves(self, name: str) -> bool:
        """Whether a weight or a component is as the program made it."""
        return any(f"{name}.".startswith(f"{one}.") for one in self.left)

    def touches(self, component: str) -> bool:
        """Whether something in a component is left out, renamed or set."""
        changed = (*self.left, *self._values, *self._names)
        return any(f"{one}.".startswith(f"{component}.") for one in changed)

    def renamed(self, name: str) -> str:
        """The new name of a component or of what is right below it."""
        return self._names.get(name, name)

    def change(self, state: dict[str, Any], live: Mapping[str, Any] = _NOTHING, *keys: str) -> None:
        """Change components of a state, all or some. What is left out is as the live state has it; a component that is
        left out is absent.

        Raises:
            MismatchError: a new name is that of something else.
        """
        for key in (keys or tuple(state)) if self._section is not None else ():
            if key == OWN_KEY or key not in state:
                continue
            name, value, new = self._name("", (key,)), state.pop(key), self._names.get(key, key)
            if name not in self._kept:
                self._leave(name, _MADE)
                continue
            if new != key:
                self.rows.append(Change("renamed", key, f"is {new}"))
            if new in state:
                raise MismatchError(f"resume.map: {key!r} cannot become {new!r}", hint=_TAKEN)
            state[new] = self._changed(value, name, (key,), live.get(new, _GONE))

    def _changed(self, saved: Any, name: str, path: _Path, live: Any) -> Any:
        if name in self._values:
            self.rows.append(Change("set", name, f"{_shown(saved)} becomes {self._values[name]}"))
            return _as(self._values[name], saved)
        if name not in self._kept:
            self._leave(name, "as the new schedule has set it" if self._is_scheduled(name) else _MADE)
            return live
        if type(saved) in (list, tuple):
            rows = [((*path, number), one, _at(live, number)) for number, one in enumerate(saved)]
            items = [self._changed(one, self._name(name, where), where, other) for where, one, other in rows]
            return type(saved)(None if one is _GONE else one for one in items)
        if not isinstance(saved, dict):
            return saved
        made: dict[Any, Any] = {}
        for key, value in saved.items():
            inner = self._name(name, (*path, key))
            new = self._new_key(inner, key, self._names.get(name, name))
            if new in made:
                raise MismatchError(f"resume.map: {inner!r} cannot become {new!r}", hint=_TAKEN)
            made[new] = self._changed(value, inner, (*path, key), _at(live, new))
        if self.loose and len(path) == 1 and any(isinstance(one, torch.Tensor) for _, one in _children(live)):
            self._fit(made, live, name)
        found = copy.copy(saved)  # with what else its class has
        found.clear()
        found.update((key, value) for key, value in made.items() if value is not _GONE)
        return found

    def _new_key(self, name: str, key: Any, component: str) -> Any:
        new = self._names.get(name)
        if new is None:
            return key
        if not new.startswith(f"{component}."):
            raise MismatchError(f"resume.map: {name!r} cannot become {new!r}", hint="a name stays in its component")
        if new != f"{component}.{key}":
            self.rows.append(Change("renamed", name, f"is {new}"))
        return new.removeprefix(f"{component}.")

    def _fit(self, made: dict[Any, Any], live: Mapping[Any, Any], name: str) -> None:
        """With `strict: no`, leave the weights alone that only one of both has, or that have another shape."""
        for key in [key for key in made if key not in live]:
            del made[key]
            self._leave(f"{name}.{key}", "the program has none of this name")
        for key, one in live.items():
            shape, saved = getattr(one, "shape", None), made.get(key, _GONE)
            if saved is _GONE or getattr(saved, "shape", None) != shape:
                made[key] = one
                why = "none" if saved is _GONE else f"one of shape {list(getattr(saved, 'shape', ()))}"
                self._leave(f"{name}.{key}", f"{_MADE}: the snapshot has {why}")

    def _leave(self, name: str, why: str) -> None:
        if name not in self.left | _PLACE:
            self.rows.append(Change("left", name, why))
        self.left.add(name)


def _matches(globs: Iterable[_Glob], name: str) -> bool:
    """Whether one of them does; all are asked, so that each one learns that it is of use."""
    return len([glob for glob in globs if glob.match(name)]) > 0


def _refuse_place(globs: Iterable[_Glob]) -> None:
    for glob in globs:
        if glob.text.partition(".")[0] in _PLACE:
            raise MismatchError(
                f"resume.{glob.option}: {glob.text!r} is of the place in the run, which is restored whole",
                hint="only: [...] begins at step 0; data: restart_epoch begins the epoch again",
            )


def _refuse(glob: _Glob, names: Iterable[str]) -> None:
    forms = {_NUMBER.sub("*", name) for name in names}
    near = difflib.get_close_matches(glob.text, forms, _SHOWN, cutoff=0.5) or sorted(forms)[:_SHOWN]
    raise MismatchError(
        f"resume.{glob.option}: {glob.text!r} matches nothing in the snapshot", hint=f"similar: {', '.join(near)}"
    )


def _require_settable(name: str, old: Any, new: Any) -> None:
    is_number = isinstance(old, int | float | torch.Tensor)
    same = is_number == isinstance(new, int | float) and isinstance(old, list | tuple) == isinstance(new, list)
    if isinstance(old, dict) or (old is not None and not same):
        raise MismatchError(
            f"resume.override: {name!r} is {_shown(old)}, and cannot become {new!r}",
            hint="override sets numbers, texts and flags, and lists of them where there is a list",
        )


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return list(enumerate(value)) if type(value) in (list, tuple) else ()


def _at(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (LookupError, TypeError):
        return _GONE


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor | dict) else str(value)


def _as(new: Any, old: Any) -> Any:
    """A value in the form of the one that it replaces."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, new)
    return tuple(new) if type(old) is tuple else float(new) if type(old) is float else new
