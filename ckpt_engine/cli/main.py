"""The `ckpt` command group: finds verbs, and turns errors into messages and exit codes.

Exit codes: 0 done; 1 the answer is bad news (`verify` found damage); 2 it could not be done, the message says why.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from ckpt_engine.cli.output import at_work, print_error, print_text
from ckpt_engine.errors import CkptError, ConfigError

VERBS = {
    "demo": "demo.demo",
    "ls": "ls.command",
    "show": "show.show",
    "verify": "verify.command",
    "repair": "repair.command",
    "scrub": "repair.scrub",
    "diff": "diff.command",
    "status": "status.command",
    "top": "top.top",
    "follow": "follow.command",
    "goodput": "goodput.command",
    "report": "report.command",
    "plan": "plan.command",
    "save-now": "ask_run.save_now",
    "stop": "ask_run.stop",
    "export": "export.command",
    "import": "import_.command",
    "verify-resume": "verify_resume.command",
    "prove": "prove.command",
    "compact": "compact.command",
    "cp": "cp.command",
    "fork": "fork.command",
    "prune": "prune.command",
    "keys": "keys.keys",
    "pin": "pin.pin",
    "unpin": "pin.unpin",
    "check": "doctor.check",
    "doctor": "doctor.command",
    "explain": "explain.explain",
    "init": "init.init",
    "schema": "init.schema",
    "completion": "completion.completion",
}
"""Each verb's module and its command there, in the order of the help."""
SAY_THEMSELVES = frozenset({"top", "follow", "init"})
"""Verbs that ask, or show each thing when it is found."""
_ELSEWHERE = {
    "compare": "diff",
    "copy": "cp",
    "branch": "fork",
    "mend": "repair",
    "delete": "prune",
    "info": "show",
    "inspect": "show",
    "list": "ls",
    "remove": "prune",
    "restore": "export",
    "rm": "prune",
    "runs": "ls",
    "watch": "top",
}
"""What other programs call such verbs."""


class _Verbs(click.Group):
    """Imports a verb's module when it is used, so that none pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name].partition(".")
        command = getattr(import_module(f"ckpt_engine.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        for one in command.params:
            if isinstance(one, click.Argument) and one.type is click.STRING:
                one.type = click.Path()  # shells complete paths
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError: there is no such verb; it names the nearest one."""
        known = {name: name for name in VERBS} | _ELSEWHERE
        if args[0] not in VERBS and (near := difflib.get_close_matches(args[0], known, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {known[near[0]]!r}?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt-engine", prog_name="ckpt")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Look at, check, keep, import and export the snapshots of a training run, or ask it for one.

    ROOT is the run's folder, its storage URL, or the ckpt.yaml that names its tiers. Without it: ./ckpt.yaml, the
    current folder if it is a run, or $CKPT_ROOT. SNAPSHOT is an id as `ckpt ls` shows it or the start of one, a step
    (1200 or step=1200), or latest; ROOT#SNAPSHOT is both in one word.
    """
    if ctx.invoked_subcommand is None:
        print_text(*ctx.get_help().split("\n"))
    elif ctx.invoked_subcommand not in SAY_THEMSELVES:
        ctx.with_resource(at_work(f"ckpt {ctx.invoked_subcommand}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with an exit code.

    Args:
        arguments: instead of those of the process.
    """
    try:
        code = commands.main(arguments and list(arguments), prog_name="ckpt", standalone_mode=False) or 0
    except click.Abort:
        print_text("ckpt: stopped", err=True)
        code = 1
    except CkptError as err:
        print_error(err)
        code = 2
    except click.ClickException as err:
        print_error(_of_click(err))
        code = err.exit_code
    sys.exit(code)


def _of_click(err: click.ClickException) -> ConfigError:
    """What click says of arguments, in the form of every other error."""
    context = err.ctx if isinstance(err, click.UsageError) else None
    hint = f"`{context.command_path if context else 'ckpt'} --help` shows its arguments"
    return ConfigError(" ".join(err.format_message().split()).rstrip("."), hint=hint)


if __name__ == "__main__":
    main()
