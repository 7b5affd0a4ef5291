"""Runs a script as `python` would, with other behaviour of our own classes; the user's and a trainer's stay the same.

`python -m ckpt_engine.cli.rehearsal_patches SPEC script|module NAME ARGUMENTS...`

The parts of ckpt_engine are changed right after they are imported, when the script imports them, so that a script that
sets up its surroundings before it imports torch finds them as it always does.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from ckpt_engine.cli.rehearsal_runs import Spec, event_line

WAIT_SECONDS = 600.0
_OURS = ("tiers", "keep", "overhead", "max_lost_work", "mtbf", "every_n_steps", "every_seconds", "at_end", "on_error")
"""Options that a rehearsal decides."""

Patch = Callable[[ModuleType], None]


class Rehearsal:
    """What goes on in this process.

    Args:
        spec: where, how far, and when to die.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._roots: list[str] = []
        self._loaders: dict[int, int] = {}
        self._batches: list[tuple[int, int, str]] = []
        self._attributes = Attributes()
        self._file = os.open(spec.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def install(self) -> None:
        """Take effect for everything that is imported from now on."""
        patches: dict[str, Patch] = {
            "ckpt_engine.audit.audit": self._patch_audit,
            "ckpt_engine.config": self._patch_config,
            "ckpt_engine.engine": self._patch_engine,
            "ckpt_engine.data.iteration": self._patch_iteration,
        }
        for name in [name for name in patches if name in sys.modules]:
            patches.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, _AfterImport(patches))

    def _note(self, event: str, **values: Any) -> None:
        os.write(self._file, event_line(event, **values))

    # ---- what is changed

    def _patch_config(self, module: ModuleType) -> None:
        original = module.load_config

        def load_config(source: Any = None, /, **options: Any) -> Any:
            config = original(source, **options)
            return config if config.root_url.startswith(self._spec.folder) else original(self._overlaid(config))

        module.load_config = load_config  # type: ignore[attr-defined]

    def _patch_audit(self, module: ModuleType) -> None:
        original = module.Audit.__init__

        def __init__(audit: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807 - it becomes that method
            original(audit, *arguments, **named)
            self._attributes.add(audit.roots, audit.skipped)

        module.Audit.__init__ = __init__

    def _overlaid(self, config: Any) -> Mapping[str, Any]:
        """The user's options, with a snapshot of each step, all kept, in a folder of the rehearsal."""
        root = config.root_url
        if root not in self._roots:
            self._roots.append(root)
            self._note("root", url=root)
        kept = {name: value for name, value in config.options().items() if name not in _OURS}
        return {
            **kept,
            "tiers": str(Path(self._spec.folder) / f"run{self._roots.index(root)}"),
            "every_n_steps": 1,
            "keep": {"last": 10 * self._spec.steps + 100},
            "on_error": "raise",
        }

    def _patch_engine(self, module: ModuleType) -> None:
        rehearsal = self

        class Engine(module.Engine):  # type: ignore[name-defined, misc]
            """Waits instead of skipping, and ends the process where the rehearsal ends."""

            def prepare(self, *_: Any, **__: Any) -> None:
                """Nothing: while memory is made ready in the background, snapshots are skipped."""

            def ready(self, **kind: Any) -> bool:
                self.wait(WAIT_SECONDS)
                return bool(super().ready(**kind))

            def save(self, state: Any, *, step: int, **more: Any) -> Any:
                self.wait(WAIT_SECONDS)
                rehearsal.saving(step, state)
                handle = super().save(state, step=step, **more)
                rehearsal.saved(self, handle, step)
                return handle

            def load(self, *args: Any, **kwargs: Any) -> Any:
                state = super().load(*args, **kwargs)
                if self.loaded is not None:
                    rehearsal.loaded(self.loaded.info.id)
                return state

        module.Engine = Engine  # type: ignore[attr-defined]

    def _patch_iteration(self, module: ModuleType) -> None:
        original = module.FollowedIterator.__next__

        def __next__(iterator: Any) -> Any:  # noqa: N807 - it becomes that method
            batch = original(iterator)
            self.fetched(iterator._loader, iterator._epoch.fetched - 1, batch)
            return batch

        module.FollowedIterator.__next__ = __next__

    # ---- what happens

    def fetched(self, loader: object, number: int, batch: Any) -> None:
        """A batch was fetched for training."""
        which = self._loaders.setdefault(id(loader), len(self._loaders))
        seen = xxhash.xxh3_128()
        _absorb(batch, seen)
        self._batches.append((which, number, seen.hexdigest()))

    def loaded(self, snapshot: str) -> None:
        """The run resumes."""
        self._note("loaded", snapshot=snapshot)

    def saving(self, step: int, state: Any) -> None:
        """Everything up to the last snapshot is durable; here a killed run dies."""
        if self._spec.kill_at is not None and step > self._spec.kill_at:
            self._note("killed", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        self._note("saving", step=step, batches=self._batches, attributes=self._attributes.changed(state))
        self._batches = []

    def saved(self, engine: Any, handle: Any, step: int) -> None:
        """A snapshot was staged; the one of the last step ends the process."""
        if step < self._spec.steps:
            return
        engine.before_update()
        handle.wait(WAIT_SECONDS)
        engine.close()
        self._note("stopped", step=step)
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither the rest of the script nor its exit handlers: it is in the middle of its training.
        os._exit(0)


class Attributes:
    """What the objects that take part in training hold, and the variables of the loop on the stack."""

    def __init__(self) -> None:
        self._roots: list[Callable[[], Mapping[str, Any]]] = []
        self._skipped: set[str] = set()
        self._before: dict[str, tuple[str, str]] = {}

    def add(self, roots: Callable[[], Mapping[str, Any]], skipped: Iterable[str]) -> None:
        """Objects that an adapter knows, by the names that users know them by."""
        self._roots.append(roots)
        self._skipped.update(skipped)

    def changed(self, state: Any) -> dict[str, tuple[str, str]]:
        """Class and digest of those that are not what they were at the last call.

        Args:
            state: of the snapshot, which has the weights of its models.
        """
        from ckpt_engine.audit.audit import all_attributes
        from ckpt_engine.audit.carried import live_variables  # torch

        objects = {path: one for roots in self._roots for path, one in roots().items()}
        saved = _memory_of(state)
        for function, values in live_variables(sys._getframe(1)).items():
            models = {name: one for name, one in values.items() if _is_saved(one, saved)}
            objects |= {f"{function}().{name}": one for name, one in models.items()}
            objects[f"{function}()"] = _Variables({name: one for name, one in values.items() if name not in models})
        now = all_attributes(objects, self._skipped)
        changed = {path: value for path, value in now.items() if self._before.get(path) != value}
        self._before = now
        return changed


def _memory_of(state: Any) -> set[int]:
    """Where the tensors of a state are."""
    import torch

    from ckpt_engine.audit.values import address

    if isinstance(state, torch.Tensor):
        return {address(state)}
    items = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return {one for item in items for one in _memory_of(item)}


def _is_saved(value: Any, saved: set[int]) -> bool:
    """Whether it is a model whose weights are in that memory."""
    import torch

    return isinstance(value, torch.nn.Module) and _memory_of(list(value.parameters())) <= saved


class _Variables:
    """A function's variables as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


class _AfterImport(MetaPathFinder):
    """Calls a function with a module right after the module was imported."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        patch = self._patches.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, patch)
        return spec


class _Patching(Loader):
    """A module's own loader, and the function afterwards."""

    def __init__(self, inner: Loader, patch: Patch) -> None:
        self._inner = inner
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._patch(module)


def _absorb(node: Any, seen: xxhash.xxh3_128) -> None:
    """Everything in a batch that has bytes of its own."""
    import numpy as np  # the script has imported torch by now
    import torch

    if isinstance(node, torch.Tensor):
        plain = node.detach().cpu().contiguous()
        seen.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        seen.update(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(node, np.ndarray):
        seen.update(f"{node.dtype}{node.shape}".encode() + node.tobytes())
    elif isinstance(node, Mapping):
        for key in node:
            seen.update(str(key).encode())
            _absorb(node[key], seen)
    elif isinstance(node, list | tuple):
        for child in node:
            _absorb(child, seen)
    else:
        has_value = node is None or isinstance(node, bool | int | float | str | bytes)
        seen.update((repr(node) if has_value else type(node).__qualname__).encode())


def main() -> None:
    """Set up this process as the script finds it in a plain run, and run it."""
    _, spec, kind, name, *arguments = sys.argv
    Rehearsal(Spec.read(Path(spec))).install()
    sys.argv = [name, *arguments]
    if kind == "module":
        sys.path[0] = os.getcwd()  # noqa: PTH109 - what `python -m` puts there
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
