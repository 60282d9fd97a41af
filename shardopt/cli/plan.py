"""``shardopt plan``: search the plans of a model and write the best one."""

from __future__ import annotations

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


def plan(
    model: options.Model,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = 0.15,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    search: options.Search = options.Searchers.ALL,
    seed: options.Seed = 0,
    effort: options.Effort = 1.0,
    time_limit: options.TimeLimit = None,
    top_k: options.TopK = 3,
    from_: options.From = None,
    max_moves: options.MaxMoves = None,
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
    from shardopt.api.setting import Machine
    from shardopt.cli.checks import check_search
    from shardopt.cli.output import check_writable
    from shardopt.cli.setting import refuse_outside, resolve
    from shardopt.cli.tune.flags import TuneFlags

    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_search(seed, effort, time_limit, top_k)
    check_writable(output, [path for path in (model, cluster, from_) if path is not None])
    in_use = plan_in_use(from_, max_moves)
    tuning = TuneFlags(tune, objectives, trials, storage, study, from_)
    tuning.check()
    setting = resolve(model, machine, in_use, strict=strict)

    if tune is not None:
        from shardopt.cli.tune.run import OutputChoice, run_tuning

        show = OutputChoice(json, output, quiet, strict)
        limits = (effort, time_limit, seed, search.names, top_k)
        run_tuning(model, setting, reserve, tuning, limits, show)
        return

    # the solvers are imported only once the input is known to be good
    from search.expected_gain import gain_over_baseline
    from search.solve import solve
    from search.stop import Stop
    from shardopt.explain.differences import find_moves
    from shardopt.report.progress import SearchProgress

    with SearchProgress(on=not (json or quiet)) as progress:
        result = solve(
            setting.problem(),
            Stop(effort=effort, time_limit_s=time_limit, interruptible=True),
            seed,
            top_k=top_k,
            searchers=search.names,
            in_use=placed_tables(setting, from_, in_use, max_moves),
            progress=progress,
        )
    predictions = [setting.predict(ranked.plan) for ranked in result.plans]
    moves = find_moves(setting.problem(), result)
    gain = gain_over_baseline(setting.problem(), result)
    if strict:
        refuse_outside(predictions[0].out_of_range)
    from shardopt.api.plan_file import plan_meta, write_best

    meta = plan_meta(setting, seed)
    if output is not None:
        write_best(output, result, predictions[0], meta)
    if json:
        from shardopt.cli.output import note, print_json
        from shardopt.report.objects import from_object, plan_object

        note(setting.notes, quiet=quiet)
        made = plan_object(result, predictions, meta, setting.notes, gain)
        print_json({**made, **from_object(result, moves, from_)})
        _end(result)
        return
    from shardopt.report.plan import PlanReport

    written = None if output is None else str(output)
    following = (
        f"shardopt explain {model} {written}" if written else "the same command with -o plan.json"
    )
    _show(PlanReport(setting, result, predictions, written, following, moves, gain), quiet)
    _end(result)


def plan_in_use(path: Path | None, max_moves: int | None) -> ShardingPlan | None:
    """The plan that ``--from`` names.

    Raises:
        InputError: it cannot be read, or ``--max-moves`` is out of range or stands alone.
    """
    from predictor.errors import InputError
    from predictor.model.plan_json import load_plan

    if max_moves is not None and path is None:
        raise InputError(
            "--max-moves limits the changes to the plan of --from; give --from FILE too"
        )
    if max_moves is not None and max_moves < 0:
        raise InputError(f"--max-moves is {max_moves}; it must be at least 0 (0 only predicts it)")
    return None if path is None else load_plan(path)


def placed_tables(
    setting: Setting, path: Path | None, plan: ShardingPlan | None, max_moves: int | None
) -> PlanInUse | None:
    """The plan in use as the search takes it, if it is one of this model."""
    from predictor.model.plan_check import model_mismatch
    from search.in_use.plan import PlanInUse
    from shardopt.api.given_plans import fit_plan
    from shardopt.cli.output import warn

    if plan is None:
        return None
    fitting = fit_plan(plan, setting, where=str(path))
    doubt = model_mismatch(plan, setting.workload)
    if doubt:
        warn(f"{path}: {doubt}")
    return PlanInUse(fitting, max_moves)


def _show(report: PlanReport, quiet: bool) -> None:
    from shardopt.report.console import make_console
    from shardopt.report.plan import show_headline, show_plan

    (show_headline if quiet else show_plan)(make_console(), report)


def _end(result: Result) -> None:
    """The exit code says whether the search was interrupted; its plan is written and shown."""
    if result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
