"""`python -m lab`: what shows that shardopt is right. Errors end as those of `shardopt` do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import typer

from lab.suites import ALL, SUITES
from shardopt.api.request import MAX_SEED, check_number
from shardopt.cli import app as product
from shardopt.cli.bench.run import MAX_BLOCK, MAX_ROUNDS, warmup_rounds
from shardopt.cli.command import command
from shardopt.ranks.realtime import Runtime

MAX_TASK = 999_999
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?\Z")


def seeds(flag: str, given: str) -> list[int]:
    """The numbers that a text such as ``3,7,10-12`` names, in its order, each once.

    Raises:
        InputError: it is no such text.
    """
    from predictor.errors import InputError

    found: list[int] = []
    for part in given.split(","):
        match = _RANGE.match(part.strip())
        first, last = (int(n or match[1]) for n in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{flag} is {given!r}; give numbers and ranges of 0 to {MAX_TASK}, the lower "
                "number first, such as 0-19 or 3,7,10-12"
            )
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _list(title: str, *, committed: bool) -> str:
    suites = (f"{s.name} ({s.about})" for s in SUITES if s.committed == committed)
    return f"{title}: {', '.join(suites)}."


EPILOG = "\n\n".join(
    [
        _list("Suites on public files, which --data names", committed=False),
        _list("Suites on measurements that a source checkout has", committed=True),
    ]
)


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
    from lab.suites import run_suites
    from shardopt.cli.output import check_writable, print_json
    from shardopt.report.console import make_console

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


MAX_RANDOM_PLANS = 10_000


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

    Arguments:
        folder (FOLDER): Folder for the measurements; it is created, or continued.

    Measurement:
        tasks (SEEDS): Tasks to draw, such as 0-19 or 3,7,10-12.
        ranks (N): Number of processes; each has one core.
        models (NAME): Family that models are drawn from: published (DLRM-DCNv2, RM1 to RM3 and
            Meta's tables, scaled down) or shapes (many small tables, few wide ones, weighted,
            sequences and others).
        repeat (SEEDS): Tasks to measure a second time, after all others.
        against (N): Number of random plans beside TorchRec's and ours;
            `python -m lab validate against-torchrec --data DIR` reports them.
        like (FOLDER): Take models and plans from this measured task set instead of drawing them.
    """
    from lab.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.output import note

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)
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
    measure_task_set(settings, lambda text: note([text], quiet=quiet))


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

    Arguments:
        folder (FOLDER): Folder for the measurements; it is created, or continued.

    Measurement:
        tasks (SEEDS): Models to draw, such as 0-9 or 3,7,10-12.
        hardware (FILE): Profile of this machine, from `shardopt calibrate`.
        ranks (N): Number of processes; each has one core.
        models (NAME): Family that models are drawn from, as of `batch`.
    """
    from lab.advice import AdviceSettings, measure_advice, summary
    from shardopt.cli.output import note

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)
    settings = AdviceSettings(
        folder, seeds("--tasks", tasks), hardware, rounds, block, ranks, models
    )
    found = measure_advice(settings, lambda text: note([text], quiet=quiet))
    print("\n".join(summary(found)))


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

    After an interruption the same command continues with what is left. Prints targets beside
    what was measured. Of four tasks one needs root and iproute2, for its emulated link.

    Arguments:
        folder (FOLDER): Folder for the measurements; it is created, or continued.

    Measurement:
        tasks (SEEDS): Tasks to draw, such as 0-19 or 3,7,10-12.
        models (NAME): Family that models are drawn from, as for batch.
        minutes (M): Of plan --confirm, in each task.
        measure_minutes (M): That twelve plans and TorchRec's once more run afterwards.
    """
    from lab.tasks.confirmed import ConfirmedTasks, run_tasks, table
    from shardopt.bench.confirm import check_minutes
    from shardopt.cli.output import note

    for given in (minutes, measure_minutes):
        check_minutes(given, 1)
    asked = ConfirmedTasks(folder, seeds("--tasks", tasks), models, minutes, measure_minutes)
    print(table(run_tasks(asked, lambda text: note([text], quiet=quiet))))


def search(
    *,
    suite: Path,
    rows: Path,
    only: str | None = None,
    planners: str | None = None,
    seed: int = 0,
    effort: float = 1.0,
    write_docs: Path | None = None,
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
        write_docs (FILE): Also write the results to this Markdown page, such as
            docs/benchmarks.md.
    """
    from lab.pages.planners_page import benchmarks_text, summary
    from lab.planners.rows import rows_by_instance
    from lab.planners.suite import SuiteSelection, check_planners, load_suite, run_suite
    from search.stop import Stop
    from shardopt.cli.output import check_writable, note
    from shardopt.files import atomic_write_text

    check_number("seed", seed, 0, MAX_SEED)
    Stop(effort)
    check_writable(rows)
    check_writable(write_docs)
    names = [name.strip() for name in (planners or "").split(",") if name.strip()]
    selection = SuiteSelection(only, check_planners(names), effort, seed)
    found = run_suite(load_suite(suite), rows, selection, lambda text: note([text], quiet=quiet))
    print("\n".join(summary(rows_by_instance(found))))
    if write_docs is not None:
        atomic_write_text(write_docs, benchmarks_text(found))


def compare(
    *,
    output: Path,
    models: list[str] | None = None,
    rounds: int = 5,
    work: Path | None = None,
    quiet: bool = False,
) -> None:
    """Compare CPU models with the benchmarks generated from their traces.

    Calibration models are measured as well: their calls are timed inside their replays, and the
    kernel models that `python -m lab predict DIR --data FOLDER` uses are fitted on them.

    Options:
        output (-o DIR): Folder for cpu.json (models and their replays) and calls.jsonl (timed
            calls, from which kernel models of ops are fitted).
        models (--model NAME): Only this model. Repeat for more.

    Measurement:
        rounds (N): Number of rounds; each runs every model and its replay in new processes.
        work (DIR): Keep benchmarks and finished rounds here, and continue from what is there.
    """
    from lab.replay.originals import MODELS
    from predictor.errors import InputError, did_you_mean
    from shardopt.ranks.scratch import scratch_folder

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    for name in models or ():
        if name not in MODELS:
            raise InputError(
                f"--model {name!r}: there are {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
            )
    for place in (output, work):
        if place is not None:
            _check_folder(place)
    names = list(models or MODELS)
    if work is not None:
        _run(names, output, rounds, work, quiet)
        return
    with scratch_folder() as here:
        _run(names, output, rounds, here, quiet)


def predict(folder: Path, *, data: Path, hardware: str = "cpu-gloo") -> None:
    """Predict a generated benchmark with kernel models fitted on replays of this machine.

    Prints the JSON of `shardopt bench predict`.

    Options:
        data (DIR): Folder that `python -m lab compare` wrote.
        hardware (NAME|FILE): Profile of CPU ranks, whose collectives are used.
    """
    from lab.replay.calls import fit_replays, read_replays
    from shardopt.cli.output import print_json
    from shardopt.replay.predict import predict

    models = read_replays(data)
    print_json(predict(folder, hardware, lambda ranks: fit_replays(models, ranks)))


def _check_folder(place: Path) -> None:
    from predictor.errors import InputError

    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be a folder: {error.strerror}") from None


def _run(names: list[str], output: Path, rounds: int, work: Path, quiet: bool) -> None:
    from lab.replay.calls import FILE, write_models
    from lab.replay.compare import prepare, replays, side_by_side, summary, time_rounds
    from shardopt.api.cache import versions
    from shardopt.cli.output import note, write_json

    for name in prepare(names, work):
        note([f"{name}: benchmark made"], quiet=quiet)
    for name, number in time_rounds(names, work, rounds):
        note([f"round {number + 1} of {rounds}: {name}"], quiet=quiet)
    write_models(output / FILE, replays(names, work))
    rows = side_by_side(names, work)
    if rows:
        write_json(
            output / "cpu.json", {"summary": summary(rows), "versions": versions(), "rows": rows}
        )


MEASURE, TOOLS = "Measure and validate", "Pages, profiles and checks"

app = typer.Typer(
    name="lab",
    help="Suites, task sets and tools that show how right shardopt is; not shipped.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("validate", rich_help_panel=MEASURE, epilog=EPILOG)(command(validate))
for function in (
    batch,
    advice,
    confirm,
    search,
    compare,
    predict,
):
    app.command(function.__name__, rich_help_panel=MEASURE)(command(function))

PROGRAMS = {
    "first-scores": ("lab.first_scores", "What new tables scored before a change for them."),
    "fit derive": ("lab.fit.derive", "Profiles of cards that no public table measures."),
    "fit hugectr": ("lab.fit.hugectr", "The constants of HugeCTR's runtimes."),
    "fit known-errors": ("lab.fit.known_errors", "How far the shipped profiles can be trusted."),
    "fit links": ("lab.fit.links", "Curves of collectives within a host."),
    "fit megatron": ("lab.fit.megatron", "The constants of Megatron's software."),
    "fit ops": ("lab.fit.ops", "The models of CPU ops that `shardopt bench predict` uses."),
    "fit tables": ("lab.fit.tables", "Prints constants fitted to the public tables."),
    "figure": ("lab.tools.figure", "The picture of the README."),
    "readme": ("lab.pages.accuracy", "The README's tables of accuracy, from docs/accuracy."),
    "strangers": ("lab.tools.strangers", "Training scripts of others, under both planners."),
    "torchrec-own": ("lab.tools.torchrec_own", "TorchRec's own tests, with our planner."),
    "try-wheel": ("lab.tools.try_wheel", "Every command of a wheel, without torch and scipy."),
}
"""Programs with parsers of their own -> module, and what they do."""
fit = typer.Typer(help="Fit the constants of shipped profiles and runtimes to their rows.")
app.add_typer(fit, name="fit", rich_help_panel=TOOLS)


def _program(name: str, module: str, about: str) -> None:
    # such a tool reads all words after its name itself, --help too
    free = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    group, own = (fit, name.removeprefix("fit ")) if name.startswith("fit ") else (app, name)

    @group.command(own, help=about, rich_help_panel=TOOLS, context_settings=free)
    def run(context: typer.Context) -> None:
        raise typer.Exit(import_module(module).main(context.args))


for _name, (_module, _about) in PROGRAMS.items():
    _program(_name, _module, _about)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; nothing that a user can cause raises."""
    return product.main(argv, app, "python -m lab")
