"""Commands built from plain functions: types say how a flag is parsed, docstrings what it does.

Each parameter becomes an option of its name, or an argument if the docstring lists it as one. A
parameter whose type is a dataclass stands for the fields of that class. Sections of the docstring
describe the parameters and become the panels of ``--help``. `FLAGS` describes the parameters that
several commands share, in the same form:

    Output:
        output (-o FILE): Write the best plan to this file.

The parentheses hold further names of the option and the placeholder of its value. A long name in
them replaces the parameter's own.

A command that returns a `View` gets the options ``--json`` and ``--quiet``; it declares one of them
only if it reads that option itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import typer

from shardopt.report.blocks import View

FLAGS = """
Arguments:
    model (MODEL): Model file (YAML).
    plans (PLAN...): Plan files (JSON), one or more.
    folder (DIR): Folder that `bench generate` wrote.

Machine:
    gpus (N): Number of GPUs.
    gpus_per_node (N): GPUs per host; the smaller of 8 and --gpus by default.
    cluster (FILE): Cluster file (YAML) with hosts, ranks per host, NVLink domain, memory and
        hardware; replaces --gpus and --gpus-per-node.
    hardware (NAME|FILE): Hardware profile, by name or file; `shardopt hardware` lists the names.
        The default is that of the cluster file or the plan, else h100-sxm.
    network (KIND): Network between hosts, instead of the one that the profile assumes: ib-ndr,
        ib-ndr-sharp, roce, tcpx, tcpxo, efa-v1, efa-v2, efa-v3, slingshot or nvl72.
    hbm_gib (GIB): Device memory per GPU in GiB; by default that of the profile.
    ddr_gib (GIB): Host memory per GPU in GiB; by default that of the profile.
    reserve (SHARE): Share of the device memory to keep free for uses that are not predicted; 0.05
        by default, 0.15 if activations are not known.
    batch_size (N): Samples per GPU and iteration; by default that of the model file.
    strict: Stop with an error if a cost lies outside the range that the profile covers.

Search:
    search: Method that proposes plans; `all` is annealing, as the others gain nothing beside it.
    seed (N): Seed of the search; the same seed gives the same plan.
    effort (X): Amount of search, as a multiple of the default.
    time_limit (S): Stop the search after this many seconds; the plan may then differ from run to
        run.
    prove: Raise the lower bound as far as possible. The search takes several times as long and
        gives the same plan.
    top_k (K): Number of plans to show, best first.
    tie (SHARE): How much slower than the fastest plan a simpler one may be and still come first:
        one with less memory on its fullest GPU, fewer sharding types or fewer shards. By default
        0.005; with 0 the fastest comes first.
    objective: What to minimise: the predicted time, its mean over the scenarios, or the largest
        regret (how much slower the plan is than the best plan known for a scenario).
    scenarios (N|none|FILE): Other conditions to plan for: N draws of the errors that the profile
        states (16 by default), or the scenarios of a file (YAML, JSON). Windows of data are added.
    stats (FILE,FILE,...): Stats files of two or more windows of data. The prediction is for the
        first; all of them are scenarios.
    from_ (FILE): The plan in use (JSON): the search starts from it, and the report lists the moves
        away from it. Ranks and hardware are those of this plan unless you set them. Tables may have
        been added, removed or resized since.
    renamed (OLD=NEW,...): Tables that have other names now than in the plan of --from.
    max_moves (K): Number of tables that may differ from the plan of --from; with 0 that plan is
        only predicted.
    max_gib (GIB): Largest amount of weights and optimizer state, in GiB, that may move to other
        ranks than in the plan of --from.
    horizon (STEPS): Number of steps within which a move from the plan of --from must pay for
        itself; 10,000 by default.

Measurement:
    rounds (N): Number of rounds; each runs every plan.
    block (N): Iterations of a plan per round.
    warmup (auto|N): Rounds to run before the measurement; auto warms up until no plan gets faster.
    link (GBIT_S): Run two ranks as two hosts over an emulated link of this rate (Gbit/s each way);
        needs root and iproute2.
    runtime: How CPU ranks run. plain: as under torchrun and a training script. tuned: gloo threads
        have real-time priority and freed memory is kept, which repeats better, but is not how
        users train.

Output:
    json: Print one JSON object on stdout and nothing else.
    output (-o FILE): Write the best plan to this file.
    quiet: Print only the result, in a few lines, without progress and notes.
"""
ARGUMENTS, OPTIONS = "Arguments", "Options"
SECTION = re.compile(r"(\w[\w ]*):")
ENTRY = re.compile(r"(\w+)(?: \((.*?)\))?: (.*)")


@dataclass(frozen=True)
class Described:
    """Docstring of a parameter: its panel, its names, the placeholder of its value, its help."""

    panel: str
    names: tuple[str, ...]
    metavar: str | None
    help: str

    def option(self, name: str, *, hidden: bool = False) -> Any:
        """Return the parameter as an option of Typer."""
        own = (
            []
            if any(n.startswith("--") for n in self.names)
            else ["--" + name.rstrip("_").replace("_", "-")]
        )
        panel = None if self.panel == OPTIONS else self.panel
        names = (*own, *self.names)
        return typer.Option(
            *names, metavar=self.metavar, help=self.help, rich_help_panel=panel, hidden=hidden
        )

    def argument(self) -> Any:
        return typer.Argument(metavar=self.metavar, help=self.help)


def describe(text: str) -> tuple[str, dict[str, Described]]:
    """Split a docstring into its head, one line per paragraph, and its parameters."""
    head: list[str] = []
    described: dict[str, Described] = {}
    panel = name = ""
    for line in inspect.cleandoc(text).splitlines():
        section, entry = SECTION.fullmatch(line), ENTRY.fullmatch(line.strip())
        depth = len(line) - len(line.lstrip())
        if section:
            panel = section[1]
        elif not panel:
            head.append(line)
        elif entry and depth == 4:
            name, spec = entry[1], (entry[2] or "").split()
            names = tuple(word for word in spec if word.startswith("-"))
            metavar = " ".join(word for word in spec if not word.startswith("-")) or None
            described[name] = Described(panel, names, metavar, entry[3])
        elif line:
            last = described[name]
            described[name] = Described(
                last.panel,
                last.names,
                last.metavar,
                f"{last.help} {line.strip()}",
            )
    paragraphs = "\n".join(head).strip().split("\n\n")
    return "\n\n".join(" ".join(text.split("\n")) for text in paragraphs), described


@cache
def shared() -> dict[str, Described]:
    """Return the parameters that `FLAGS` describes."""
    return describe(FLAGS)[1]


def command(function: Callable[..., object], rare: Sequence[str] = ()) -> Callable[..., None]:
    """Return the function as a Typer command: each parameter with its description.

    Args:
        rare: parameters that ``--help`` leaves to ``--help-all``.

    Raises:
        KeyError: nothing describes a parameter.
    """
    doc, own = describe(function.__doc__ or "")
    hints = get_type_hints(function)
    groups: dict[str, Any] = {}
    parameters: dict[str, tuple[Any, Any]] = {}
    declared = inspect.signature(function).parameters
    for parameter in declared.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            types = get_type_hints(kind)
            parameters |= {f.name: (types[f.name], f.default) for f in fields(kind)}
        else:
            empty = parameter.default is inspect.Parameter.empty
            parameters[parameter.name] = (kind, MISSING if empty else parameter.default)
    shows = hints.get("return") in (View, View | None)
    if shows:
        parameters |= {name: (bool, False) for name in ("json", "quiet")}
    described = {**shared(), **own}
    flat = [
        _typer_parameter(n, *spec, described, hidden=n in rare) for n, spec in parameters.items()
    ]
    if rare:
        flat.append(_HELP_ALL)

    def run(**arguments: Any) -> None:
        arguments.pop(_HELP_ALL.name, None)
        shown = {name: arguments[name] for name in ("json", "quiet") if shows}
        for name in shown.keys() - declared.keys():
            del arguments[name]
        for name, group in groups.items():
            arguments[name] = group(
                **{field.name: arguments.pop(field.name) for field in fields(group)}
            )
        view = function(**arguments)
        if isinstance(view, View):
            from shardopt.cli.output import show

            show(view, **shown)

    run.__name__, run.__module__, run.__doc__ = function.__name__, function.__module__, doc
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _typer_parameter(
    name: str, kind: Any, default: Any, described: dict[str, Described], *, hidden: bool
) -> inspect.Parameter:
    if kind is typer.Context:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    shown = described[name]
    as_argument = shown.panel == ARGUMENTS
    annotation = Annotated[
        kind, shown.argument() if as_argument else shown.option(name, hidden=hidden)
    ]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _show_all(context: typer.Context, value: bool) -> None:
    if value:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        print(context.get_help(), end="")
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_show_all, is_eager=True, help="Show rarely used options too."
        ),
    ],
)
