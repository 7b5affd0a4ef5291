"""Whether the counter of an `enumerate` is only shown to people: then it decides nothing of the run.

Read from the source of the loop, and in doubt no: every use of the counter has to be in a call that prints or logs, or
in the condition of an `if` with nothing but such calls in it.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType

from ckpt_engine.audit.carried import instruction_at, loops_around

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


def only_shows_its_count(frame: FrameType) -> bool:
    """Whether this frame is at a `for i, … in enumerate(…)` whose `i` is only printed or logged."""
    here = instruction_at(frame)
    loops = loops_around(frame.f_code, here)
    tree = _tree(frame) if loops and loops[0].head == here else None
    found = [] if tree is None else list(_loops_at(tree, frame))
    if len(found) != 1:
        return False
    scope, loop = found[0]
    name = _counter(loop)
    return name is not None and not any(_decides(node, name) for node in _statements(scope, name))


def _tree(frame: FrameType) -> ast.Module | None:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None  # a notebook's magic, or a file that was edited since


def _loops_at(tree: ast.Module, frame: FrameType) -> Iterator[tuple[_Scope, ast.For]]:
    """The loops at the frame's line, in the function of the frame."""
    code = frame.f_code
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module):
            is_here = code.co_name == "<module>"
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([scope.lineno, *(one.lineno for one in scope.decorator_list)])
            is_here = (scope.name, first) == (code.co_name, code.co_firstlineno)
        else:
            continue
        for node in _own(scope) if is_here else ():
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
        apart = isinstance(node, ast.If) and name not in _names(node.test)
        if apart or isinstance(node, ast.For | ast.While | ast.With | ast.Try):
            yield from (one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt | ast.ExceptHandler))
            waiting += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
            waiting += [one for handler in getattr(node, "handlers", ()) for one in handler.body]
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
