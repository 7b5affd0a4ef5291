"""What the user's code does with a variable, read from its source.

A counter of an `enumerate` that is only shown to people decides nothing of the run. In doubt it does: every use of it
has to be in a call that prints or logs, or in the condition of an `if` with nothing but such calls in it.

A list that grows is most often a record. It is none where the bytecode of a function makes it grow and reads it, too.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import linecache
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType, FunctionType, MemberDescriptorType
from typing import Any

from ckpt_engine.whose_code import is_function_of_user

_SHOW = frozenset({"print"})
_SHOW_METHODS = frozenset({"debug", "info", "warning", "error", "set_description", "set_postfix", "write"})
_PURE = frozenset({"len", "str", "int", "float", "round", "repr", "min", "max", "abs"})
_PURE_METHODS = frozenset(
    {
        *("item", "tolist", "detach", "cpu", "numpy", "mean", "sum"),
        *("format", "time", "perf_counter", "get_last_lr"),
    }
)
_SEES_ALL = frozenset({"locals", "globals", "vars", "eval", "exec"})
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_VALUES = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.JoinedStr, ast.FormattedValue, ast.keyword, ast.IfExp),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


_METRICS = "torchmetrics"
_WITH_STATEMENTS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler)
_OF_OUTER = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_DEREF", "STORE_DEREF", "LOAD_CLASSDEREF"})
_GROWTH = frozenset({"append", "appendleft", "extend", "insert", "add", "STORE"})
_CUTS = frozenset({"pop", "popleft"})
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
_VARIABLES = tuple(f"{way}_{kind}" for way in ("LOAD", "STORE") for kind in ("FAST", "DEREF", "GLOBAL", "NAME"))
_KEEPER = type(functools.lru_cache(abs))
GROWS = frozenset(
    {
        *("append", "appendleft", "extend", "add", "insert", "pop", "popleft", "clear", "discard", "remove"),
        *("update", "setdefault", "popitem", "sort", "reverse", "rotate"),
    }
)


def only_shows_its_count(frame: FrameType) -> bool:
    """Whether the counter of the `enumerate` at the line of this frame is only printed or logged."""
    tree = _tree_of("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    every = () if tree is None else tuple(ast.walk(tree))
    line = frame.f_lineno
    loops = [one for one in every if isinstance(one, ast.For) and one.iter.lineno <= line <= (one.iter.end_lineno or 0)]
    if len(loops) != 1 or (name := _counter(loops[0])) is None:
        return False
    *_, scope = (one for one in every if isinstance(one, _Scope) and loops[0] in ast.walk(one))
    if getattr(scope, "name", "<module>") != frame.f_code.co_name or _is_used_inside(frame.f_code, name):
        return False
    return all(_only_shows(one, name) for one in scope.body)


@functools.lru_cache(maxsize=8)
def _tree_of(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None  # a notebook's magic, or a file that was edited since


def _counter(loop: ast.For) -> str | None:
    """The variable that counts, of a loop over an `enumerate` or over a bar around one."""
    calls = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Call)]
    counts = sum(getattr(one.func, "id", "") == "enumerate" for one in calls) == 1
    target = loop.target.elts if counts and isinstance(loop.target, ast.Tuple) else []
    return target[0].id if len(target) == 2 and isinstance(target[0], ast.Name) else None


def _is_used_inside(code: CodeType, name: str) -> bool:
    """Whether a function in this one refers to its variable."""
    rows = (row for one in codes_in(code)[1:] for row in dis.get_instructions(one))
    return any(row.opname in _OF_OUTER and row.argval == name for row in rows)


def _only_shows(node: ast.AST, name: str) -> bool:
    """Whether a variable is only shown where it is used in a node. Functions in it are looked at as code."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return isinstance(node, ast.ClassDef) or name not in _names(node.args)
    names = _names(node)
    if not _SEES_ALL.isdisjoint(names):
        return False
    is_target = isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)
    if name not in names or is_target or _shows(node):
        return True
    if not isinstance(node, _WITH_STATEMENTS) or (isinstance(node, ast.If) and name in _names(node.test)):
        return False
    return all(_only_shows(one, name) for one in ast.iter_child_nodes(node))


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _shows(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and _is_value(node.test):
        return all(map(_shows, (*node.body, *node.orelse)))
    return isinstance(node, ast.Expr) and _only_calls(node.value, _SHOW, _SHOW_METHODS)


def _is_value(node: ast.AST) -> bool:
    """Whether an expression only makes something of values: it changes nothing and asks for nothing."""
    if isinstance(node, ast.Call):
        return _only_calls(node, _PURE, _PURE_METHODS)
    return isinstance(node, _VALUES) and all(map(_is_value, ast.iter_child_nodes(node)))


def _only_calls(node: ast.AST, names: frozenset[str], methods: frozenset[str]) -> bool:
    """Whether an expression calls one of these functions or methods, with values."""
    function = node.func if isinstance(node, ast.Call) else None
    known = isinstance(function, ast.Name) and function.id in names
    known |= isinstance(function, ast.Attribute) and function.attr in methods and _is_value(function.value)
    return known and isinstance(node, ast.Call) and all(map(_is_value, (*node.args, *node.keywords)))


# ---- what is in code and classes


def is_more_than_a_record(functions: Iterable[Any], name: str, *, of_variable: bool) -> bool:
    """Whether one of these functions cuts a container, or makes it grow and also reads it.

    Else it is taken for a record of what has happened, which training does not follow from.

    Args:
        of_variable: it is a variable of them, and no attribute.
    """
    kinds = _VARIABLES if of_variable else _ATTRIBUTES
    for one in functions:
        ways = _ways_of(one.__code__, name, kinds) if isinstance(one, FunctionType) else ()
        grows = [not way.isdisjoint(_GROWTH) for way in ways]
        if (any(grows) and not all(grows)) or any(not way.isdisjoint(_CUTS) for way in ways):
            return True
    return False


@functools.cache
def _ways_of(code: CodeType, name: str, kinds: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """What a function names right after each place with a variable or attribute, such as a method, or an assignment.

    To ask only how long a variable is counts as no use: loops over what a script collects do that.
    """
    rows = [row for one in codes_in(code) for row in dis.get_instructions(one) if row.opname != "CACHE"]
    names = [row.argval if isinstance(row.argval, tuple) else (row.argval,) for row in rows]
    places = [place for place, row in enumerate(rows) if name in names[place] and row.opname.startswith(kinds)]
    if kinds == _VARIABLES:
        places = [place for place in places if ("len",) not in names[max(place - 2, 0) : place]]
    following = {place: [str(row.argval) for row in rows[place + 1 : place + 4]] for place in places}
    return tuple(frozenset([rows[place].opname.partition("_")[0], *texts]) for place, texts in following.items())


@functools.cache
def codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """A function's code, and that of the functions in it."""
    inner = (codes_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return (code, *itertools.chain.from_iterable(inner))


def names_in(function: FunctionType) -> set[str]:
    """Global names and attributes that a function's code, and that of the functions in it, names."""
    return {name for code in codes_in(function.__code__) for name in code.co_names}


def function_of(one: Any) -> Any:
    """What is in a method, a property, or a wrapper of `functools`; nothing else is asked, as that may raise."""
    kind = type(one)
    if issubclass(kind, property):
        one = one.fget
    elif issubclass(kind, classmethod | staticmethod):
        one = one.__func__
    return vars(one).get("__wrapped__", one) if issubclass(type(one), FunctionType | _KEEPER) else one


@functools.cache
def methods_of(kind: type) -> tuple[FunctionType, ...]:
    """The functions of a class and of its bases, those of properties included."""
    found = (function_of(one) for base in kind.__mro__ for one in tuple(vars(base).values()))
    return tuple(one for one in found if issubclass(type(one), FunctionType))


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """The defaults of a function's parameters."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


@functools.cache
def names_of(kind: type) -> frozenset[str]:
    """Names that a class has, and those that its code, or that of its bases, assigns to attributes of anything."""
    codes = (code for one in methods_of(kind) for code in codes_in(one.__code__))
    rows = (row for code in codes for row in dis.get_instructions(code))
    return frozenset(dir(kind)).union(row.argval for row in rows if row.opname == "STORE_ATTR")


def is_metric(value: object) -> bool:
    """Whether it is a metric, a collection of some, or a tracker, of torchmetrics or of a class derived from it."""
    return _METRICS in sys.modules and any(one.__module__.split(".")[0] == _METRICS for one in type(value).__mro__)


def hooks_of_user(value: Any) -> list[Any]:
    """The user's functions that a module, its own parameters or an optimizer call."""
    tables = [one for name, one in vars(value).items() if name.endswith("_hooks")]
    for parameter in getattr(value, "_parameters", {}).values():
        if parameter is not None:
            tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    return [one for table in tables if isinstance(table, dict) for one in table.values() if _is_of_user(one)]


def _is_of_user(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    of_class = next((vars(kind)["__call__"] for kind in type(hook).__mro__ if "__call__" in vars(kind)), None)
    function = getattr(hook, "__func__", hook if isinstance(hook, FunctionType) else of_class)
    return isinstance(function, FunctionType) and is_function_of_user(function)


def chosen_class(value: Any) -> type:
    """The class that the user chose: sharding derives a class of its own from it."""
    kind = type(value)
    return next((one for one in kind.__mro__ if not one.__module__.startswith("torch.distributed")), kind)


@functools.cache
def slots_of(kind: type) -> Mapping[str, MemberDescriptorType]:
    """The slots of a class by name, but for those in whose place a derived class has something else."""
    names = (name for base in kind.__mro__ if "__slots__" in vars(base) for name in vars(base))
    members = ((name, inspect.getattr_static(kind, name)) for name in names)
    return {name: one for name, one in members if isinstance(one, MemberDescriptorType)}
