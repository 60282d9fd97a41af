"""``shardopt plan --replay``: a plan file made again from all that it says made it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from predictor.errors import InputError, PlanError
from shardopt.api.request import MADE
from shardopt.cli.interrupts import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from predictor.model.plan import ShardingPlan
    from shardopt.api.request import PlanRequest

ONLY_SHOWN = ("model", "json", "output", "quiet", "replay", "no_cache")
"""Parameters that ``--replay`` can be given with: none of them decides the answer."""


def replay_plan(path: Path, model: Path | None, context: typer.Context, *, as_json: bool) -> None:
    """Make a plan file again and say whether it is the same, byte for byte; nothing is written.

    Args:
        model: the model file, where it is no longer where the plan file says.

    Raises:
        InputError: other flags were given, too.
        PlanError: the file does not say what made it, or asks for what no plan file may; or it came
            out otherwise, with all that differs.
    """
    given = [of for of in context.command.params if _is_given(context, of.name or "")]
    extra = [of.opts[0] for of in given if of.name not in ONLY_SHOWN]
    if extra:
        raise InputError(
            f"--replay takes everything from the plan file; leave out {', '.join(extra)}"
        )
    from predictor.files import read_whole
    from predictor.model.plan_json import load_plan
    from shardopt.api.request import read_request
    from shardopt.cli.output import print_json, warn

    before = load_plan(path)
    made = before.meta.get(MADE)
    settings = made.get("settings") if isinstance(made, Mapping) else None
    if not isinstance(made, Mapping) or not isinstance(settings, Mapping):
        raise PlanError(
            f"{path}: does not say what made it; `shardopt plan ... -o FILE` of this version "
            "writes plan files that can be made again"
        )
    request, unknown = read_request(settings, str(path), None if model is None else str(model))
    for name in unknown:
        warn(f"{path}: no option of `shardopt plan` is named {name}; it is left out")
    again = _plan_again(request, settings)
    same = again.encode() == read_whole(path)
    differs = [] if same else _differences(before, again)
    if as_json:
        print_json({"plan": str(path), "same": not differs, "differs": differs})
    if differs:
        raise PlanError(f"{path}: made again, it is another plan: {'; '.join(differs)}")
    if not as_json:
        print(f"{path}: made again, byte for byte")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plan_again(request: PlanRequest, settings: Mapping[str, Any]) -> str:
    """The text of the plan file that a request makes, with settings as the file had them: files
    may lie elsewhere now."""
    from search.stop import Stop
    from shardopt.api.plan_file import best_text, made_by, plan_meta
    from shardopt.cli.planning.answer import find_answer, prepare
    from shardopt.cli.setting import refuse_outside

    ready = prepare(request)
    stop = Stop(request.effort, request.time_limit, interruptible=True, reserve=0.2)
    answer = find_answer(request, ready, stop, cached=False, progress=False, quiet=True)
    if answer.result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if request.strict:
        refuse_outside(answer.predictions[0].out_of_range)
    made = made_by(ready.setting, settings, ready.in_use)
    meta = {**plan_meta(ready.setting, request.seed), MADE: made}
    return best_text(answer.result, answer.predictions[0], meta)


def _differences(old: ShardingPlan, again: str) -> list[str]:
    """What differs between a plan file and the one that was made again."""
    from predictor.model.plan_json import plan_from_dict
    from shardopt.explain.differences import header_diffs, table_diffs

    new = plan_from_dict(json.loads(again), where="the plan made again")
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
