"""Commands out of plain functions: types say how a flag is read, docstrings what it does.

A parameter is an option named after it, or an argument if it is described as one; one whose type is
a dataclass stands for the fields of that. Sections of the docstring describe them and become the
panels of ``--help``; parameters that are not described there are looked up in `FLAGS`, which
describes what commands share in the same form:

    Output:
        output (-o FILE): Write the best plan to this file.

In the parentheses are further names of the option, instead of its own where one is long, and what
stands for its value.

A command that gives a `View` has the options ``--json`` and ``--quiet``, which say what is shown of
it; it declares those that it needs itself.
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
        By default that of the cluster file or the plan, else h100-sxm.
    network (KIND): Network between hosts, in place of the one that the profile assumes: ib-ndr,
        ib-ndr-sharp, roce, tcpx, tcpxo, efa-v1, efa-v2, efa-v3, slingshot or nvl72.
    hbm_gib (GIB): Device memory per GPU in GiB; that of the profile by default.
    ddr_gib (GIB): Host memory per GPU in GiB; that of the profile by default.
    reserve (SHARE): Share of the device memory to keep free, for what is not predicted; 0.05 by
        default, 0.15 where activations are not known.
    batch_size (N): Samples per GPU and iteration; that of the model file by default.
    strict: Stop with an error if a cost is outside the range that the profile covers.

Search:
    search: The method that proposes plans; `all` uses every method.
    seed (N): Seed of the search; the same seed gives the same plan.
    effort (X): Work of the search, as a multiple of the default.
    time_limit (S): Stop the search after this many seconds; the plan may then differ from run to
        run.
    prove: Raise the lower bound as far as it goes. This takes several times as long and gives the
        same plan.
    top_k (K): Number of plans to show, best first.
    tie (SHARE): How much slower than the fastest plan the best one may be, if its fullest GPU holds
        less or it has fewer sharding types or shards. By default a fifth of the stated error, from
        0.005 to 0.02; with 0 the fastest plan is the best.
    objective: What to minimise: the predicted time, its mean over the scenarios, or the largest
        regret in them (how much slower the plan is than the best known of a scenario).
    scenarios (N|none|FILE): What else could be true: N draws of the errors that the profile states
        (16 by default), or the scenarios of a file (YAML, JSON). Windows of data are added.
    stats (FILE,FILE,...): Stats files of two or more windows of data. The plan is predicted for the
        first; all are scenarios.
    from_ (FILE): The plan in use (JSON): the search starts from it, and the report says what would
        move. Ranks and hardware are those of this plan unless you set them. Tables may have been
        added, removed or resized since.
    renamed (OLD=NEW,...): Tables of the plan of --from that have been renamed.
    max_moves (K): Number of tables that may differ from the plan of --from; 0 only predicts that
        plan.
    max_gib (GIB): GiB of weights and optimizer state that may move to other ranks, from the plan of
        --from.
    horizon (STEPS): Steps over which a move from the plan of --from must pay for itself; 10,000
        by default.

Measurement:
    rounds (N): Number of rounds; each runs every plan.
    block (N): Iterations of a plan per round.
    warmup (auto|N): Rounds before the measurement; auto warms up until no plan becomes faster.
    link (GBIT_S): Run two ranks as two hosts over an emulated link of this rate (Gbit/s each way);
        needs root and iproute2.
    runtime: How CPU ranks run: plain as torchrun and a training script run them; tuned with
        real-time gloo threads and kept memory, which repeats better but no user runs.

Output:
    json: Print one JSON object on stdout and nothing else.
    output (-o FILE): Write the best plan to this file.
    quiet: Print the result in a few lines, without progress and notes.
"""
ARGUMENTS, OPTIONS = "Arguments", "Options"
SECTION = re.compile(r"(\w[\w ]*):")
ENTRY = re.compile(r"(\w+)(?: \((.*?)\))?: (.*)")


@dataclass(frozen=True)
class Described:
    """Docstring of a parameter: its panel, its names, its value's name, its help."""

    panel: str
    names: tuple[str, ...]
    metavar: str | None
    help: str

    def option(self, name: str, *, hidden: bool = False) -> Any:
        """The option of a parameter, for Typer."""
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
    """Split a docstring into its head, with a line a paragraph, and its parameters."""
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
    """The function as Typer takes a command: each parameter with its description.

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
