"""``shardopt plan``: search the plans of a model and write the best one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardopt.cli import options
from shardopt.cli.tune import options as tune_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from predictor.model.plan import ShardingPlan
    from predictor.predict import Prediction
    from search.in_use.moves import Placed
    from search.problem import Result
    from shardopt.cli.resolve import Setting
    from shardopt.explain.differences import Moves

MAX_SEED = 2**31 - 1
MAX_TOP_K = 1000


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
    """Search for the plan with the shortest predicted iteration time."""
    from shardopt.cli.output import check_writable
    from shardopt.cli.resolve import Flags, resolve
    from shardopt.cli.tune.flags import TuneFlags

    flags = Flags(
        gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size, strict
    )
    check_search(seed, effort, time_limit, top_k)
    check_writable(output, [path for path in (model, cluster, from_) if path is not None])
    in_use = plan_in_use(from_, max_moves)
    tuning = TuneFlags(tune, objectives, trials, storage, study, from_)
    tuning.check()
    setting = resolve(model, flags, in_use)

    if tune is not None:
        from shardopt.cli.tune.command import Show, run_tuning

        show = Show(json, output, quiet, strict)
        limits = (effort, time_limit, seed, search.names, top_k)
        run_tuning(model, setting, reserve, tuning, limits, show)
        return

    # the solvers are imported only once the input is known to be good
    from search.solve import solve
    from search.stop import Stop
    from shardopt.explain.differences import find_moves
    from shardopt.report.progress import SearchProgress

    with SearchProgress(on=not (json or quiet)) as progress:
        result = solve(
            problem_of(setting),
            Stop(effort=effort, time_limit_s=time_limit),
            seed,
            top_k=top_k,
            searchers=search.names,
            placed=placed_tables(setting, from_, in_use, max_moves),
            progress=progress,
        )
    predictions = predict_all(setting, result)
    moves = find_moves(problem_of(setting), result)
    if strict:
        from shardopt.cli.strict import refuse_outside

        refuse_outside(predictions[0].out_of_range)
    meta = plan_meta(setting, seed)
    if output is not None:
        write_best(output, result, predictions[0], meta)
    if json:
        from shardopt.cli.messages import note
        from shardopt.cli.output import print_json
        from shardopt.report.objects import from_object, plan_object

        note(setting.notes, quiet=quiet)
        made = plan_object(result, predictions, meta, setting.notes)
        print_json({**made, **from_object(result, moves, from_)})
        return
    _show(model, setting, result, predictions, moves, output, quiet)


def plan_in_use(path: Path | None, max_moves: int | None) -> ShardingPlan | None:
    """The plan that ``--from`` names.

    Raises:
        InputError: it cannot be read, or ``--max-moves`` is out of range or stands alone.
    """
    from predictor.errors import InputError
    from predictor.model.plan_json import load_plan

    if max_moves is not None and path is None:
        raise InputError("--max-moves limits what differs from a plan; give it with --from FILE")
    if max_moves is not None and max_moves < 0:
        raise InputError(f"--max-moves is {max_moves}; it must be at least 0 (0 only rates)")
    return None if path is None else load_plan(path)


def placed_tables(
    setting: Setting, path: Path | None, plan: ShardingPlan | None, max_moves: int | None
) -> Placed | None:
    """The plan in use as the search takes it, if it is one of this model."""
    from predictor.model.plan_check import check_plan, model_mismatch
    from search.in_use.moves import Placed
    from shardopt.cli.messages import warn

    if plan is None:
        return None
    fitting = check_plan(plan, setting.workload, where=str(path))
    doubt = model_mismatch(plan, setting.workload)
    if doubt:
        warn(f"{path}: {doubt}")
    return Placed(fitting, max_moves)


def check_search(seed: int, effort: float, time_limit: float | None, top_k: int) -> None:
    """Refuse values of the search flags outside their range."""
    from predictor.errors import InputError

    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"--seed is {seed}; it must be at least 0 and at most {MAX_SEED}")
    if not (math.isfinite(effort) and effort > 0):
        raise InputError(f"--effort is {effort:g}; it must be above 0 (1 is the default)")
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"--time-limit is {time_limit:g}; give seconds above 0")
    if not 1 <= top_k <= MAX_TOP_K:
        raise InputError(f"--top-k is {top_k}; it must be at least 1 and at most {MAX_TOP_K}")


def problem_of(setting: Setting) -> Any:
    """What the search takes."""
    from search.problem import Problem

    return Problem(setting.workload, setting.topology, setting.hardware)


def predict_all(setting: Setting, result: Result) -> list[Prediction]:
    """The full prediction of every ranked plan."""
    from predictor.predict import predict

    return [
        predict(setting.workload, setting.topology, setting.hardware, ranked.plan)
        for ranked in result.plans
    ]


def plan_meta(setting: Setting, seed: int) -> dict[str, Any]:
    """The head of a plan file, before the times."""
    from shardopt.cli.output import versions

    return {**setting_object(setting), "seed": seed, "versions": versions()}


def setting_object(setting: Setting) -> dict[str, Any]:
    """Model, hardware and ranks as plan files and ``--json`` name them."""
    return {
        "model": {"name": setting.workload.name, "sha256": setting.workload.sha256},
        "hardware": setting.hardware_name,
        "world_size": setting.topology.world_size,
        "local_world_size": setting.topology.local_world_size,
        "batch_size": setting.workload.batch_size,
    }


def write_best(output: Path, result: Result, best: Prediction, meta: dict[str, Any]) -> None:
    """The best plan as plan.json."""
    from dataclasses import replace

    from predictor.model.plan_json import plan_to_dict
    from shardopt.cli.output import write_plan

    times = {"iteration_ms": best.iteration_ms, "lower_bound_ms": result.lower_bound_ms}
    head = {key: value for key, value in meta.items() if not key.endswith("world_size")}
    write_plan(output, plan_to_dict(replace(result.best.plan, meta={**head, **times})))


def _show(
    model: Path,
    setting: Setting,
    result: Result,
    predictions: Sequence[Prediction],
    moves: Moves | None,
    output: Path | None,
    quiet: bool,
) -> None:
    from shardopt.report.console import make_console
    from shardopt.report.plan import PlanReport, show_headline, show_plan

    written = None if output is None else str(output)
    following = (
        f"shardopt explain {model} {written}" if written else "the same command with -o plan.json"
    )
    report = PlanReport(setting, result, predictions, written, following, moves)
    (show_headline if quiet else show_plan)(make_console(), report)
