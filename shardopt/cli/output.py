"""Output: results on stdout, messages on stderr, files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from predictor.errors import InputError
from shardopt.files import atomic_write_text, is_stream, refuse_input, target_of
from shardopt.printable import printable

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shardopt.api.document import PredictAnswer
    from shardopt.api.request import Machine, PlanRequest
    from shardopt.report.blocks import View


def say(text: str) -> None:
    """A message on stderr, on which nothing else depends: not that somebody reads it, nor that the
    names in it leave the terminal alone."""
    with suppress(OSError):
        print(f"shardopt: {printable(text)}", file=sys.stderr)


def warn(text: str) -> None:
    """Say what may make the result wrong; shown even under ``--quiet``."""
    say(f"warning: {text}")


def note(texts: Iterable[str], *, quiet: bool) -> None:
    """Say what is good to know; nothing under ``--quiet``."""
    if not quiet:
        for text in texts:
            say(text)


def show(view: View, *, json: bool, quiet: bool) -> None:
    """Print a view in the form that is asked for, and end as it says."""
    from shardopt.report.console import draw, make_console

    note(view.notes, quiet=quiet)
    if json:
        print_json(view.data)
    else:
        draw(make_console(), view.brief if quiet and view.brief else view.full)
    if view.code:
        raise typer.Exit(view.code)


def check_writable(path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output file that cannot be written, before any work is done for it.

    Commands ask twice: before they read, and again once they know all files that theirs name.

    Args:
        path: the file that ``-o`` names; None is fine.
        inputs: files that the command is about to read; those it has read are known.

    Raises:
        InputError: says what is wrong and what to choose instead.
    """
    if path is None or is_stream(path):
        return
    if not os.access(target_of(path).parent, os.W_OK | os.X_OK):
        raise InputError(
            f"{path}: cannot write: no permission to create files in {path.parent}; "
            "choose another file"
        )
    refuse_input(path)
    for read in inputs:
        if path.exists() and read.exists() and path.samefile(read):
            raise InputError(f"{path}: is an input of this command; choose another file to write")


def predict_plans(
    model: Path, paths: Sequence[Path], machine: Machine, *, strict: bool = False
) -> PredictAnswer:
    """Predictions of plan files, with a warning for every doubt about them."""
    from shardopt.api import given_plans

    answer = given_plans.predict_plans(model, paths, machine, strict=strict)
    for item in answer.predictions:
        for doubt in item.doubts:
            warn(f"{item.plan}: {doubt}")
    return answer


UNWRITTEN = ("cluster", "hbm_gib", "ddr_gib", "reserve", "batch_size")
"""Options of a machine that `predict` and `explain` do not take from a plan file."""


def next_lines(
    request: PlanRequest,
    output: Path | None,
    condition: str = "",
    *,
    applied: Path | None = None,
) -> tuple[str, str]:
    """Say what became of the best plan, and what to type next to see the same prediction.

    Args:
        request: names the model file and the machine.
        condition: of the next command, where the model file has yet to change.
        applied: the model file with advice, where the written plan is for that.
    """
    if output is None:
        return "No plan was written. Next:", "the same command with -o plan.json"
    plan = "Plan 1" if applied is None else f"The plan for {applied}"
    options = {name: getattr(request, name) for name in UNWRITTEN}
    if condition or applied is not None:
        del options["batch_size"]  # the changed model file has it
    files = [str(applied or request.model), str(output)]
    explain = f"shardopt explain {shlex.join([*files, *words_of(options)])}{condition}"
    return f"{plan} is written to {output}. Next:", explain


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed: one that is None or False is left out, a list is repeated."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        several = value if isinstance(value, list) else [value]
        words += [
            word
            for item in several
            if item is not None and item is not False
            for word in ([flag] if item is True else [flag, str(item)])
        ]
    return words


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON object; the file holds all of it or what it held before."""
    atomic_write_text(path, to_json(data))


def print_json(data: Mapping[str, Any] | BaseModel) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(to_json(data))
    sys.stdout.flush()


def to_json(data: Mapping[str, Any] | BaseModel) -> str:
    """Indented JSON that other languages read too."""
    from shardopt.api.json_object import finite

    return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"


def open_streams() -> None:
    """Make stdout and stderr fit to be printed on: what is closed takes everything, a terminal that
    lacks a character shows `?` in its place, and one without width is 80 wide."""
    if os.environ.get("COLUMNS", "").isdigit() and not int(os.environ["COLUMNS"]):
        os.environ["COLUMNS"] = "80"
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def close_stdout() -> None:
    """Give up what stdout could not take, as Python would try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()
