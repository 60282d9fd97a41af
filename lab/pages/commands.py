"""The chapter of docs/commands.md with every flag, as ``--help-all`` describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from lab.pages.tables import table_head
from shardopt.cli.app import app


def flag_lines() -> Iterator[str]:
    """Yield a chapter for each command, with a line for each of its arguments and flags."""
    for name, command in _commands(get_command(app), "shardopt"):
        yield f"### {name}\n"
        yield f"{command.help.strip().splitlines()[0]}\n"
        yield from table_head("flag", "value", "default", "does")
        for parameter in sorted(command.params, key=lambda p: p.param_type_name != "argument"):
            cells = (_names(parameter), _value(parameter), _default(parameter))
            yield f"| {' | '.join(cells)} | {_cell(parameter.help or '')} |"
        yield ""


def _commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Yield every visible command, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, subcommand in inner.items():
        if not subcommand.hidden:
            yield from _commands(subcommand, f"{words} {name}")


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in parameter.opts)


def _value(parameter: Any) -> str:
    """Return the placeholder of a flag's value, or its allowed words."""
    if parameter.param_type_name == "argument":
        return ""
    kind = parameter.type_descriptor.annotation
    words = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = [str(choice.value) for choice in kind]
    return _cell(parameter.metavar or "|".join(words))


def _default(parameter: Any) -> str:
    """Return the default as a user types it; empty for flags without one."""
    value = parameter.default
    if value is None or isinstance(value, bool) or callable(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    """Return the text as one cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
