"""``shardopt explain --html``: one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from xml.etree.ElementTree import Element

from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.workload import Table
from predictor.units import format_bytes
from shardopt.api.document import ExplainAnswer
from shardopt.api.setting import Setting
from shardopt.explain.differences import table_diffs
from shardopt.formatting import (
    KIND_WORDS,
    covered,
    gap_of,
    interval,
    ms,
    number,
    percent,
    phase_words,
    plural,
    ranks_text,
    type_mix,
)
from shardopt.report.advice import advice, none_saves
from shardopt.report.blocks import Bar, Cell, Line, TextTable
from shardopt.report.constraints import constraints, constraints_words
from shardopt.report.explain import critical_path, in_words, single_changes, what_if
from shardopt.report.hardware import error_words, iteration_words
from shardopt.report.html.nodes import bar, element, grid, node, prose, section, sections, text_of
from shardopt.report.html.timeline import timeline
from shardopt.report.plan import OPTIMAL, deciding_lines
from shardopt.report.prediction import (
    based_on,
    breakdown,
    doubts,
    misfit_text,
    ranks,
    setting_facts,
    side_by_side,
)

PLAN_TABLE = "plan"
TIMELINE = "one iteration of the steady state; the critical path is outlined"
MAX_OTHERS = 4
"""Other plans whose sharding is shown in the plan table where it differs."""


def page(answer: ExplainAnswer, versions: Mapping[str, str]) -> str:
    """The page: needs no network and no other file, readable without scripts; names are escaped."""
    workload = answer.setting.workload
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", f"{workload.name}: {answer.plan}"),
        node("style", _file("page.css")),
    )
    prices = answer.constraints
    body = node(
        "body",
        node("header", *_header(answer)),
        *sections(
            [
                *advice(answer, answer.setting.hardware.device),
                *([] if prices is None else constraints(prices)),
                *([] if prices is None else constraints_words(prices)),
                *single_changes(answer),
            ]
        ),
        *(sections(side_by_side(answer.plans)) if answer.others else ()),
        _breakdown(answer),
        section("Timeline", TIMELINE, timeline(answer.prediction, answer.local_world_size)),
        *sections([*ranks(answer), *critical_path(answer), *what_if(answer)]),
        plan_section(answer),
        _provenance(answer),
        _footer(answer.setting, versions),
        node("div", id="tip", role="status"),
        node("script", _file("page.js")),
    )
    return text_of(node("html", head, body, lang="en"))


def _header(answer: ExplainAnswer) -> list[Element]:
    """The name, what is predicted for, the three answers, and what they rest on."""
    answers = _time(answer), _proved(answer), _best_advice(answer)
    (_, tables), *facts_below = setting_facts(answer.setting).rows
    facts = node("div", grid(TextTable((), [("model", tables), *facts_below])), class_="facts")
    title = node("h1", answer.setting.workload.name, " ", node("small", answer.plan))
    return [title, facts, node("div", *answers, class_="answers"), _caveats(answer)]


def _answer(title: str, figure: str, *lines: Element) -> Element:
    return node("article", node("h2", title), node("p", figure, class_="figure"), *lines)


def _time(answer: ExplainAnswer) -> Element:
    lines = [
        node("p", f"per iteration; 90 % interval {interval(answer.interval_ms)} ms"),
        node("p", type_mix(answer.sharding_plan), class_="dim"),
    ]
    misfit = misfit_text(answer)
    if misfit:
        lines.insert(0, element(Line(f"The plan {misfit}.", "red")))
    return _answer("Predicted time", ms(answer.iteration_ms), *lines)


def _proved(answer: ExplainAnswer) -> Element:
    """Say how far the plan is from the best one at most, or what is known instead."""
    bound, best = answer.lower_bound_ms, next(iter(answer.changes.found), None)
    tried = node("p", *prose(f"{answer.changes.none_words}."), class_="dim")
    if best is not None:
        share = percent(best.saving_ms / answer.iteration_ms)
        tried = node("p", f"The best single change of the plan saves {share}.", class_="dim")
    gap = None if bound is None else gap_of(answer.iteration_ms, bound)
    if bound is None or gap is None:
        why = (
            "The plan comes without a bound for this model and machine; `shardopt plan` finds one."
        )
        return _answer("Distance from optimal", "not known", node("p", *prose(why)), tried)
    if gap <= OPTIMAL:
        claim = node("p", "Proved: no plan is predicted to be faster.")
        return _answer("Distance from optimal", "none", claim, tried)
    claim = node("p", f"Proved: no plan is predicted to be faster than {ms(bound)}.")
    most = percent(gap)
    figure = most if most.startswith("<") else f"at most {most}"
    return _answer("Distance from optimal", figure, claim, tried)


def _best_advice(answer: ExplainAnswer) -> Element:
    if answer.advice_considered is None:
        return _answer("Best advice", "none", node("p", "No settings were tried."))
    if not answer.advice:
        return _answer("Best advice", "none", element(none_saves(answer.advice_considered)))
    best = answer.advice[0]
    change = node("p", "of the time per sample, by ", node("code", best.label))
    costs = node("p", ", ".join(best.costs), class_="dim")
    return _answer("Best advice", f"-{percent(best.gain)}", change, costs)


def _caveats(answer: ExplainAnswer) -> Element:
    """Say what the prediction rests on; what may make it wrong is folded away below."""
    based = prose(based_on(answer))
    more = [
        *(f"{doubt}." for doubt in answer.doubts),
        *(f"{other.plan}: {doubt}." for other in answer.others for doubt in other.doubts),
        *deciding_lines(answer.deciding),
        *(note for note in doubts(answer) if not isinstance(note, Line) or note.style != "red"),
    ]
    if not more:
        return node("p", *based, class_="dim caveats")
    count = f" {plural(len(more), 'more note')}."
    return node("details", node("summary", *based, count), *map(element, more), class_="caveats")


def _breakdown(answer: ExplainAnswer) -> Element:
    """The critical path as one bar, in words and by phase."""
    parts = [
        (part, phase, f"{phase_words(phase)}\n{ms(part)}")
        for phase, part in answer.breakdown.items()
    ]
    words = [node("li", *prose(sentence)) for sentence in in_words(answer)]
    return section(
        "Where the time goes",
        f"{answer.plan}, along its critical path",
        bar(Bar(parts, answer.iteration_ms)),
        node("ul", *words),
        *map(element, breakdown(answer)),
    )


def _file(name: str) -> str:
    return (resources.files("shardopt.report.html") / name).read_text(encoding="utf-8")


def _provenance(answer: ExplainAnswer) -> Element:
    """A row for each group of constants; ranges and sources are folded away below."""
    hardware, critical = answer.setting.hardware, answer.critical_groups
    columns = ["<constants", "<on the critical path", ">1 sigma", "~provenance", "~known error"]
    rows, sources = [], []
    for name, group in hardware.groups.items():
        origin = group.provenance
        ranges = "; ".join(covered(quantity, *bounds) for quantity, bounds in origin.range.items())
        rows.append(
            (
                name,
                "yes" if name in critical else "",
                percent(group.rel_error),
                f"{KIND_WORDS[origin.kind]}; from {hardware.origins[name]}",
                error_words(origin.error),
            )
        )
        fitted = [node("p", f"Fitted for {ranges}.")] if ranges else []
        source = node("p", *prose(" ".join(origin.source.split())))
        sources.append(node("details", node("summary", f"{name}: source"), *fitted, source))
    return section(
        "Provenance",
        "where the constants come from",
        *(
            node("p", f"Whole iterations on {hardware.name} {text}.")
            for text in iteration_words(hardware)
        ),
        element(TextTable(columns, rows)),
        node("div", *sources, class_="sources"),
    )


def _footer(setting: Setting, versions: Mapping[str, str]) -> Element:
    facts = [f"{name} {version}" for name, version in versions.items()]
    facts.append(f"hardware {setting.hardware_name} ({setting.hardware_from})")
    if setting.workload.sha256:
        facts.append(f"model sha256 {setting.workload.sha256}")
    facts += setting.notes
    return node("footer", node("p", *prose(" · ".join(facts))))


def plan_section(answer: ExplainAnswer) -> Element:
    """The table of the explained plan, which sorts and filters, and what differs in the others."""
    further, workload = answer.others[:MAX_OTHERS], answer.setting.workload
    columns = ["<table", ">rows", ">dim", ">ids/sample", "<type", "<kernel", ">shards", "~ranks"]
    columns += [
        ">weights",
        ">forward ms",
        ">backward ms",
        *(f"~in {plan.plan}" for plan in further),
    ]
    differing = [_differing(answer.sharding_plan, other.sharding_plan) for other in further]
    rows = []
    for key, table in zip(workload.keys, workload.tables, strict=True):
        row = _row(key, table, answer.sharding_plan.tables[key], *answer.table_times[key])
        rows.append([*row, *(sharding_of.get(key, "same") for sharding_of in differing)])
    aside = f"{plural(len(rows), 'table')}; times of a table's shards alone, on the slowest rank"
    if len(answer.others) > MAX_OTHERS:
        aside += f", with the first {MAX_OTHERS} of {len(answer.others)} other plans"
    drawn = element(TextTable(columns, rows, name=PLAN_TABLE))
    return section("Plan", aside, _filters(answer.sharding_plan), drawn)


def _filters(plan: ShardingPlan) -> Element:
    types = sorted({table.sharding_type.short for table in plan.tables.values()})
    choices = [node("option", "all types", value="")]
    choices += [node("option", kind, value=kind) for kind in types]
    return node(
        "p",
        node("input", type="search", id="filter", placeholder="filter by any text"),
        " ",
        node("select", *choices, id="type", aria_label="sharding type"),
        " ",
        node("input", type="number", id="rank", min=0, max=plan.world_size - 1, placeholder="rank"),
        " ",
        node("output", "", id="count"),
        class_="tool needs-js",
    )


def _row(
    key: str, table: Table, plan: TablePlan, forward: float, backward: float
) -> list[Cell | str]:
    return [
        key,
        f"{table.num_embeddings:,}",
        str(table.embedding_dim),
        f"{table.lookups_per_sample:g}",
        plan.sharding_type.short,
        plan.compute_kernel.value,
        str(len(plan.shards)),
        Cell(ranks_text(plan.ranks), min(plan.ranks)),
        Cell(format_bytes(table.weight_bytes), table.weight_bytes),
        number(forward),
        number(backward),
    ]


def _differing(plan: ShardingPlan, other: ShardingPlan) -> dict[str, str]:
    """Table -> its sharding in another plan, where that differs."""
    shardings = {}
    for diff in table_diffs(plan, other):
        if diff.b is not None:
            by_column = len({shard.offset[1] for shard in diff.b.shards}) > 1
            split = f" of {diff.b.shards[0].size[1]} columns" if by_column else ""
            shardings[diff.table] = (
                f"{diff.b.sharding_type.short}{split} on {ranks_text(diff.b.ranks)}"
            )
    return shardings
