"""The timeline of one iteration as inline SVG: a lane for every stream of every rank drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from predictor.predict import Prediction
from predictor.trace.chrome import WAIT, Event, process_names, step_events
from predictor.units import us
from shardopt.formatting import ms, phase_words, plural, ranks_text
from shardopt.report.html.nodes import node
from shardopt.report.prediction import selected

MAX_RANKS = 16
MAX_HOST = 8
"""Ranks of one host that are not folded away."""
OPENED = 2
"""Ranks whose lanes are all shown at first: those that the critical path is on for longest."""
COMPUTE = "compute"
"""The lane that stands for a rank."""
MAX_SPANS = 8000
"""Most bars that are drawn, the longest: more would make a browser pause."""
LANE_PX = 18
LABELLED = 0.004
"""Bars of at least this share of the iteration carry their name, where it fits."""
TICKS = 10
"""Most ticks on the ruler."""
KEPT = 3
"""Iterations that may overlap: no pipeline has more batches in flight."""
_OTHER_KINDS = {"issue": "host issues work", "wait": "waits for other ranks"}


@dataclass(frozen=True)
class Span:
    """Something that runs on a lane, from ``start_ms`` to ``end_ms`` within the period."""

    rank: int
    lane: int
    name: str
    kind: str
    phase: str
    start_ms: float
    end_ms: float
    critical: bool

    @property
    def duration_ms(self) -> float:
        """Duration in ms within the period."""
        return self.end_ms - self.start_ms


def spans(prediction: Prediction) -> list[Span]:
    """List the spans of the last period of the steady state, filled by the critical path.

    The host runs ahead: its work for iterations that were not simulated is that of the last one,
    shifted by a period each.
    """
    graph, steps = prediction.graph, prediction.timeline.steps
    period = prediction.iteration_ms
    path = prediction.critical_path
    origin = path[0].start_ms if path else float(prediction.timeline.finish_ms[0]) - period
    ranks = range(graph.world_size)
    drawn = []
    for step, path, later in (
        *((step, prediction.critical_path, 0) for step in steps[-KEPT:]),
        *((steps[-1], (), later) for later in range(1, KEPT)),
    ):
        for event in step_events(graph, step, path, origin - later * period, ranks):
            span = _span(event, period)
            if span is not None:
                drawn.append(span)
    return drawn


def _span(event: Event, period_ms: float) -> Span | None:
    start, end = us(event["ts"]), us(event["ts"] + event["dur"])
    start, end = max(0.0, start), min(period_ms, end)
    if end <= start:
        return None
    args = event["args"]
    name, category = event["name"], event["cat"]
    kind = "wait" if category == WAIT else f"p-{category}"
    if name.startswith("issue "):
        kind = "issue"
    critical = bool(args.get("critical"))
    return Span(event["pid"], event["tid"], name, kind, args["phase"], start, end, critical)


def timeline(prediction: Prediction, local_world_size: int) -> Element:
    """Lanes of the ranks under a ruler in ms: of one host and the worst ranks, others folded away.

    Args:
        local_world_size: ranks per host.
    """
    first = _first_ranks(prediction, local_world_size)
    ranks = sorted({time.rank for time in selected(prediction.per_rank, MAX_RANKS)} | first)
    shown = set(ranks)
    all_spans = [span for span in spans(prediction) if span.rank in shown]
    drawn = sorted(all_spans, key=lambda s: -s.duration_ms)[:MAX_SPANS]
    by_lane: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(drawn, key=lambda s: s.start_ms):
        by_lane.setdefault((span.rank, span.lane), []).append(span)
    names, period = _lanes(prediction), prediction.iteration_ms
    lanes = {
        rank: [(names[lane], by_lane[rank, lane]) for lane in names if (rank, lane) in by_lane]
        for rank in ranks
    }
    path = _time_on_path(prediction)
    opened = sorted(path, key=lambda rank: (-path[rank], rank))[:OPENED]
    rows = [_ruler(period)]
    rows += [_rank(r, lanes[r], period, opened=r in opened) for r in ranks if r in first]
    folded_ranks = [rank for rank in ranks if rank not in first]
    if folded_ranks:
        summary = node(
            "summary", f"{plural(len(folded_ranks), 'more rank')}: {ranks_text(folded_ranks)}"
        )
        folded = [_rank(rank, lanes[rank], period) for rank in folded_ranks]
        rows.append(node("details", summary, *folded, class_="others"))
    left_out = len(all_spans) - len(drawn)
    notes = (
        [f"{plural(left_out, 'short bar')} not drawn; a Perfetto trace has all"] if left_out else []
    )
    if len(ranks) < prediction.graph.world_size:
        notes.append(f"{len(ranks)} of {plural(prediction.graph.world_size, 'rank')} drawn")
    zoom = node("input", type="range", id="zoom", min=0, max=6, step=0.25, value=0)
    label = node("label", "zoom ", zoom, class_="tool needs-js")
    return node(
        "div",
        _legend(drawn),
        node("p", label, " ", node("small", "; ".join(notes))),
        node("div", node("div", *rows, class_="lanes"), class_="scroll timeline", tabindex=0),
    )


def _time_on_path(prediction: Prediction) -> dict[int, float]:
    """Rank -> ms that it spends on the critical path."""
    spent: dict[int, float] = {}
    for segment in prediction.critical_path:
        spent[segment.rank] = spent.get(segment.rank, 0.0) + segment.duration_ms
    return spent


def _first_ranks(prediction: Prediction, local: int) -> set[int]:
    """The ranks that are not folded away: those of the critical path, the busiest, the idlest, and
    the host of the one that the path is on for longest."""
    path = _time_on_path(prediction)
    worst = max(path, key=lambda rank: (path[rank], -rank), default=0)
    host = range(worst // local * local, worst // local * local + local)
    extremes = {time.rank for time in selected(prediction.per_rank, 2)}
    return {worst, *path, *extremes, *host[:MAX_HOST]}


def _legend(drawn: Sequence[Span]) -> Element:
    kinds = dict.fromkeys(sorted(span.kind for span in drawn))
    named = [
        (kind, _OTHER_KINDS.get(kind) or phase_words(kind.removeprefix("p-"))) for kind in kinds
    ]
    return node("p", *(node("span", node("i", class_=k), f" {w}", class_="key") for k, w in named))


def _lanes(prediction: Prediction) -> dict[int, str]:
    events = process_names(prediction.graph, [0], ["rank 0"])
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def _rank(
    rank: int, lanes: Sequence[tuple[str, list[Span]]], period: float, *, opened: bool = False
) -> Element:
    """The compute lane of a rank; a click unfolds the others."""
    compute = [lane for lane in lanes if lane[0] == COMPUTE] or lanes[:1]
    folded_lanes = [lane for lane in lanes if lane not in compute]
    summary = [_row(rank, name, lane_spans, period, first=True) for name, lane_spans in compute]
    folded = [_row(rank, name, lane_spans, period) for name, lane_spans in folded_lanes]
    return node(
        "details", node("summary", *summary), *folded, class_="rank", open="" if opened else None
    )


def _row(
    rank: int, lane: str, lane_spans: Sequence[Span], period: float, *, first: bool = False
) -> Element:
    who = node("b", f"rank {rank}") if first else ""
    label = node("span", who, " ", node("span", lane), class_="lane")
    bars = [_bar(span, period) for span in lane_spans]
    svg = node("svg", *bars, height=LANE_PX, role="img", aria_label=f"rank {rank}, {lane}")
    return node("div", label, svg, class_="row")


def _bar(span: Span, period: float) -> Element:
    share = span.duration_ms / period
    box: Mapping[str, object] = {"width": "100%", "height": "100%"}
    inside = [node("rect", **box)]
    if share >= LABELLED and span.kind != "issue":
        inside.append(node("text", span.name, x=3, y=LANE_PX - 6))
    tip = f"{span.name}\n{phase_words(span.phase)}, rank {span.rank}\n"
    tip += f"{ms(span.duration_ms)}, from {ms(span.start_ms)}"
    if span.critical:
        tip += "\non the critical path"
    return node(
        "svg",
        *inside,
        x=f"{100 * span.start_ms / period:.4f}%",
        y=1,
        width=f"{100 * share:.4f}%",
        height=LANE_PX - 2,
        class_=span.kind + (" critical" if span.critical else ""),
        data_tip=tip,
    )


def _ruler(period: float) -> Element:
    step = 10 ** math.ceil(math.log10(period / TICKS))
    step = next(step * part for part in (0.2, 0.5, 1.0) if period / (step * part) <= TICKS)
    ticks = []
    for tick in range(math.ceil(period / step)):
        place = f"{100 * tick * step / period:.4f}%"
        ticks.append(node("line", x1=place, x2=place, y1=0, y2=LANE_PX))
        ticks.append(node("text", f"{tick * step:g} ms", x=place, y=LANE_PX - 5, dx=3))
    empty = node("span", class_="lane")
    return node("div", empty, node("svg", *ticks, height=LANE_PX), class_="row ruler")
