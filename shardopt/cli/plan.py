"""``shardopt plan``: search the plans of a model and write the best one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardopt.cli import options
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.cli.tune import options as tune_options

if TYPE_CHECKING:
    from predictor.model.plan import ShardingPlan
    from search.in_use.plan import PlanInUse
    from search.problem import Result
    from shardopt.api.setting import Setting
    from shardopt.report.plan import PlanReport

REPORTING = 0.2
"""Share of ``--time-limit`` that is left to the prediction of what was found and its report."""
HORIZON = 10_000
"""Steps over which a move must pay for itself unless ``--horizon`` says otherwise."""


def plan(
    context: typer.Context,
    model: options.ModelOrReplay = None,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = None,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    search: options.Search = options.Searchers.ALL,
    seed: options.Seed = 0,
    effort: options.Effort = 1.0,
    time_limit: options.TimeLimit = None,
    top_k: options.TopK = 3,
    from_: options.From = None,
    max_moves: options.MaxMoves = None,
    max_gib: options.MaxGib = None,
    horizon: options.Horizon = None,
    objective: options.ObjectiveOption = options.Objectives.NOMINAL,
    scenarios: options.ScenariosOption = None,
    stats: options.Stats = None,
    replay: options.Replay = None,
    no_cache: options.NoCache = False,
    tune: tune_options.Tune = None,
    objectives: tune_options.Objectives = None,
    trials: tune_options.Trials = None,
    storage: tune_options.Storage = None,
    study: tune_options.Study = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Search for the sharding plan with the shortest predicted iteration time."""
    started = time.monotonic()
    from search.stop import Stop
    from shardopt.api.scenarios import read_scenarios
    from shardopt.api.setting import Machine
    from shardopt.cli.checks import check_search
    from shardopt.cli.output import check_writable
    from shardopt.cli.planning.answer import Budget, find_answer
    from shardopt.cli.planning.replay import given_words, replay_plan
    from shardopt.cli.setting import refuse_outside, resolve
    from shardopt.cli.tune.flags import TuneFlags

    if replay is not None:
        replay_plan(replay, model, context, as_json=json)
        return
    if model is None:
        raise typer.BadParameter("missing; give the model file", param_hint="'MODEL'")
    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_search(seed, effort, time_limit, top_k)
    check_writable(output, [path for path in (model, cluster, from_) if path is not None])
    limits = MoveLimits(max_moves, max_gib, horizon)
    in_use = plan_in_use(from_, limits)
    tuning = TuneFlags(tune, objectives, trials, storage, study, from_)
    tuning.check()
    windows = [Path(name) for name in (stats or "").split(",") if name]
    setting = resolve(model, machine, in_use, strict=strict, stats=windows)
    source = read_scenarios(scenarios, setting.hardware, setting.windows)

    if tune is not None:
        refuse_with_tune(objective, scenarios, stats)
        from shardopt.cli.tune.run import OutputChoice, run_tuning

        show = OutputChoice(json, output, quiet, strict)
        budget = (effort, time_limit, seed, search.names, top_k)
        run_tuning(model, setting, tuning, budget, show)
        return

    near = placed_tables(setting, from_, in_use, limits)
    limit = Budget(seed, effort, time_limit, top_k, search.names, objective.value, source)
    stop = Stop(effort, time_limit, interruptible=True, reserve=REPORTING, started=started)
    answer = find_answer(
        setting, near, limit, stop, cached=not no_cache, progress=not (json or quiet), quiet=quiet
    )
    result, predictions = answer.result, answer.predictions
    if strict:
        refuse_outside(predictions[0].out_of_range)
    from shardopt.api.plan_file import made_by, plan_meta, write_best

    made = made_by(setting, given_words(context), in_use)
    meta = {**plan_meta(setting, seed), "made_by": made}
    if output is not None:
        write_best(output, result, predictions[0], meta)
    if json:
        from shardopt.api.moves import from_object
        from shardopt.cli.output import note, print_json
        from shardopt.cli.planning.measuring import measuring_command
        from shardopt.report.objects import deciding_object, plan_object

        note(setting.notes, quiet=quiet)
        found = plan_object(result, predictions, meta, setting.notes, answer.gain, answer.instead)
        command = partial(measuring_command, device=setting.hardware.device)
        decides = {"deciding": deciding_object(answer.deciding, command)}
        print_json({**found, **from_object(result, answer.move, from_), **decides})
        _end(result)
        return
    from shardopt.cli.planning.measuring import measuring_words
    from shardopt.explain.deciding import deciding_text
    from shardopt.report.plan import PlanReport

    written = None if output is None else str(output)
    following = (
        f"shardopt explain {model} {written}" if written else "the same command with -o plan.json"
    )
    report = PlanReport(
        setting,
        result,
        predictions,
        written,
        following,
        answer.move,
        gain=answer.gain,
        instead=answer.instead,
        deciding=[
            deciding_text(one, measuring_words(one.group, setting.hardware.device))
            for one in answer.deciding
        ],
        guessed=any(one.unmeasured for one in answer.deciding),
    )
    _show(report, quiet)
    _end(result)


def refuse_with_tune(
    objective: options.Objectives, scenarios: str | None, stats: str | None
) -> None:
    """Settings are tuned for the predicted time alone."""
    from predictor.errors import InputError

    flags = {
        "--objective": objective is not objective.NOMINAL,
        "--scenarios": scenarios,
        "--stats": stats,
    }
    for flag, given in flags.items():
        if given:
            raise InputError(
                f"{flag} is about one setting, and --tune tries many; tune first, then plan for "
                f"the chosen setting with {flag}"
            )


@dataclass(frozen=True)
class MoveLimits:
    """How far the plan may be from that of ``--from``; None where no flag says so."""

    max_moves: int | None
    max_gib: float | None
    horizon: int | None

    def check(self, path: Path | None) -> None:
        """Refuse what is out of range or stands alone."""
        from predictor.errors import InputError

        for flag, value, low, hint in (
            ("--max-moves", self.max_moves, 0, " (0 only predicts it)"),
            ("--max-gib", self.max_gib, 0, ""),
            ("--horizon", self.horizon, 1, ""),
        ):
            if value is None:
                continue
            if path is None:
                raise InputError(
                    f"{flag} limits the changes to the plan of --from; give --from FILE too"
                )
            if not low <= value < math.inf:
                raise InputError(f"{flag} is {value}; it must be at least {low}{hint}")


def plan_in_use(path: Path | None, limits: MoveLimits) -> ShardingPlan | None:
    """The plan that ``--from`` names.

    Raises:
        InputError: it cannot be read, or a limit on moves is out of range or stands alone.
    """
    from predictor.model.plan_json import load_plan

    limits.check(path)
    return None if path is None else load_plan(path)


def placed_tables(
    setting: Setting, path: Path | None, plan: ShardingPlan | None, limits: MoveLimits
) -> PlanInUse | None:
    """The plan in use as the search takes it, if it is one of this model."""
    from predictor.model.plan_check import model_mismatch
    from predictor.units import gib
    from search.in_use.plan import PlanInUse
    from shardopt.api.given_plans import fit_plan
    from shardopt.cli.output import warn

    if plan is None:
        return None
    fitting = fit_plan(plan, setting, where=str(path))
    doubt = model_mismatch(plan, setting.workload)
    if doubt:
        warn(f"{path}: {doubt}")
    max_bytes = None if limits.max_gib is None else gib(limits.max_gib)
    return PlanInUse(fitting, limits.max_moves, max_bytes, limits.horizon or HORIZON)


def _show(report: PlanReport, quiet: bool) -> None:
    from shardopt.report.console import make_console
    from shardopt.report.plan import show_headline, show_plan

    (show_headline if quiet else show_plan)(make_console(), report)


def _end(result: Result) -> None:
    """The exit code says whether the search was interrupted; its plan is written and shown."""
    if result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
