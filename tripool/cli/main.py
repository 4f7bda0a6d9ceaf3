"""The command line: `tripool COMMAND`. Here commands get their names and errors are told; each has a file of its own.

What users can mend ends with one message and code 2; a bug shows where it happened.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tripool import __version__
from tripool.cli.bench import app as bench
from tripool.cli.chat import chat
from tripool.cli.demo import demo
from tripool.cli.doctor import doctor
from tripool.cli.generate import generate
from tripool.cli.screen import err, out
from tripool.cli.serve import serve
from tripool.cli.top import top
from tripool.core.errors import TripoolError

EXIT_WRONG = 2              # a setting, a folder, a server: something the user can mend
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="tripool", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves DeepSeek-class mixture-of-experts models from three peer pools: prefill, decode and cache.",
    epilog="Begin with `tripool demo`, or with `tripool serve` and, in another terminal, `tripool chat`.",
)
for command in (serve, generate, chat, top, doctor, demo):
    app.command()(command)
app.add_typer(bench, name="bench")


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
