"""Finds in the tree of a snapshot which weights and moments of Adam belong together.

Optimizers are found by their form, that of torch's `state_dict()`, wherever they are in the tree: `param_groups` with
numbers, and `state` by the number of the parameter. Which weights those numbers stand for is not written anywhere: as
optimizers are made from `model.parameters()`, the weights of one shape are in the same order in both. A wrong guess
costs bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.grouping import grouped
from ckpt_engine.store.tree import keyed

AdamNumbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamGroup:
    """Entries of one parameter.

    Args:
        first, second, weights: its moments and itself.
        step: the entry that counts its steps, or the count.
        numbers: learning rate, betas, eps and weight decay as the tree has them, and as other guesses have them.
    """

    first: str
    second: str
    weights: str
    step: str | float
    numbers: tuple[AdamNumbers, ...]

    @property
    def entries(self) -> tuple[str, str, str]:
        """In the order of the codec's roles."""
        return self.first, self.second, self.weights


@dataclass(frozen=True, slots=True)
class _Array:
    """A float32 leaf: its entry, and what two arrays that are computed element by element have in common."""

    entry: str
    form: tuple[Any, ...]


def find(
    tree: Any, older: Any, shapes: Mapping[str, tuple[str, tuple[int, ...]]], changed: Container[str]
) -> Iterator[AdamGroup]:
    """The groups of all Adam optimizers in `tree`.

    Args:
        tree, older: of the snapshot and of the one before it: learning rates change between steps.
        shapes: dtype and shape of each entry.
        changed: entries of which something has changed since.
    """
    arrays = _arrays_outside(tree, shapes, changed)
    before = dict(_optimizers(older, ()))
    for path, optimizer in _optimizers(tree, ()):
        rows = list(_rows(optimizer, before.get(path), shapes))
        weights = _weights(rows, arrays)
        yield from (
            AdamGroup(first.entry, second.entry, weights[row], step, numbers)
            for row, (first, second, step, numbers) in enumerate(rows)
            if row in weights
        )


_Match = tuple[_Array, _Array, str | float, tuple[AdamNumbers, ...]]


def _rows(optimizer: Mapping[str, Any], older: Mapping[str, Any] | None, shapes: Mapping[str, Any]) -> Iterator[_Match]:
    """Moments, step and numbers of each parameter, in the order of the optimizer's groups."""
    state = dict(_items(optimizer["state"]))
    old_groups = [dict(_items(group)) for _, group in _items(older["param_groups"])] if older is not None else []
    for index, (_, node) in enumerate(_items(optimizer["param_groups"])):
        group = dict(_items(node))
        guesses = [group, *old_groups[index : index + 1]]
        numbers = tuple({tuple(one.items()): one for guess in reversed(guesses) for one in _numbers(guess)}.values())
        if not numbers:
            continue
        for _, parameter in _items(group.get("params", [])):
            one = dict(_items(state.get(str(parameter), {})))
            first, second = (_array(one.get(key), shapes) for key in ("exp_avg", "exp_avg_sq"))
            step = one.get("step")
            if isinstance(step, dict) and step.get("$") == "tensor" and "view" not in step:
                step = step.get("entry")
            if (
                first is not None
                and second is not None
                and first.form == second.form
                and isinstance(step, str | float | int)
            ):
                yield first, second, step, numbers


def _numbers(group: Mapping[str, Any]) -> Iterator[AdamNumbers]:
    """The numbers of one group: weight decay both as AdamW's and as Adam's, where that is not said."""
    betas = [value for _, value in _items(group.get("betas", []))]
    numbers = [group.get("lr"), *betas, group.get("eps"), group.get("weight_decay")]
    if len(numbers) != 5 or not all(isinstance(one, float | int) and not isinstance(one, bool) for one in numbers):
        return
    if group.get("amsgrad") or group.get("maximize"):
        return
    lr, beta1, beta2, eps, decay = map(float, numbers)
    decoupled = group.get("decoupled_weight_decay")
    for one in {decay, 0.0} if decoupled is None else {decay if decoupled else 0.0}:
        yield {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": one}


def _weights(rows: list[_Match], arrays: Mapping[tuple[str, ...], list[_Array]]) -> dict[int, str]:
    """The weights of each row: from the first place that has as many of each form, else from wherever numbers agree."""
    wanted = grouped((first.form, number) for number, (first, *_) in enumerate(rows))
    everywhere = [one for place in arrays.values() for one in place]

    def paired(place: list[_Array]) -> dict[int, str]:
        there = grouped((one.form, one.entry) for one in place)
        return {
            number: entry
            for form, numbers in wanted.items()
            if len(there.get(form, ())) == len(numbers)
            for number, entry in zip(numbers, there[form], strict=True)
        }

    return max(map(paired, (*arrays.values(), everywhere)), key=len)


def _arrays_outside(
    tree: Any, shapes: Mapping[str, Any], changed: Container[str]
) -> dict[tuple[str, ...], list[_Array]]:
    """Changed float32 arrays that are not in an optimizer, by what they are in; tied ones once."""
    seen: set[str] = set()
    inside = {path for path, _ in _optimizers(tree, ())}

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Array]]:
        if path in inside:
            return
        array = _array(node, shapes)
        if array is not None and array.entry not in seen and array.entry in changed:
            seen.add(array.entry)
            yield path[:-1], array
        for key, child in _items(node):
            yield from walk(child, (*path, key))

    return grouped(walk(tree, ()))


def _optimizers(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    items = _items(node)
    named = dict(items)
    if "state" in named and "param_groups" in named:
        yield path, named
        return
    for key, child in items:
        yield from _optimizers(child, (*path, key))


def _array(node: Any, shapes: Mapping[str, Any]) -> _Array | None:
    """A tensor leaf of float32 numbers that has its entry for itself."""
    if not isinstance(node, dict) or node.get("$") != "tensor" or "view" in node:
        return None
    dtype, shape = shapes.get(node["entry"], ("", ()))
    return _Array(node["entry"], (shape, tuple(node.get("stride", ())))) if dtype == "float32" and shape else None


def _items(node: Any) -> list[tuple[str, Any]]:
    """The children of a container node (docs/format.md, "Tree"), by their keys as text."""
    return [(str(key), child) for key, child in keyed(node)]
