"""``shardopt plan``: search the plans of a model and write the best one."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import typer

from shardopt.cli import options
from shardopt.cli import tune as tuning_flags
from shardopt.cli.interrupts import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from search.problem import Result
    from shardopt.report.plan import PlanReport

REPORTING = 0.2
"""Share of ``--time-limit`` that is left to the prediction of what was found and its report."""


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
    tune: tuning_flags.Tune = None,
    objectives: tuning_flags.Objectives = None,
    trials: tuning_flags.Trials = None,
    storage: tuning_flags.Storage = None,
    study: tuning_flags.Study = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Search for the sharding plan with the shortest predicted iteration time."""
    started = time.monotonic()
    from search.stop import Stop
    from shardopt.api.request import PlanRequest
    from shardopt.cli.output import check_writable
    from shardopt.cli.planning.answer import find_answer, prepare
    from shardopt.cli.planning.replay import replay_plan
    from shardopt.cli.setting import refuse_outside

    if replay is not None:
        replay_plan(replay, model, context, as_json=json)
        return
    if model is None:
        raise typer.BadParameter("missing; give the model file", param_hint="'MODEL'")
    request = PlanRequest(
        model=str(model),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        cluster=None if cluster is None else str(cluster),
        hardware=hardware,
        hbm_gib=hbm_gib,
        ddr_gib=ddr_gib,
        reserve=reserve,
        batch_size=batch_size,
        strict=strict,
        search=search.value,
        seed=seed,
        effort=effort,
        time_limit=time_limit,
        top_k=top_k,
        from_=None if from_ is None else str(from_),
        max_moves=max_moves,
        max_gib=max_gib,
        horizon=horizon,
        objective=objective.value,
        scenarios=scenarios,
        stats=stats,
    )
    request.check()
    check_writable(output, request.inputs)
    tuning = tuning_flags.TuneFlags(tune, objectives, trials, storage, study, from_)
    tuning.check()
    ready = prepare(request)
    setting, in_use = ready.setting, ready.in_use
    check_writable(output)

    if tune is not None:
        refuse_with_tune(objective, scenarios, stats)

        show = tuning_flags.OutputChoice(json, output, quiet, strict)
        budget = (effort, time_limit, seed, request.searchers, top_k)
        tuning_flags.run_tuning(model, setting, tuning, budget, show)
        return

    stop = Stop(effort, time_limit, interruptible=True, reserve=REPORTING, started=started)
    answer = find_answer(
        request, ready, stop, cached=not no_cache, progress=not (json or quiet), quiet=quiet
    )
    result, predictions = answer.result, answer.predictions
    if strict:
        refuse_outside(predictions[0].out_of_range)
    from shardopt.api.plan_file import made_by, plan_meta, write_best

    made = made_by(setting, request.settings(), in_use)
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


def _show(report: PlanReport, quiet: bool) -> None:
    from shardopt.report.console import make_console
    from shardopt.report.plan import show_headline, show_plan

    (show_headline if quiet else show_plan)(make_console(), report)


def _end(result: Result) -> None:
    """The exit code says whether the search was interrupted; its plan is written and shown."""
    if result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
