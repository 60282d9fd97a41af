"""The `shardopt` command: one file a command, heavy imports inside the commands.

Every failure that a user can cause ends in one message on stderr and the exit code of the
contract: 2 bad usage or input, 3 no feasible plan, 4 no usable hardware profile.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from predictor.errors import ShardoptError
from predictor.files import inputs_remembered
from shardopt import __version__
from shardopt.cli import (
    bench,
    calibrate,
    diff,
    explain,
    hardware,
    learn,
    plan,
    predict,
    stats,
    trace,
)
from shardopt.cli.command import command
from shardopt.cli.interrupts import EXIT_INTERRUPTED, MESSAGES, remember_interrupts
from shardopt.cli.output import close_stdout, open_streams, say
from shardopt.extras import missing_package

EXIT_USAGE = 2
EXIT_UNFORESEEN = 70
EXIT_BROKEN_PIPE = 141
DEBUG = "--debug"
"""Flag that shows the traceback of an unexpected error; it may stand anywhere on the line."""
CONFIRM, COUNT = "--confirm", 4
"""Option whose number may be left out, and its default."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors after which nothing more can be written to stdout."""

# Typer brings its own copy of click since 0.26 and used the package before; the base class of all
# usage errors is found from the one error that typer exports either way.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

USER = "Commands"
EXIT_CODES = """Exit codes: 0 done; 2 bad usage or input; 3 no plan fits; 4 hardware profile \
missing, or a cost outside its range under --strict; 70 unexpected error; 130 \
interrupted or 143 terminated, after writing the best plan so far; 141 nobody reads the output."""
EPILOG = f"Start with: shardopt plan MODEL --gpus 8 -o plan.json\n\n{EXIT_CODES}"

app = typer.Typer(
    name="shardopt",
    help="Predict the iteration time of TorchRec sharding plans and find the best one.",
    epilog=EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (
    stats.stats,
    plan.plan,
    predict.predict,
    explain.explain,
    calibrate.calibrate,
    learn.learn,
    diff.diff,
    hardware.hardware,
    hardware.cluster,
    trace.trace,
):
    rare = plan.RARE if function is plan.plan else ()
    decorated = command(function, rare)
    app.command(function.__name__, rich_help_panel=USER, epilog=EXIT_CODES)(decorated)
app.add_typer(bench.app, name="bench", rich_help_panel=USER)


def _show_version(value: bool) -> None:
    if value:
        print(f"shardopt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an unexpected error.")
    ] = False,
) -> None:
    pass


def main(
    argv: Sequence[str] | None = None, commands: typer.Typer = app, name: str = "shardopt"
) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; by default those of the process.
        commands, name: commands and name of another program with the same exit codes.

    Returns:
        The exit code; nothing that a user can cause raises.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG] or ["--help"]
    for at, word in enumerate(words):
        if word == CONFIRM and not "".join(words[at + 1 : at + 2]).lstrip("-").isdigit():
            words[at] = f"{CONFIRM}={COUNT}"
    open_streams()
    interrupts: list[int] = []
    try:
        with remember_interrupts(interrupts), inputs_remembered():
            code = _run(words, commands, name, debug, interrupts)
    except KeyboardInterrupt:  # as the blocks above begin or end
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        code = interrupts[0] if interrupts else code
        return _fail(MESSAGES[code], code)
    return code


def _run(
    words: list[str], commands: typer.Typer, name: str, debug: bool, interrupts: Sequence[int]
) -> int:
    """Run a command, report its error, and return its exit code.

    Args:
        interrupts: exit codes of the signals received so far.
    """
    try:
        # without standalone mode typer raises usage errors and returns the code of an Exit
        command = typer.main.get_command(commands)
        code = command.main(words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except SystemExit:  # rich, with which typer prints, ends so where nobody reads
        code = EXIT_BROKEN_PIPE
    except Exception as error:
        # C code that Ctrl-C interrupts may raise an error of its own in its place
        if not interrupts and debug:
            raise
        code = EXIT_INTERRUPTED if interrupts else _explain(error)
    close_stdout()
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Print an error with what the user can do about it, and return the exit code."""
    if isinstance(error, ShardoptError):
        flags = ", ".join("--" + name.replace("_", "-") for name in error.inputs)
        return _fail(f"{error}\n  flags: {flags}" if flags else str(error), error.exit_code)
    if isinstance(error, ModuleNotFoundError):
        missing = missing_package(error)
        if missing is not None:
            return _fail(str(missing), missing.exit_code)
    if isinstance(error, UsageError):
        text = getattr(error, "format_message", lambda: str(error))().replace("Value error, ", "")
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "shardopt"
        return _fail(f"{text}\n  '{command} --help' shows what is allowed", EXIT_USAGE)
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if isinstance(error, OSError) and error.errno in FULL:
        return _fail(f"cannot write: {error.strerror}; make room, or write elsewhere", EXIT_USAGE)
    return _fail(
        f"unexpected error in shardopt {__version__}: {type(error).__name__}: {error}"
        f"\n  please report it, with the command and its files; {DEBUG} shows the traceback",
        EXIT_UNFORESEEN,
    )


def _fail(message: str, code: int) -> int:
    say(f"error: {message}")
    return code
