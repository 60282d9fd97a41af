"""The page without a browser: whole, self-contained, escaped, and limited in what it draws."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree.ElementTree import Element, fromstring

import pytest

from predictor.model.topology import Topology
from shardopt.api.document import GivenPlan
from shardopt.report.html.nodes import node, text_of
from shardopt.report.html.page import page
from shardopt.report.html.timeline import MAX_HOST, MAX_RANKS, OPENED, spans, timeline
from tests.shardopt.report.plans import NASTY, a_problem, explained, nasty, predicted, tables, whole

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
    return page(nasty(), VERSIONS)


def test_bars_of_phases_are_shares_of_the_iteration(text: str) -> None:
    """A phase of a third of the iteration fills a third of its track."""
    bar = r'<td class="number">([\d.]+) %</td><td><div class="bar"><i [^>]*?style="width:([\d.]+)%"'
    bars = [(float(share), float(width)) for share, width in re.findall(bar, text)]
    assert len(bars) > 3
    assert [width for _, width in bars] == pytest.approx([share for share, _ in bars], abs=0.51)


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
    words = read(text).texts
    for key in nasty().sharding_plan.tables:
        assert key in words
    for group in nasty().setting.hardware.groups:
        assert group in words
    assert "shardopt 1.2.3" in " ".join(words)


def test_differences_of_the_second_plan_stand_beside(text: str) -> None:
    words = read(text).texts
    assert "in even.json" in words
    assert words.count("same") == 6  # of the nine on rank 0 each fourth, and the last three
    assert "TW on 3" in words


def test_the_same_page_every_time(text: str) -> None:
    assert text == page(nasty(), VERSIONS)


def test_bars_stay_in_the_period_and_on_their_lane_one_follows_the_other() -> None:
    prediction = nasty().prediction
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans(prediction):
        assert 0 <= span.start_ms < span.end_ms <= prediction.iteration_ms
        by_lane.setdefault((span.rank, span.lane), []).append((span.start_ms, span.end_ms))
    for lane in by_lane.values():
        lane.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(lane))


def test_a_period_holds_every_operation_once() -> None:
    """A steady state also shows work that the host issues for later iterations."""
    prediction = nasty().prediction
    ran: dict[str, float] = {}
    for span in spans(prediction):
        if span.rank == 1 and span.kind.startswith("p-"):
            ran[span.name] = ran.get(span.name, 0.0) + span.duration_ms
    step = prediction.timeline.steps[-1]
    cost: dict[str, float] = {}
    for index, op in enumerate(prediction.graph.ops):
        duration_ms = float(step.end[index, 0, 1] - step.start[index, 0, 1])
        if duration_ms > 0:
            cost[op.name] = cost.get(op.name, 0.0) + duration_ms
    assert ran == pytest.approx(cost)


@pytest.fixture(scope="module")
def many() -> tuple[GivenPlan, Element]:
    """A plan for 40 ranks on five hosts, and the body of its page."""
    problem = a_problem(tables(*(1000 + i for i in range(40))), 40, 8)
    explanation = predicted(problem, whole(problem, range(40)))
    html = page(explained(problem, explanation), VERSIONS)
    return explanation, body_of(html)


def body_of(text: str) -> Element:
    """The body as a tree; what is void in HTML is closed for XML."""
    body = text[text.index("<body>") : text.index("<script>")] + "</body>"
    return fromstring(re.sub(r"(<input[^>]*)>", r"\1/>", body))


def classed(parent: Element, tag: str, name: str) -> list[Element]:
    """Elements of a class, in the order of the page."""
    return [element for element in parent.iter(tag) if name in (element.get("class") or "").split()]


def lanes_of(parent: Element) -> set[str]:
    """Ranks of which any lane is drawn below."""
    labels = [svg.get("aria-label") for svg in parent.iter("svg")]
    return {label.partition(",")[0] for label in labels if label}


def test_of_many_ranks_one_host_and_the_worst_are_shown_and_others_folded_away(
    many: tuple[GivenPlan, Element],
) -> None:
    explanation, body = many
    path = {segment.rank for segment in explanation.prediction.critical_path}
    (lanes,) = classed(body, "div", "lanes")
    shown = {
        rank for details in lanes.findall("details[@class='rank']") for rank in lanes_of(details)
    }
    (folded,) = classed(lanes, "details", "others")
    assert folded.get("open") is None
    assert {f"rank {rank}" for rank in path} <= shown
    assert any({f"rank {8 * host + i}" for i in range(8)} <= shown for host in range(5))
    assert len(shown) <= MAX_HOST + 2 + len(path)
    assert MAX_RANKS <= len(shown | lanes_of(folded)) < 40
    assert not shown & lanes_of(folded)


def test_of_a_rank_one_lane_is_shown_but_for_the_worst(
    many: tuple[GivenPlan, Element],
) -> None:
    _, body = many
    ranks = classed(body, "details", "rank")
    for rank in ranks:
        assert len([svg for svg in rank.findall("summary//svg") if svg.get("role")]) == 1
        assert len([svg for svg in rank.findall("div/svg") if svg.get("role")]) > 1
    assert any(rank.get("open") is not None for rank in ranks)


def test_of_a_path_over_many_ranks_those_it_is_on_for_longest_are_open() -> None:
    prediction = nasty().prediction
    long, *_ = sorted(prediction.critical_path, key=lambda e: -e.duration_ms)
    path = [replace(long, rank=rank, end_ms=long.start_ms + 1 + rank) for rank in range(4)]
    drawn = timeline(replace(prediction, critical_path=tuple(path)), 4)
    opened = [e for e in classed(drawn, "details", "rank") if e.get("open") is not None]
    assert len(opened) == OPENED
    assert {rank for e in opened for rank in lanes_of(e)} == {"rank 3", "rank 2"}


def test_the_three_answers_come_first_and_advice_is_the_first_section(text: str) -> None:
    body = body_of(text)
    header, section = body[0], body[1]
    assert [header.tag, section.tag] == ["header", "section"]
    assert len(list(header.iter("article"))) == 3
    assert all(len(classed(article, "p", "figure")) == 1 for article in header.iter("article"))


@pytest.mark.parametrize(("bound", "share"), [(0.5, "100 %"), (1.0, "none")])
def test_the_second_answer_is_the_proved_gap(bound: float, share: str) -> None:
    explanation = nasty()
    proved = explanation.model_copy(update={"lower_bound_ms": bound * explanation.iteration_ms})
    body = body_of(page(proved, VERSIONS))
    unknown = body_of(page(explanation, VERSIONS))
    figures, without = (
        [figure.text or "" for figure in classed(each_body, "p", "figure")]
        for each_body in (body, unknown)
    )
    assert share in figures[1]
    assert (figures[0], figures[2]) == (without[0], without[2])
    assert not any(digit in without[1] for digit in "0123456789")


def test_no_markup_is_raw_and_doubts_are_folded_away(text: str) -> None:
    explanation = nasty().model_copy(update={"doubts": ("run `shardopt plan` again",)})
    body = body_of(page(explanation, VERSIONS))
    assert not any("`" in words for words in body.itertext())
    (notes,) = classed(body, "details", "caveats")
    assert notes.get("open") is None
    assert "shardopt plan" in [code.text for code in notes.findall("p/code")]


def test_a_plan_that_does_not_fit_says_so_in_the_first_answer() -> None:
    problem = a_problem(tables(*(1_000_000 + i for i in range(8))))
    small = replace(problem, topology=Topology.uniform(4, hbm_bytes=2**28, ddr_bytes=2**28))
    explanation = predicted(small, whole(small, [0] * 8))
    body = body_of(page(explained(small, explanation), VERSIONS))
    assert classed(next(body.iter("article")), "p", "misfit-text")
    assert len(classed(body, "p", "misfit-text")) == 1


def test_every_table_lies_in_a_frame_that_scrolls(text: str) -> None:
    body = body_of(text)
    framed = [t for frame in classed(body, "div", "scroll") for t in frame.findall("table")]
    facts = [t for frame in classed(body, "div", "facts") for t in frame.findall("table")]
    assert len(framed) > 5
    assert len(framed) + len(facts) == len(list(body.iter("table")))


def test_a_node_keeps_text_and_children_in_order() -> None:
    paragraph = node(
        "p", "a", node("b", "<"), "c", node("i"), "d", class_="x", data_tip='"&', hidden=None
    )
    assert text_of(paragraph).splitlines()[1] == (
        '<p class="x" data-tip="&quot;&amp;">a<b>&lt;</b>c<i></i>d</p>'
    )
