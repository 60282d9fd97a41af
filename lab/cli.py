"""Command line of `python -m lab`; errors end like those of `shardopt`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from lab.suites import ALL, SUITES, run_suites
from predictor.errors import InputError, did_you_mean
from shardopt.api.request import MAX_SEED, check_number
from shardopt.cli import app as product
from shardopt.cli.bench.run import MAX_BLOCK, MAX_ROUNDS, warmup_rounds
from shardopt.cli.command import command
from shardopt.cli.output import check_writable, note, print_json, write_json
from shardopt.ranks.realtime import Runtime
from shardopt.report.console import make_console

MAX_TASK = 999_999
MAX_RANDOM_PLANS = 10_000
MEASURE, TOOLS = "Measure and validate", "Pages, profiles and checks"
FLAGS = """
Arguments:
    folder (FOLDER): Folder for the measurements; it is created, or continued.

Measurement:
    tasks (SEEDS): Tasks to draw, such as 0-19 or 3,7,10-12.
    ranks (N): Number of processes; each has one core.
    models (NAME): Family that models are drawn from: published (DLRM-DCNv2, RM1 to RM3 and
        Meta's tables, scaled down) or shapes (many small tables, few wide ones, weighted,
        sequences and others).

Options:
    data (DIR): Folder with the public files that docs/data.md lists.
    write: Write the outcome to docs/compatibility.md.
    only (-k TEXT): Only those whose name has this text.
    write_docs (FILE): Also write the results to this Markdown page.
"""
"""Descriptions that several commands share, in the form of their docstrings."""

app = typer.Typer(
    name="lab",
    help="Suites, task sets and tools that show how right shardopt is; not shipped.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(panel: str, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function under its name; `FLAGS` completes its docstring."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        about, heading, own = inspect.cleandoc(function.__doc__ or "").partition("\n\nArguments:")
        if not heading:
            about, heading, own = about.partition("\n\nOptions:")
        function.__doc__ = f"{about}\n{FLAGS}{heading.strip()}{own}"
        name = function.__name__.replace("_", "-")
        app.command(name, rich_help_panel=panel, **more)(command(function))
        return function

    return add


def seeds(flag: str, text: str) -> list[int]:
    """Parse numbers and ranges such as ``3,7,10-12``, in order, each once.

    Raises:
        InputError: the text is not of this form.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        first, last = (int(n or match[1]) for n in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{flag} is {text!r}; give numbers and ranges of 0 to {MAX_TASK}, the lower "
                "number first, such as 0-19 or 3,7,10-12"
            )
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))


def _noted(quiet: bool) -> Callable[[str], None]:
    return lambda text: note([text], quiet=quiet)


def _check_rounds(rounds: int, block: int) -> None:
    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)


def _list(title: str, *, committed: bool) -> str:
    suites = (f"{s.name} ({s.about})" for s in SUITES.values() if s.committed == committed)
    return f"{title}: {', '.join(suites)}."


EPILOG = "\n\n".join(
    [
        _list("Suites on public files, which --data names", committed=False),
        _list("Suites on measurements that a source checkout has", committed=True),
    ]
)


@_command(MEASURE, epilog=EPILOG)
def validate(
    suite: str,
    data: Path | None = None,
    json: bool = False,
    quiet: bool = False,
    write_docs: Path | None = None,
) -> None:
    """Compare predictions with measurements that they were not fitted on.

    Arguments:
        suite (SUITE): Name of a suite, or 'all'.

    Options:
        data (DIR): Folder with the measurements: the public files that docs/data.md lists, or
            another folder than that of the source checkout.
        write_docs (FILE): Also write the results to this Markdown page, and their rows as CSV into
            the folder of its name.
    """
    from lab.pages.accuracy import write_accuracy
    from lab.pages.scores import report_object, show_report

    check_writable(write_docs)
    reports = run_suites(suite, data)
    if json:
        objects = {report.suite: report_object(report) for report in reports}
        print_json(objects if suite == ALL else next(iter(objects.values())))
    else:
        console = make_console()
        for report in reports:
            show_report(console, report, quiet=quiet)
    if write_docs is not None:
        write_accuracy(write_docs, reports)


@_command(MEASURE)
def batch(
    *,
    folder: Path,
    tasks: str,
    repeat: str | None = None,
    against: int = 12,
    like: Path | None = None,
    rounds: int = 10,
    block: int = 6,
    warmup: str = "auto",
    link: float | None = None,
    runtime: Runtime = Runtime.PLAIN,
    ranks: int = 2,
    models: str = "shapes",
    quiet: bool = False,
) -> None:
    """Calibrate, draw models, and run TorchRec's plan, ours and random ones of each for real.

    After an interruption the same command continues with what is left.

    Options:
        repeat (SEEDS): Tasks to measure a second time, after all others.
        against (N): Number of random plans beside TorchRec's and ours;
            `python -m lab validate against-torchrec --data DIR` reports them.
        like (FOLDER): Take models and plans from this measured task set instead of drawing them.
    """
    from lab.tasks.measure import TaskSetSettings, measure_task_set

    _check_rounds(rounds, block)
    check_number("against", against, 0, MAX_RANDOM_PLANS)
    settings = TaskSetSettings(
        folder,
        seeds("--tasks", tasks),
        seeds("--repeat", repeat) if repeat is not None else (),
        rounds,
        block,
        ranks,
        link,
        runtime,
        models,
        random_plans=against,
        like=like,
        warmup=warmup_rounds(warmup),
    )
    measure_task_set(settings, _noted(quiet))


@_command(MEASURE)
def advice(
    folder: Path,
    *,
    tasks: str = "0-9",
    hardware: str,
    rounds: int = 10,
    block: int = 6,
    ranks: int = 2,
    models: str = "shapes",
    quiet: bool = False,
) -> None:
    """Measure whether advice is right: models with and without it, run for real.

    After an interruption the same command continues with what is left.

    Options:
        hardware (FILE): Profile of this machine, from `shardopt calibrate`.
    """
    from lab.advice import AdviceSettings, measure_advice, summary

    _check_rounds(rounds, block)
    numbers = seeds("--tasks", tasks)
    settings = AdviceSettings(folder, numbers, hardware, rounds, block, ranks, models)
    print("\n".join(summary(measure_advice(settings, _noted(quiet)))))


@_command(MEASURE)
def confirm(
    *,
    folder: Path,
    tasks: str = "0-19",
    models: str = "shapes",
    minutes: float = 3.0,
    measure_minutes: float = 3.0,
    quiet: bool = False,
) -> None:
    """Learn from one trace, plan, confirm, and compare expected with measured gains.

    After an interruption the same command continues with what is left. Prints targets beside the
    measured figures. One of four tasks needs root and iproute2 for its emulated link.

    Options:
        minutes (M): Minutes of plan --confirm in each task.
        measure_minutes (M): Minutes in which twelve plans and TorchRec's run again afterwards.
    """
    from lab.tasks.confirmed import ConfirmedTasks, run_tasks, table
    from shardopt.bench.confirm import check_minutes

    for budget in (minutes, measure_minutes):
        check_minutes(budget, 1)
    settings = ConfirmedTasks(folder, seeds("--tasks", tasks), models, minutes, measure_minutes)
    print(table(run_tasks(settings, _noted(quiet))))


@_command(MEASURE)
def search(
    *,
    suite: Path,
    rows: Path,
    only: str | None = None,
    planners: str | None = None,
    seed: int = 0,
    effort: float = 1.0,
    quiet: bool = False,
) -> None:
    """Run every planner on every instance of a suite.

    The same command continues with what is left after an interruption, and runs again what came
    from other code.

    Arguments:
        suite (FILE): Instances to plan.

    Options:
        rows (-o --output CSV): File for the rows of the suite; an existing one is continued.
        only (PATTERN): Run only instances whose name matches, such as '100x8-*'.
        planners (NAMES): Planners to run, separated by commas; all by default.
    """
    from lab.pages.planners_page import rows_by_instance, summary
    from lab.planners.suite import SuiteSelection, check_planners, load_suite, run_suite
    from search.stop import Stop

    check_number("seed", seed, 0, MAX_SEED)
    Stop(effort)
    check_writable(rows)
    names = [name.strip() for name in (planners or "").split(",") if name.strip()]
    selection = SuiteSelection(only, check_planners(names), effort, seed)
    results = run_suite(load_suite(suite), rows, selection, _noted(quiet))
    print("\n".join(summary(rows_by_instance(results))))


@_command(MEASURE)
def ablate(
    *,
    suites: list[Path],
    rows: Path,
    only: str | None = None,
    effort: float = 1.0,
    quiet: bool = False,
) -> None:
    """Search every instance without one stage of the search, stage by stage.

    The same command continues with what is left after an interruption.

    Arguments:
        suites (FILE...): Instances to plan.

    Options:
        rows (-o --output CSV): File for the rows; an existing one is continued.
        only (PATTERN): Run only instances whose name matches, such as '100x8-*'.
    """
    from lab.planners.ablation import ablate as run
    from lab.planners.suite import load_suite, matching
    from search.stop import Stop

    Stop(effort)
    check_writable(rows)
    every = [instance for suite in suites for instance in load_suite(suite).instances]
    results = run(matching(every, only), rows, effort, _noted(quiet))
    print(f"{len(results)} rows in {rows}")


@_command(MEASURE)
def compare(
    *,
    output: Path,
    models: list[str] | None = None,
    rounds: int = 5,
    work: Path | None = None,
    quiet: bool = False,
) -> None:
    """Compare CPU models with the benchmarks generated from their traces.

    Options:
        output (-o DIR): Folder for cpu.json, the times of models and their replays.
        models (--model NAME): Only this model. Repeat for more.
        rounds (N): Number of rounds; each runs every model and its replay in new processes.
        work (DIR): Keep benchmarks and finished rounds here, and continue from what is there.
    """
    from lab.replay.compare import prepare, side_by_side, summary, time_rounds
    from lab.replay.models import MODELS
    from shardopt.api.cache import versions
    from shardopt.ranks.scratch import scratch_folder

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    for name in models or ():
        if name not in MODELS:
            raise InputError(
                f"--model {name!r}: there are {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
            )
    names, say = list(models or MODELS), _noted(quiet)
    for folder in filter(None, (output, work)):
        _make_folder(folder)
    with scratch_folder() if work is None else nullcontext(work) as here:
        for name in prepare(names, here):
            say(f"{name}: benchmark made")
        for name, number in time_rounds(names, here, rounds):
            say(f"round {number + 1} of {rounds}: {name}")
        rows = side_by_side(names, here)
    if rows:
        about = {"summary": summary(rows), "versions": versions(), "rows": rows}
        write_json(output / "cpu.json", about)


def _make_folder(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be a folder: {error.strerror}") from None


FITS = {
    "derive": "FOLDER: profiles of cards that no table measures",
    "tables": "--data: curves of collectives and rates of matrix products",
    "hugectr": "--data: HugeCTR's runtimes",
    "known-errors": "--data, FOLDER: ranges and errors that the profiles of a folder state",
    "links": "--data, FOLDER: curves of collectives within a host",
    "megatron": "--data: Megatron's software",
}
"""Module of lab/fit -> arguments of its `run`, and their content."""


@_command(TOOLS, epilog="; ".join(f"{name} ({about})" for name, about in FITS.items()))
def fit(name: str, paths: list[Path] | None = None, data: Path | None = None) -> None:
    """Fit the constants of shipped profiles and runtimes to their rows.

    Arguments:
        name (NAME): What to fit.
        paths (PATH...): Folder or file that it reads or writes beside --data.
    """
    if name not in FITS:
        hint = did_you_mean(name, FITS)
        raise InputError(f"there is no fit '{name}'{hint}; there are {', '.join(FITS)}")
    run = import_module(f"lab.fit.{name.replace('-', '_')}").run
    arguments = [path for path in (data, *(paths or ())) if path is not None]
    if len(arguments) != len(inspect.signature(run).parameters):
        raise InputError(f"fit {name} takes {FITS[name]}")
    for path in arguments:
        _check_folder(path)
    for line in run(*arguments) or ():
        print(line)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")


@_command(TOOLS)
def first_scores(*, data: Path) -> None:
    """Score new tables before anything is changed for them; print first scores and today's."""
    from lab.first_scores import score_tables

    _check_folder(data)
    for line in score_tables(data):
        print(line)


@_command(TOOLS)
def pages(*, data: Path | None = None, answers: bool = False, check: bool = False) -> None:
    """Write every generated page and table: README, accuracy, benchmarks, the picture.

    They come from committed rows. With --data the rows of all suites are computed first.

    Options:
        answers: Also run the command at the head of the README and the cells of the notebook, which
            need torchrec, and put their answers there.
        check: Write nothing; end with 1 and name the pages that are older than their rows.
    """
    from lab.pages.accuracy import write_accuracy
    from lab.pages.generated import ACCURACY, ROOT, stale_pages, write_pages, write_sample
    from lab.pages.notebook import write_notebook

    if check:
        stale = stale_pages()
        for name in stale:
            print(f"{name}: older than its rows; run python -m lab pages")
        raise typer.Exit(bool(stale))
    if data is not None:
        write_accuracy((ROOT / ACCURACY).with_suffix(".md"), run_suites(ALL, data))
    if answers:
        write_sample()
        write_notebook(ROOT)
    for name in write_pages():
        print(name)


@_command(TOOLS)
def strangers(folder: Path, *, write: bool = False, only: str = "") -> None:
    """Run training scripts of others on two CPU ranks, under TorchRec's planner and under ours.

    Ends with 1 if one trains under TorchRec's planner alone.

    Arguments:
        folder (FOLDER): Folder of the checkouts.
    """
    from lab.tools.strangers import run_scripts

    _check_folder(folder)
    raise typer.Exit(run_scripts(folder, write=write, only=only))


@_command(TOOLS)
def torchrec_own(
    checkout: Path | None = None,
    *,
    source: str = "https://github.com/meta-pytorch/torchrec",
    theirs: bool = False,
    write: bool = False,
    only: str = "",
) -> None:
    """Run TorchRec's own tests of its planner with our planner in its place.

    Ends with 1 if docs/compatibility.md disagrees with the run.

    Arguments:
        checkout (DIR): Checkout of torchrec; without it, the commit of the installed one is
            fetched.

    Options:
        source (URL): Repository to fetch from.
        theirs: Use TorchRec's own planner.
    """
    from lab.tools.torchrec_own import run_suites

    raise typer.Exit(run_suites(checkout, source, theirs=theirs, write=write, only=only))


@_command(TOOLS)
def try_wheel(program: Path) -> None:
    """Run every command of an installed wheel once, without torch and scipy.

    Arguments:
        program (FILE): The installed `shardopt`.
    """
    from lab.tools.try_wheel import try_all

    raise typer.Exit(try_all(program.absolute()))


@_command(TOOLS)
def mutants(*, only: str = "") -> None:
    """Break the product on purpose, and see that a test notices each of `lab/tools/mutants.yaml`.

    Ends with 1 if a mutant survives. A run that was stopped goes on.
    """
    from lab.tools.mutants import run_mutants

    raise typer.Exit(run_mutants(only, _noted(quiet=False)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no user error raises."""
    return product.main(argv, app, "python -m lab")
