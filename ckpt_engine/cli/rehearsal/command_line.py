"""Takes a command line such as `python -u train.py --lr 1` apart, so that its script runs in a rehearsal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "srun", "mpirun", "horovodrun")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A Python program as a user starts it.

    Args:
        interpreter: with its options.
        kind: "script" or "module".
        name: of the file or module.
    """

    interpreter: tuple[str, ...]
    kind: str
    name: str
    arguments: tuple[str, ...]

    def rehearsed(self, spec: Path) -> list[str]:
        """The command that runs it in a rehearsal."""
        wrapper = ("-m", "ckpt_engine.cli.rehearsal", str(spec), self.kind, self.name)
        return [*self.interpreter, *wrapper, *self.arguments]

    @classmethod
    def parse(cls, words: Sequence[str]) -> PythonCommand:
        """Understand a command line.

        Raises:
            click.UsageError: it is none that runs one Python program; says what to write instead.
        """
        first, rest = words[0], list(words[1:])
        if not Path(first).name.startswith("python"):
            return cls._of_program(first, rest)
        options = [first]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            word = rest.pop(0)
            if word in ("-c", "-"):
                raise click.UsageError("a program given with -c or on standard input cannot be run twice: use a file")
            options.append(word)
            if word in _WITH_VALUE and rest:
                options.append(rest.pop(0))
        kind = "script"
        if rest and rest[0] == "-m":
            kind = "module"
            rest.pop(0)
        if not rest:
            raise click.UsageError(f"{' '.join(words)} names no script: give python train.py ...")
        if kind == "script" and not Path(rest[0]).is_file():
            raise click.UsageError(f"{rest[0]} is no file: give the script as for python itself")
        return cls(tuple(options), kind, rest[0], tuple(rest[1:]))

    @classmethod
    def _of_program(cls, name: str, rest: list[str]) -> PythonCommand:
        if Path(name).name in _LAUNCHERS:
            raise click.UsageError(f"{name} starts several processes: give the command of one, python train.py ...")
        found = shutil.which(name)
        shebang = _first_line(Path(found)) if found else ""
        if found is None or "python" not in shebang:
            raise click.UsageError(f"{name} is no Python program: give python train.py ...")
        words = shebang.removeprefix("#!").split()
        interpreter = words[1:] if Path(words[0]).name == "env" else words
        return cls(tuple(interpreter), "script", found, tuple(rest))


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(256).decode(errors="replace").strip() if file.read(2) == b"#!" else ""
