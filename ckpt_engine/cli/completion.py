"""`ckpt completion`: lets the shell complete verbs and options."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ckpt_engine.cli.output import print_text
from ckpt_engine.errors import ConfigError
from ckpt_engine.tools.new_files import new_file

_SHELLS = {
    "bash": ".local/share/bash-completion/completions/ckpt",
    "fish": ".config/fish/completions/ckpt.fish",
    "zsh": ".zfunc/_ckpt",
}
"""Where each shell looks for completions of a user."""


@click.command("completion", short_help="Let the shell complete verbs and options.")
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
def completion(shell: str | None) -> None:
    """Install the completion of `ckpt` for SHELL (default: the one in $SHELL)."""
    from ckpt_engine.cli.main import commands

    name = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name) if name in _SHELLS else None
    if kind is None:
        raise ConfigError(f"no completion for the shell {name!r}", hint=f"name one of {', '.join(_SHELLS)}")
    file = Path.home() / _SHELLS[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    with new_file(file, replace=True) as out:
        out.write(kind(commands, {}, "ckpt", "_CKPT_COMPLETE").source().encode())
    more = " if ~/.zshrc has `fpath+=~/.zfunc` before `compinit`" if name == "zsh" else ""
    print_text(f"wrote {file}: new shells complete `ckpt`{more}")
