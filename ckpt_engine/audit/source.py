"""What the user's code does with a variable, read from its source.

A counter of an `enumerate` that is only shown to people decides nothing of the run. In doubt it does: every use of it
has to be in a call that prints or logs, or in the condition of an `if` with nothing but such calls in it.

A list that grows is most often a record. In doubt it is none: what is made of it has to be a plain value that is shown,
plotted, written down or saved, too.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import itertools
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
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
_WITH_THEIR_OWN = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_VALUES = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.JoinedStr, ast.FormattedValue, ast.keyword, ast.IfExp),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


_METRICS = "torchmetrics"
_WITH_STATEMENTS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
GROWS = frozenset(
    {
        *("append", "appendleft", "extend", "add", "insert", "pop", "popleft", "clear", "discard", "remove"),
        *("update", "setdefault", "popitem", "sort", "reverse", "rotate"),
    }
)
_CUTS = frozenset({"pop", "popleft"})
_WRITES = frozenset({"append", "appendleft", "extend", "insert", "add"})
_KEEPS_OR_SHOWS = re.compile(
    r"append|extend|plot|print|log|show|save|write|dump|draw|scatter|hist|report|record|display|add_scalar"
    r"|set_(description|postfix|data|ydata)|info|debug|warning|error",
    re.IGNORECASE,
)
_SUMS = frozenset({*("sum", "sorted", "list", "tuple", "mean", "median", "fmean"), *_PURE})
_SUM_METHODS = frozenset(
    {
        *("mean", "median", "fmean", "std", "sum", "min", "max", "average", "percentile", "quantile", "copy"),
        *("stack", "cat", "tensor", "array", "asarray", "as_tensor"),
        *_PURE_METHODS,
    }
)


def only_shows_its_count(frame: FrameType) -> bool:
    """Whether the counter of the `enumerate` at the line of this frame is only printed or logged."""
    tree = _parsed(frame.f_code.co_filename, frame.f_globals)
    found = [] if tree is None else list(_loops_at(tree, frame))
    if len(found) != 1:
        return False
    scope, loop = found[0]
    name = _counter(loop)
    return name is not None and not any(_decides(node, name) for node in _statements(scope, name))


@functools.lru_cache(maxsize=256)
def attribute_decides(kind: type, name: str) -> bool:
    """Whether a list that is an attribute is no record: a method of the class cuts it, or grows it and uses it.

    What other methods make of it may be for people only. False where the source cannot be read.
    """
    for function in itertools.chain.from_iterable(vars(base).values() for base in kind.__mro__):
        function = getattr(function, "fget", None) if isinstance(function, property) else function
        if not isinstance(function, FunctionType) or name not in function.__code__.co_names:
            continue
        _, scope = _scope_of(function.__code__, function.__globals__)
        if isinstance(scope, ast.FunctionDef) and scope.args.args:
            renamed = _Renamed(scope.args.args[0].arg, name)
            body = [renamed.visit(copy.deepcopy(one)) for one in scope.body]
            if renamed.cuts or (renamed.grows and _is_more_than_a_record(body, renamed.one)):
                return True
    return False


@functools.lru_cache(maxsize=256)
def function_decides(function: Any, name: str) -> bool:
    """Whether a function uses one of its variables, a list, for more than a record."""
    if not isinstance(function, FunctionType):
        return False
    _, scope = _scope_of(function.__code__, function.__globals__)
    return scope is not None and _is_more_than_a_record(scope.body, name)


@functools.lru_cache(maxsize=256)
def variable_decides(module: ModuleType | None, name: str) -> bool:
    """Whether functions of a module use one of its variables, a list, for more than a record."""
    tree = None if module is None or not module.__file__ else _parsed(module.__file__, vars(module))
    for one in () if tree is None else ast.walk(tree):
        if isinstance(one, ast.Lambda) and name in _names(one):
            return True
        body = one.body if isinstance(one, ast.FunctionDef) and not _has_its_own(one, name) else []
        if _is_more_than_a_record(body, name):
            return True
    return False


class _Renamed(ast.NodeTransformer):
    """Takes an attribute of an object for a variable; methods that only write to it are no use of it.

    Attributes:
        grows, cuts: what was seen to become of it.
    """

    def __init__(self, owner: str, name: str) -> None:
        self._owner, self._name = owner, name
        self.one = f"{owner}.{name}"
        self.grows = self.cuts = False

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        inner = node.value.value if isinstance(node.value, ast.Subscript) else None
        self.grows |= isinstance(inner, ast.Name) and inner.id == self.one and node.attr in _WRITES
        if of == self.one and node.attr in _WRITES:
            self.grows = True
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        self.cuts |= of == self.one and node.attr in _CUTS
        is_it = of == self._owner and node.attr == self._name
        return ast.copy_location(ast.Name(self.one, node.ctx), node) if is_it else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == self.one:
            self.cuts |= isinstance(node.ctx, ast.Del)
            self.grows |= isinstance(node.ctx, ast.Store)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        to = any(isinstance(one, ast.Name) and one.id == self.one for one in node.targets)
        self.grows |= to and self.one in _names(node.value)
        self.cuts |= to and isinstance(node.value, ast.Subscript) and self.one in _names(node.value)
        return node


def _is_more_than_a_record(body: Sequence[ast.stmt], name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether something that trains may follow from this variable in these statements."""
    for node in _flat(body):
        if name in seen or name not in _names(node) or _is_kept(node):
            continue
        made = _made_of(node)
        if made is None or any(_is_more_than_a_record(body, one, seen | {name}) for one in made):
            return True
    return False


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """Statements, with what is asked and iterated as nodes of their own, but for an `if` that only shows or cuts."""
    for node in body:
        if isinstance(node, ast.If) and all(_is_quiet(one, _names(node.test)) for one in (*node.body, *node.orelse)):
            yield from (*node.body, *node.orelse)
        elif isinstance(node, _WITH_STATEMENTS):
            asked, inside = _apart(node)
            yield from (*asked, *_flat(inside))
        elif not isinstance(node, _WITH_THEIR_OWN):
            yield node


def _apart(node: ast.stmt) -> tuple[list[ast.AST], list[ast.stmt]]:
    """What a statement asks or iterates, and the statements in it."""
    children = list(ast.iter_child_nodes(node))
    handled = [one for handler in getattr(node, "handlers", ()) for one in handler.body]
    asked = [one for one in children if not isinstance(one, ast.stmt | ast.ExceptHandler)]
    return asked, [*(one for one in children if isinstance(one, ast.stmt)), *handled]


def _is_quiet(node: ast.stmt, asked: set[str]) -> bool:
    """Whether a statement only shows or keeps, or cuts one of the variables that its `if` asks."""
    if isinstance(node, ast.Pass | ast.Delete | ast.Raise) or _keeps_or_shows(node):
        return True
    made = _made_of(node)
    return made is not None and asked.issuperset(made)


def _is_kept(node: ast.AST) -> bool:
    """Whether a statement grows or cuts the list itself, or only shows or keeps what is made of it."""
    if isinstance(node, ast.Delete | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Return):
        return isinstance(node.value, ast.Name)
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store)
    return _keeps_or_shows(node)


def _keeps_or_shows(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return last in GROWS or bool(_KEEPS_OR_SHOWS.search(last))


def _made_of(node: ast.AST) -> list[str] | None:
    """The variables that a statement makes of plain values; None where it does something else."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return None
    if not _is_sum(value):
        return None
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    kept = [target for target in targets if isinstance(target, ast.Subscript)]
    return names if len(names) + len(kept) == len(targets) else None


def _is_sum(node: ast.AST) -> bool:
    """As `_is_value`, of many values."""
    if isinstance(node, ast.Call):
        function = node.func
        sums = isinstance(function, ast.Name) and function.id in _SUMS
        sums |= isinstance(function, ast.Attribute) and function.attr in _SUM_METHODS and _is_sum(function.value)
        return sums and all(map(_is_sum, (*node.args, *node.keywords)))
    allowed = (*_VALUES, ast.GeneratorExp, ast.ListComp, ast.comprehension)
    return isinstance(node, allowed) and all(map(_is_sum, ast.iter_child_nodes(node)))


def _scope_of(code: CodeType, variables: dict[str, Any]) -> tuple[ast.Module | None, _Scope | None]:
    """The source of this code's file, and in it the function of the code."""
    tree = _parsed(code.co_filename, variables)
    return tree, None if tree is None else next(_scopes(tree, code), None)


def _parsed(file: str, variables: dict[str, Any]) -> ast.Module | None:
    return _tree_of("".join(linecache.getlines(file, variables)))


@functools.lru_cache(maxsize=8)
def _tree_of(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None  # a notebook's magic, or a file that was edited since


def _scopes(tree: ast.Module, code: CodeType) -> Iterator[_Scope]:
    """The function of this code."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module):
            if code.co_name == "<module>":
                yield scope
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([scope.lineno, *(one.lineno for one in scope.decorator_list)])
            if (scope.name, first) == (code.co_name, code.co_firstlineno):
                yield scope


def _loops_at(tree: ast.Module, frame: FrameType) -> Iterator[tuple[_Scope, ast.For]]:
    """The loops at the frame's line, in the function of the frame."""
    for scope in _scopes(tree, frame.f_code):
        for node in _own(scope):
            if isinstance(node, ast.For) and node.iter.lineno <= frame.f_lineno <= (node.iter.end_lineno or 0):
                yield scope, node


def _counter(loop: ast.For) -> str | None:
    """The variable that counts, of a loop over an `enumerate` or over a bar around one."""
    calls = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Call) and _name_of(one) == "enumerate"]
    if len(calls) != 1 or not isinstance(loop.target, ast.Tuple) or len(loop.target.elts) != 2:
        return None
    counter = loop.target.elts[0]
    return counter.id if isinstance(counter, ast.Name) else None


def _own(scope: _Scope) -> Iterator[ast.AST]:
    """What is in a scope, without the functions and the like in it, which have variables of their own."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _WITH_THEIR_OWN):
            waiting.extend(ast.iter_child_nodes(node))


def _statements(scope: _Scope, name: str) -> Iterator[ast.AST]:
    """The statements of a scope. Those with others in them are taken apart, but for an `if` that asks the variable."""
    waiting = [one for one in ast.iter_child_nodes(scope) if isinstance(one, ast.stmt)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _WITH_STATEMENTS) and not (isinstance(node, ast.If) and name in _names(node.test)):
            asked, inside = _apart(node)
            yield from asked
            waiting += inside
        elif not _has_its_own(node, name):
            yield node


def _has_its_own(node: ast.AST, name: str) -> bool:
    """Whether this is a function with another variable of that name."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or name in _declared(node):
        return False
    inside = list(_own(node))
    bound = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return name in bound | {one.arg for one in inside if isinstance(one, ast.arg)}


def _decides(node: ast.AST, name: str) -> bool:
    """Whether something that is not only shown may follow from the variable."""
    names = _names(node)
    if not _SEES_ALL.isdisjoint(names):
        return True
    if name not in names and name not in _declared(node):
        return False
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
        return False  # the target of a loop
    return not _shows(node)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _declared(node: ast.AST) -> set[str]:
    found = [one for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal)]
    return {name for one in found for name in one.names}


def _shows(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and _is_value(node.test):
        return all(map(_shows, (*node.body, *node.orelse)))
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    shown = isinstance(call.func, ast.Name) and call.func.id in _SHOW
    method = isinstance(call.func, ast.Attribute) and call.func.attr in _SHOW_METHODS and _is_value(call.func.value)
    return (shown or method) and all(map(_is_value, (*call.args, *call.keywords)))


def _is_value(node: ast.AST) -> bool:
    """Whether an expression only makes something of values: it changes nothing and asks for nothing."""
    if isinstance(node, ast.Call):
        function = node.func
        pure = isinstance(function, ast.Name) and function.id in _PURE
        pure |= isinstance(function, ast.Attribute) and function.attr in _PURE_METHODS and _is_value(function.value)
        return pure and all(map(_is_value, (*node.args, *node.keywords)))
    return isinstance(node, _VALUES) and all(map(_is_value, ast.iter_child_nodes(node)))


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


# ---- what is in code and classes


def names_in(function: FunctionType) -> set[str]:
    """Global names and attributes that a function's code, and that of the functions in it, names."""
    waiting, found = [function.__code__], set[str]()
    for code in waiting:  # it grows meanwhile
        found.update(code.co_names)
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """The defaults of a function's parameters."""
    code, defaults = function.__code__, function.__defaults__ or ()
    if not defaults and not function.__kwdefaults__:
        return {}
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


@functools.cache
def names_of(kind: type) -> frozenset[str]:
    """Names that a class has, and those that its code, or that of its bases, assigns to attributes of anything."""
    names = set(dir(kind))
    members = itertools.chain.from_iterable(vars(base).values() for base in kind.__mro__)
    waiting = [getattr(inspect.unwrap(getattr(one, "fget", None) or one), "__code__", None) for one in members]
    for code in waiting:  # it grows meanwhile
        if code is not None:
            names.update(one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
            waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(names)


def is_metric(value: object) -> bool:
    """Whether it is a metric, a collection of some, or a tracker, of torchmetrics or of a class derived from it."""
    kind: Any = type(value)
    return _METRICS in sys.modules and _is_metric_class(kind)


@functools.cache
def _is_metric_class(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == _METRICS for base in kind.__mro__)


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
