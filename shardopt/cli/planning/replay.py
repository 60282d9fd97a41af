"""``shardopt plan --replay``: a plan file made again from all that it says made it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from predictor.errors import InputError, PlanError

ONLY_SHOWN = ("json", "output", "quiet", "replay", "no_cache")
"""Parameters that decide where the answer goes, not what it is."""
MADE = "made_by"


def given_words(context: typer.Context) -> list[str]:
    """The words of a command that decide its answer, as they were typed."""
    words = [context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in ONLY_SHOWN or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[name]
        if parameter.param_type_name == "argument":
            words.insert(1, str(value))
        elif value is True:
            words.append(parameter.opts[0])
        else:
            words += [parameter.opts[0], str(value.value if isinstance(value, Enum) else value)]
    return words


def replay_plan(path: Path, model: Path | None, context: typer.Context, *, as_json: bool) -> None:
    """Make a plan file again and say whether it is the same, byte for byte.

    Args:
        model: the model file, where it is no longer where the plan file says.

    Raises:
        InputError: other flags were given, too.
        PlanError: the file does not say what made it; or it came out otherwise, with all that
            differs.
    """
    extra = [word for word in given_words(context)[1:] if word.startswith("--")]
    if extra:
        raise InputError(
            f"--replay takes everything from the plan file; leave out {', '.join(extra)}"
        )
    from predictor.files import read_whole
    from predictor.model.plan_json import load_plan
    from shardopt.cli.output import print_json

    before = load_plan(path)
    words = _words_of(before.meta, path)
    if model is not None:
        words[1] = str(model)
    with TemporaryDirectory() as folder:
        again = Path(folder) / "plan.json"
        with redirect_stdout(io.StringIO()):
            context.command.main(
                [*words[1:], "--no-cache", "--quiet", "-o", str(again)],
                prog_name=context.command_path,
                standalone_mode=False,
            )
        differs = _differences(path, again, read_whole(path))
    if as_json:
        print_json({"plan": str(path), "same": not differs, "differs": differs})
    if differs:
        raise PlanError(f"{path}: made again, it is another plan: {'; '.join(differs)}")
    if not as_json:
        print(f"{path}: made again, byte for byte")


def _words_of(meta: Mapping[str, Any], path: Path) -> list[str]:
    made = meta.get(MADE)
    words = made.get("words") if isinstance(made, Mapping) else None
    if not isinstance(words, list) or words[:1] != ["plan"] or not words[1:]:
        raise PlanError(
            f"{path}: does not say what made it; `shardopt plan ... -o FILE` of this version "
            "writes plan files that can be made again"
        )
    if "--tune" in words:
        raise PlanError(
            f"{path}: was made by --tune, whose trials are not made again; replay a plan that was "
            "made with the settings that it chose"
        )
    return [str(word) for word in words]


def _differences(path: Path, again: Path, content: bytes) -> list[str]:
    """What differs between a plan file and the one that was made again; empty if nothing does."""
    from predictor.model.plan_json import load_plan
    from shardopt.api.plan_file import plan_text
    from shardopt.explain.differences import header_diffs, table_diffs

    data = json.loads(again.read_bytes())
    old, new = load_plan(path), load_plan(again)
    data[MADE]["words"] = old.meta[MADE]["words"]  # files may lie elsewhere now
    if plan_text(data).encode() == content:
        return []
    found = _causes(old.meta[MADE], new.meta[MADE])
    found += [
        f"{key} was {was!r} and is {now!r}" for key, (was, now) in header_diffs(old, new).items()
    ]
    tables = [f"'{diff.table}' ({', '.join(diff.what)})" for diff in table_diffs(old, new)]
    if tables:
        found.append(f"tables that differ: {', '.join(tables)}")
    return found or ["the same plan, written otherwise"]


def _causes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Inputs, versions and code that are not what they were."""
    found = [f"the contents of {name} differ" for name in _unequal(old, new, "inputs")]
    for name in _unequal(old, new, "versions"):
        was, now = (_part(made, "versions").get(name) for made in (old, new))
        found.append(f"{name} was {was} and is {now}")
    if old.get("code") != new.get("code"):
        found.append("the code of shardopt differs")
    return found


def _unequal(old: Mapping[str, Any], new: Mapping[str, Any], part: str) -> Sequence[str]:
    a, b = _part(old, part), _part(new, part)
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _part(made: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = made.get(part)
    return found if isinstance(found, Mapping) else {}
