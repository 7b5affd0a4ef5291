"""The `ckpt` command group: finds verbs, and turns errors into messages and exit codes.

Exit codes: 0 done; 1 the answer is bad news (`verify` found damage); 2 it could not be done, the message says why.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from ckpt_engine.errors import CkptError

VERBS = (
    "ls",
    "show",
    "verify",
    "diff",
    "status",
    "save-now",
    "stop",
    "export",
    "import",
    "verify-resume",
    "compact",
    "cp",
    "prune",
    "pin",
    "unpin",
    "doctor",
    "schema",
)


class _Verbs(click.Group):
    """Imports a verb's module when it is used, so that none pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        command = import_module(f"ckpt_engine.cli.{module_of(cmd_name)}").command
        assert isinstance(command, click.Command)
        return command


def module_of(verb: str) -> str:
    """The module of a verb: `import` and `verify-resume` are no names that Python takes."""
    return f"{verb}_" if keyword.iskeyword(verb) else verb.replace("-", "_")


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt-engine", prog_name="ckpt")
def commands() -> None:
    """Look at, check, keep, import and export the snapshots of a training run, or ask it for one.

    ROOT is the run's folder, its storage URL, or the ckpt.yaml that names its tiers. SNAPSHOT is an id as `ckpt ls`
    shows it or the start of one, a step (1200 or step=1200), or latest.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with an exit code.

    Args:
        arguments: instead of those of the process.
    """
    try:
        commands.main(None if arguments is None else list(arguments), prog_name="ckpt")
    except CkptError as err:
        click.echo(f"ckpt: {err}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
