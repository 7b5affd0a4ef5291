"""Counts what the objects of a class remember: pure functions of syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_QUESTIONS = frozenset({"bool", "isinstance", "issubclass", "callable", "hasattr", "any", "all"})


@dataclass
class Attributes:
    """Of one class, without those of its bases.

    Args:
        bases: names of the classes that it is derived from.
        names: of what its methods assign to `self`, and of its fields.
        flags: those of them that are true or false.
    """

    bases: list[str]
    names: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)


def attributes_of(trees: Iterable[ast.AST], *, inherited: bool = True) -> dict[str, Attributes]:
    """By class name what each class has. Frozen dataclasses are values, which remember nothing.

    Args:
        inherited: with the attributes of its bases.
    """
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name: _own(node) for node in classes if not _is_frozen(node)}
    return {name: _with_bases(one, own) for name, one in own.items()} if inherited else own


def _with_bases(one: Attributes, own: Mapping[str, Attributes]) -> Attributes:
    found = Attributes(one.bases, set(one.names), set(one.flags))
    for base in (_with_bases(own[name], own) for name in one.bases if name in own):
        found.names |= base.names
        found.flags |= base.flags
    return found


def _own(node: ast.ClassDef) -> Attributes:
    found = Attributes([base.id for base in node.bases if isinstance(base, ast.Name)])
    is_dataclass = any(_name_of(one) == "dataclass" for one in node.decorator_list)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and is_dataclass:
            found.names.add(one.target.id)
            if ast.unparse(one.annotation) == "bool":
                found.flags.add(one.target.id)
        elif isinstance(one, ast.FunctionDef):
            flags = {a.arg for a in (*one.args.args, *one.args.kwonlyargs) if a.annotation and _is_bool(a.annotation)}
            for target, value, annotation in _assigned(one):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.names.add(target.attr)
                    if (annotation is not None and _is_bool(annotation)) or _is_answer(value, flags):
                        found.flags.add(target.attr)
    found.names -= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}  # a property, and its setter
    return found


def _assigned(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Targets, values and annotations of all assignments in it, tuples taken apart."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.value, node.annotation
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                yield from ((one, value, None) for one, value in zip(target.elts, values, strict=False))
            else:
                yield target, node.value, None


def _is_bool(annotation: ast.expr) -> bool:
    return ast.unparse(annotation) == "bool"


def _is_answer(value: ast.expr | None, flags: set[str]) -> bool:
    """Whether this expression is true or false; `flags`: names that are."""
    match value:
        case ast.Constant(value=bool()) | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(values=values):
            return all(_is_answer(one, flags) for one in values)
        case ast.Call(func=ast.Name(id=name)):
            return name in _QUESTIONS
        case ast.Name(id=name):
            return name in flags
    return False


def _is_frozen(node: ast.ClassDef) -> bool:
    return any(
        _name_of(one) == "dataclass" and isinstance(one, ast.Call) and any(k.arg == "frozen" for k in one.keywords)
        for one in node.decorator_list
    )


def _name_of(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2]
