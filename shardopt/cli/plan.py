"""``shardopt plan``: search the plans of a model and write the best, or reproduce a plan file."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from predictor.errors import InputError, PlanError
from shardopt.api.request import MADE, PlanRequest, read_request
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.cli.machines import plan_each, read_gpus
from shardopt.cli.output import check_writable, next_lines, note, print_json, show, warn
from shardopt.cli.tune import TuneFlags, run_tuning
from shardopt.files import atomic_write_text
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from predictor.model.plan import ShardingPlan
    from shardopt.api.answer import Answer
    from shardopt.api.inputs import Inputs
    from shardopt.api.setting import Setting
    from shardopt.ranks.rank import Rank

Say = Callable[[str], None]

WITH_REPLAY = ("model", "json", "output", "quiet", "replay", "no_cache")
"""Parameters that ``--replay`` allows: none of them changes the answer."""
RARE = (
    *("ddr_gib", "reserve", "strict", "search", "seed", "top_k", "scenarios", "max_gib", "horizon"),
    *("renamed", "replay", "no_cache", "objectives", "trials", "storage", "study"),
)
"""Options that only ``--help-all`` shows."""


@dataclass(frozen=True)
class PlanFlags(PlanRequest):
    """Request as typed: ``gpus`` and ``hardware`` may list several, separated by commas."""

    gpus: str | None = None  # type: ignore[assignment]

    def one(self) -> PlanRequest:
        """Return the request for a single machine."""
        hardware, gpus = self.machines()
        name = (hardware[0] if len(hardware) == 1 else None) or self.hardware
        return PlanRequest(**{**vars(self), "hardware": name, "gpus": gpus[0] if gpus else None})

    def machines(self) -> tuple[list[str | None], list[int]]:
        """Return the names of hardware, None for the default, and the numbers of GPUs, each once.

        An empty name among others stays, to be refused.
        """
        names = [name.strip() or None for name in (self.hardware or "").split(",")]
        unique = names if None in names else [*dict.fromkeys(names)]
        return unique, [*dict.fromkeys(read_gpus(self.gpus))]


@dataclass(frozen=True)
class ConfirmFlags:
    """Flags of a measurement; nothing is measured without ``confirm``."""

    confirm: int | None = None
    minutes: float = 3.0

    def check(self) -> None:
        """Refuse numbers out of range."""
        if self.confirm is not None:
            from shardopt.bench.confirm import check_minutes

            check_minutes(self.minutes, self.confirm)

    def join(self, setting: Setting) -> Rank | None:
        """Return this process's rank if it leads the measurement, None without torchrun.

        Any other rank of torchrun takes part in the measurement, and its process ends here.
        """
        from shardopt.bench.confirm import follow
        from shardopt.bench.job import check_layers
        from shardopt.ranks.rank import end_process, rank_of_torchrun

        check_layers(setting.workload)
        rank = rank_of_torchrun()
        if rank is not None and rank.index:
            follow(setting, rank)
            end_process()
        return rank

    def measured(
        self, answer: Answer, inputs: Inputs, output: Path | None, rank: Rank | None, say: Say
    ) -> Answer:
        """Return the answer with the fastest measured plan first."""
        from shardopt.bench.confirm import confirm_answer

        assert self.confirm is not None
        try:
            return confirm_answer(answer, inputs, self.confirm, self.minutes, output, rank, say)
        except KeyboardInterrupt:  # before any plan was timed
            if output is not None:
                atomic_write_text(output, answer.plan_text())
            raise


@dataclass(frozen=True)
class AdviceFlags:
    """Flags of advice."""

    apply: Path | None = None
    advice: str | None = None
    advice_only: bool = False

    def numbers(self) -> list[int]:
        """Return the numbers of the advice to apply, from 1, each once."""
        if self.advice is not None and self.apply is None:
            raise InputError("--advice chooses what --apply FILE writes; give --apply, too")
        try:
            numbers = [int(number) for number in (self.advice or "1").split(",")]
        except ValueError:
            raise InputError(f"--advice is {self.advice}; give numbers such as 1 or 1,3") from None
        return [*dict.fromkeys(numbers)]

    def applied(self, answer: Answer, request: PlanRequest, say: Say) -> str:
        """Write the model file with the advice, and return the plan file that goes with it."""
        from shardopt.api.answer import apply_advice

        assert self.apply is not None
        numbers = self.numbers()
        text = apply_advice(answer, request, numbers, self.apply)
        say(f"wrote {self.apply} with advice {', '.join(map(str, numbers))}")
        return text


def plan(
    context: typer.Context,
    flags: PlanFlags,
    tuning: TuneFlags,
    replay: Path | None = None,
    no_cache: bool = False,
    confirming: ConfirmFlags = ConfirmFlags(),
    advising: AdviceFlags = AdviceFlags(),
    price: Path | None = None,
    json: bool = False,
    output: Path | None = None,
    quiet: bool = False,
) -> View | None:
    """Search for the sharding plan with the shortest predicted iteration time.

    Arguments:
        model (MODEL): Model file (YAML); not needed with --replay.

    Machine:
        gpus (N,N,...): Number of GPUs. Several numbers are planned one by one and compared in one
            table.
        hardware (NAME|FILE,...): Hardware profile, by name or file; `shardopt hardware` lists the
            names. The default is that of the cluster file or the plan, else h100-sxm. Several are
            compared in one table; with -o plan.json their plans go to plan.NAME.N.json.
        price (FILE): YAML file with a line 'hardware: price' for each profile, the price of a GPU
            for an hour. The table of machines then has the price of a million samples.

    Search:
        replay (FILE): Reproduce this plan file from the inputs that it records, and compare the two
            byte for byte. Give MODEL only if the model file has moved.
        no_cache: Search even if the answer to the same input is cached, and do not cache this one.

    Measurement:
        confirm ([K]): Run the K best plans (4 by default), TorchRec's plan and the plan of --from
            for real, on ranks that this command or torchrun starts. The answer is the plan that is
            measured to be fastest. The measurements also correct the predictions, so better plans
            may be tried next; with -o, the corrected profile is written beside the plan. See
            docs/learning.md.
        minutes (M): Time limit of the measurement, in minutes.

    Advice:
        apply (FILE): Write a copy of the model file that follows the advice that gains most; -o
            then writes the plan for that copy.
        advice (N,N): Numbers of the advice that --apply follows; 1 by default.

        advice_only: Give advice without a search, for the plan of TorchRec's planner or of a simple
            rule, whichever is faster.

    Tuning:
        tune (KNOBS): Settings to choose together with the plan, separated by commas: batch_size,
            pipeline, qcomm, bucket, cw_min, cache_ratio, hosts, groups, sync_interval, hbm. Values
            can be given: batch_size=2048:16384 doubles, batch_size=4096:16384:4096 goes in steps,
            qcomm=fp32/bf16 is a list. See docs/tuning.md.
        objectives (NAMES): What --tune minimises: time (per sample), memory (of the fullest rank)
            or gpu_hours (per sample). Several, separated by commas, give a Pareto front. The
            default is time, or gpu_hours if hosts are tuned.
        trials (N): Number of settings to try, counted over all machines that share the study; 24 by
            default.
        storage (URL): Keep the study in a database (postgresql://user@host/name,
            sqlite:///tune.db) or a journal file (journal:PATH, or a path that ends in .journal or
            .log), to continue it later or to share it between machines.
        study (NAME): Name of the study in --storage; by default, a name derived from the model and
            the flags.
    """
    started = time.monotonic()
    request = flags.one()
    if replay is not None:
        return _replay(replay, request.model, context)
    hardware, gpus = flags.machines()
    several = len(gpus) > 1 or len(hardware) > 1
    _check(context, request, tuning, confirming, advising, price, several=several)
    from shardopt.api.answer import advise_only, find_answer, followed_up, with_constraint_costs
    from shardopt.api.cache import ResultCache
    from shardopt.api.inputs import read_inputs, stop_of
    from shardopt.api.setting import refuse_outside
    from shardopt.report.plan import advice_view, plan_view
    from shardopt.report.progress import SearchProgress

    say = partial(_note, quiet=quiet)
    silent = quiet or json
    cache = None if no_cache else ResultCache.of_user()
    if several:
        return plan_each(request, hardware, gpus, price, output, cache, quiet=silent)
    files = [path for path in (output, advising.apply) if path is not None]
    numbers = [] if advising.apply is None else advising.numbers()
    for path in files:
        check_writable(path, request.inputs)
    request = replace(request, top_k=max(request.top_k, confirming.confirm or 1))
    inputs = read_inputs(request)
    for path in files:
        check_writable(path)
    for doubt in inputs.doubts:
        warn(f"{request.from_}: {doubt}")
    if tuning.tune is not None:
        with SearchProgress(on=not silent) as shown:
            return run_tuning(inputs, tuning, output, shown, say)
    rank = None if confirming.confirm is None else confirming.join(inputs.setting)
    stop = stop_of(inputs, interruptible=True, started=started)
    if advising.advice_only:
        answer = advise_only(inputs, stop)
        if advising.apply is not None:
            advising.applied(answer, request, say)
        return advice_view(answer.advice_document(), numbers)
    with SearchProgress(on=not silent) as shown:
        answer = find_answer(inputs, stop, cache, shown)
    if answer.from_cache:
        say("the answer to the same input is kept; --no-cache searches again")
    if request.strict:
        refuse_outside(answer.best.out_of_range)
    if confirming.confirm is not None and not answer.is_interrupted:
        answer = confirming.measured(answer, inputs, output, rank, say)
    advised = json or advising.apply is not None or not quiet
    answer = (followed_up if advised else with_constraint_costs)(answer, stop)
    applied = None if advising.apply is None else advising.applied(answer, request, say)
    if output is not None:
        atomic_write_text(output, applied or answer.plan_text())
    end = next_lines(request, output, applied=advising.apply)
    if json:
        note(answer.setting.notes, quiet=quiet)
    code = EXIT_INTERRUPTED if answer.is_interrupted else 0
    view = replace(plan_view(answer.document(request.from_), end, numbers), code=code)
    if rank is not None and answer.confirmation is not None:
        from shardopt.ranks.rank import end_process

        show(replace(view, code=0), json=json, quiet=quiet)
        end_process(code)
    return view


def _note(text: str, *, quiet: bool) -> None:
    note([text], quiet=quiet)


def _check(
    context: typer.Context,
    request: PlanRequest,
    tuning: TuneFlags,
    confirming: ConfirmFlags,
    advising: AdviceFlags,
    price: Path | None,
    *,
    several: bool,
) -> None:
    """Refuse flags that exclude each other or that need another flag, and values out of range."""
    if request.model is None:
        raise typer.BadParameter("missing; give the model file", param_hint="'MODEL'")
    tuning.check(request)
    request.check()
    if several:
        for name in ("tune", "confirm", "apply", "advice", "advice_only"):
            if _is_given(context, name):
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} is for one machine; give one --gpus and --hardware")
    elif price is not None:
        raise InputError("--price compares several machines; give several --gpus or --hardware")
    confirming.check()
    if advising.advice_only:
        for name in ("tune", "confirm", "output", "from_"):
            if _is_given(context, name):
                raise InputError(f"--advice-only runs no search; leave out --{name.rstrip('_')}")
    advising.numbers()


def _replay(path: Path, model: Path | None, context: typer.Context) -> View:
    """Reproduce a plan file and report whether it is the same, byte for byte; nothing is written.

    Args:
        model: path of the model file if it has moved; None for the path in the plan file.

    Raises:
        InputError: other flags were given, too.
        PlanError: the file does not record its inputs, sets an option that no plan file may set, or
            is not reproduced; then the message lists the differences.
    """
    passed = [p for p in context.command.params if _is_given(context, p.name or "")]
    extra = [p.opts[0] for p in passed if p.name not in WITH_REPLAY]
    if extra:
        raise InputError(
            f"--replay takes all options from the plan file; leave out {', '.join(extra)}"
        )
    from predictor.files import read_whole
    from predictor.model.plan_json import load_plan

    before = load_plan(path)
    made_by = before.meta.get(MADE)
    settings = made_by.get("settings") if isinstance(made_by, Mapping) else None
    if not isinstance(settings, Mapping):
        raise PlanError(
            f"{path}: does not say what made it; `shardopt plan ... -o FILE` of this version, "
            "without --apply and --confirm, writes plan files that can be made again"
        )
    request, unknown = read_request(settings, str(path), model)
    for name in unknown:
        warn(f"{path}: `shardopt plan` has no option named {name}; it is ignored")
    again = _text_again(request, settings)
    same = again.encode() == read_whole(path)
    differs = [] if same else _differences(before, again)
    data = {"plan": str(path), "same": same, "differs": differs}
    if differs:
        if context.params["json"]:
            print_json(data)
        raise PlanError(f"{path}: made again, the plan is not the same: {'; '.join(differs)}")
    return View(data, [f"{path}: made again, byte for byte"])


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _text_again(request: PlanRequest, settings: Mapping[str, Any]) -> str:
    """Return the text of the plan file that a request makes.

    Args:
        settings: settings as the file records them, because input files may have moved.
    """
    from shardopt.api.answer import find_answer
    from shardopt.api.inputs import read_inputs, stop_of
    from shardopt.api.setting import refuse_outside

    request.check()
    inputs = read_inputs(request)
    answer = find_answer(inputs, stop_of(inputs, interruptible=True), None)
    if answer.result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if request.strict:
        refuse_outside(answer.best.out_of_range)
    made_by = {**answer.head[MADE], "settings": dict(settings)}
    return replace(answer, head={**answer.head, MADE: made_by}).plan_text()


def _differences(old: ShardingPlan, again: str) -> list[str]:
    """List the differences between a plan file and the one that was made again."""
    from predictor.model.plan_json import plan_from_dict
    from shardopt.explain.differences import header_diffs, table_diffs

    new = plan_from_dict(json_format.loads(again), where="the plan made again")
    was, now = old.meta[MADE], new.meta[MADE]
    lines = [f"the contents of {name} differ" for name in _unequal(was, now, "inputs")]
    lines += [
        f"{name} was {before} and is {after}"
        for name, (before, after) in _unequal(was, now, "versions").items()
    ]
    if was.get("code") != now.get("code"):
        lines.append("the code of shardopt differs")
    header = header_diffs(old, new)
    lines += [f"{key} was {before!r} and is {after!r}" for key, (before, after) in header.items()]
    tables = [f"'{diff.table}' ({', '.join(diff.what)})" for diff in table_diffs(old, new)]
    if tables:
        lines.append(f"tables that differ: {', '.join(tables)}")
    return lines or ["the same plan in another notation"]


def _unequal(was: Mapping[str, Any], now: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the keys that differ in one part of what two plans were made by, with both values."""
    a, b = (source[part] if isinstance(source.get(part), Mapping) else {} for source in (was, now))
    return {k: (a.get(k), b.get(k)) for k in dict.fromkeys((*a, *b)) if a.get(k) != b.get(k)}
