"""The command line: `tripool COMMAND`. Here commands get their names and errors are told; each has a file of its own.

A command's file is loaded when the command is chosen, because what `generate` or `doctor` need would cost every other
command its first second. What users can mend ends with one message and code 2; a bug shows where it happened.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
import typer.core

from tripool import __version__
from tripool.cli.habits import without_habits
from tripool.cli.screen import err, out
from tripool.core.errors import TripoolError

EXIT_WRONG = 2              # a setting, a folder, a server: something the user can mend
EXIT_INTERRUPTED = 130

COMMANDS = {                # name -> function, or group of commands, in the order of the help
    "serve": "tripool.cli.serve:serve",
    "generate": "tripool.cli.generate:generate",
    "chat": "tripool.cli.chat:chat",
    "top": "tripool.cli.top:top",
    "experts": "tripool.cli.experts:experts",
    "bench": "tripool.cli.bench:app",
    "doctor": "tripool.cli.doctor:doctor",
    "simulate": "tripool.cli.simulate:simulate",
    "plan": "tripool.cli.plan:plan",
    "calibrate": "tripool.cli.calibrate:calibrate",
    "quantize": "tripool.cli.quantize:quantize",
    "replay": "tripool.cli.replay:replay",
    "reproduce": "tripool.cli.reproduce:reproduce",
    "demo": "tripool.cli.demo:demo",
}


class Command(typer.core.TyperCommand):
    """A command that knows the flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, without_habits(args))


class Commands(typer.core.TyperGroup):
    """The commands of the table, each loaded when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module, _, name = COMMANDS[cmd_name].partition(":")
            found = getattr(importlib.import_module(module), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False)
                alone.command(cmd_name, cls=Command)(found)
                found = alone
            self.commands[cmd_name] = typer.main.get_command(found)
            self.commands[cmd_name].name = cmd_name
        return self.commands[cmd_name]


app = typer.Typer(
    name="tripool", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves DeepSeek-class mixture-of-experts models from three peer pools: prefill, decode and cache.",
    epilog="Begin with `tripool demo`, or with `tripool serve` and, in another terminal, `tripool chat`.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                          help="Show the version and end.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error happened, too.")] = False,
) -> None:
    """What may stand before the command's name."""


def run() -> None:
    """The console script."""
    try:
        app()
    except TripoolError as error:
        if "--verbose" in sys.argv[1:]:
            raise
        err.print(f"[bold red]error:[/bold red] {_escaped(str(error))}")
        sys.exit(EXIT_WRONG)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # `tripool ... | head` is no error
        sys.exit(0)


def _escaped(text: str) -> str:
    """Brackets are text here, not markup."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    run()
