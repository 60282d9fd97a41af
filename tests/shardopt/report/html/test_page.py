"""The page without a browser: whole, self-contained, escaped, and limited in what it draws."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from shardopt.explain.explanation import explain_plan
from shardopt.report.html.nodes import node, text_of
from shardopt.report.html.page import page
from shardopt.report.html.timeline import MAX_RANKS, spans
from tests.shardopt.report.plans import NASTY, a_problem, a_setting, nasty, predicted, tables, whole

VERSIONS = {"shardopt": "1.2.3"}
VOID = {"meta", "input"}


class Reader(HTMLParser):
    """Tags, attributes and text, with a stack that must come out even."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def text() -> str:
    return page(*nasty(), VERSIONS)


def test_bars_of_phases_are_shares_of_the_iteration(text: str) -> None:
    """A phase of a third of the iteration fills a third of its track."""
    bar = r'<td class="number">([\d.]+) %</td><td><div class="bar"><i [^>]*?style="width:([\d.]+)%"'
    found = [(float(share), float(width)) for share, width in re.findall(bar, text)]
    assert len(found) > 3
    assert [width for _, width in found] == pytest.approx([share for share, _ in found], abs=0.51)


def test_names_are_text_and_never_markup(text: str) -> None:
    reader = read(text)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert NASTY in reader.texts
    assert "</script>.json" in reader.texts


def test_nothing_is_loaded_from_anywhere(text: str) -> None:
    names = {name for _, attributes in read(text).tags for name in attributes}
    assert not names & {"src", "href", "action", "srcset", "xlink:href"}
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", text)


def test_every_table_and_every_group_of_constants_has_a_row(text: str) -> None:
    setting, explanation = nasty()
    words = read(text).texts
    for key in explanation.given.plan.tables:
        assert key in words
    for group in setting.hardware.groups:
        assert group in words
    assert "shardopt 1.2.3" in " ".join(words)


def test_differences_of_the_second_plan_stand_beside(text: str) -> None:
    words = read(text).texts
    assert "in even.json" in words
    assert words.count("same") == 6  # of the nine on rank 0 each fourth, and the last three
    assert "TW on 3" in words


def test_the_same_page_every_time(text: str) -> None:
    assert text == page(*nasty(), VERSIONS)


def test_bars_stay_in_the_period_and_on_their_lane_one_follows_the_other() -> None:
    prediction = nasty()[1].given.prediction
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans(prediction):
        assert 0 <= span.start_ms < span.end_ms <= prediction.iteration_ms
        by_lane.setdefault((span.rank, span.lane), []).append((span.start_ms, span.end_ms))
    for found in by_lane.values():
        found.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(found))


def test_a_period_holds_every_operation_once() -> None:
    """Of a steady state, also what the host issues for iterations to come."""
    prediction = nasty()[1].given.prediction
    ran: dict[str, float] = {}
    for span in spans(prediction):
        if span.rank == 1 and span.kind.startswith("p-"):
            ran[span.name] = ran.get(span.name, 0.0) + span.duration_ms
    step = prediction.timeline.steps[-1]
    cost: dict[str, float] = {}
    for index, op in enumerate(prediction.graph.ops):
        took = float(step.end[index, 0, 1] - step.start[index, 0, 1])
        if took > 0:
            cost[op.name] = cost.get(op.name, 0.0) + took
    assert ran == pytest.approx(cost)


def test_of_many_ranks_a_few_are_drawn_and_it_says_so() -> None:
    problem = a_problem(tables(*(1000 + i for i in range(40))), 40, 8)
    given = predicted(problem, whole(problem, range(40)))
    text = page(a_setting(problem), explain_plan(problem, [given]), VERSIONS)
    drawn = {
        (attributes.get("aria-label") or "").partition(",")[0]
        for tag, attributes in read(text).tags
        if tag == "svg" and attributes.get("role") == "img"
    }
    critical = {segment.rank for segment in given.prediction.critical_path}
    assert MAX_RANKS <= len(drawn) <= MAX_RANKS + len(critical)
    assert f"{len(drawn)} of 40 ranks drawn" in text


def test_a_node_keeps_text_and_children_in_order() -> None:
    made = node(
        "p", "a", node("b", "<"), "c", node("i"), "d", class_="x", data_tip='"&', hidden=None
    )
    assert text_of(made).splitlines()[1] == (
        '<p class="x" data-tip="&quot;&amp;">a<b>&lt;</b>c<i></i>d</p>'
    )
