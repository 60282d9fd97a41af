"""HTML elements, and reports made of them; names are escaped when the document is written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from xml.etree.ElementTree import Element, tostring

from shardopt.report.blocks import Bar, Block, Cell, Grid, Heading, Legend, Line

Child = Element | str


def node(tag: str, *children: Child, **attributes: object) -> Element:
    """An element with children and text in their order.

    Args:
        attributes: ``_`` in a name stands for ``-``, a trailing one goes (``class_``); what is None
            or False is left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    made = Element(tag, {n: str(v) for n, v in named.items() if v is not None and v is not False})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return made


def text_of(document: Element) -> str:
    """The document as text; style and script stay as they are."""
    return "<!DOCTYPE html>\n" + tostring(document, encoding="unicode", method="html") + "\n"


def section(title: str, aside: str, *children: Child) -> Element:
    """A part of the page under its heading."""
    heading = node("h2", title, " ", node("small", aside)) if aside else node("h2", title)
    return node("section", heading, *children)


def sections(blocks: Iterable[Block]) -> list[Element]:
    """A report: a section for every heading, and one before the first of them."""
    found = [node("section")]
    for block in blocks:
        if isinstance(block, Heading):
            found.append(section(block.title, block.aside))
        elif block:
            found[-1].append(element(block))
    return found


def element(block: Block) -> Element:
    """A block that is no heading."""
    if isinstance(block, Grid):
        return node("div", grid(block), class_="scroll")
    if isinstance(block, Legend):
        keys = (
            node("span", node("i", class_=_kind(k)), f" {words}", class_="key")
            for k, words in block.kinds.items()
        )
        return node("p", *keys)
    assert not isinstance(block, Heading)
    if isinstance(block, Line):
        kind = "warning" if block.style in ("yellow", "red") else block.style
        return node("p", block.text, class_=kind or None)
    return node("p", block)


def grid(given: Grid) -> Element:
    """A table, whose rows are sorted by a click on a title if it has a name."""
    columns = given.columns or ("<", "<")
    body = [
        node("tr", *(_cell(cell, title) for cell, title in zip(row, columns, strict=True)))
        for row in given.rows
    ]
    titles = [_title(title, bool(given.name)) for title in given.columns]
    return node(
        "table",
        *([node("thead", node("tr", *titles))] if titles else []),
        node("tbody", *body),
        class_="sortable" if given.name else None,
        id=given.name or None,
    )


def _title(title: str, sortable: bool) -> Element:
    inside: Child = node("button", title[1:], type="button") if sortable else title[1:]
    return node("th", inside, scope="col", class_="number" if title[0] == ">" else None)


def _cell(given: str | Bar | Cell, title: str) -> Element:
    shown = given.shown if isinstance(given, Cell) else given
    value = given.value if isinstance(given, Cell) else None
    kind = None
    if title[0] == ">" and isinstance(shown, str):
        kind = "number"
        with suppress(ValueError):  # a sorted column may hold other texts
            value = float(shown.replace(",", "")) if value is None else value
    inside = _bar(shown) if isinstance(shown, Bar) else shown
    return node("td", inside, class_=kind, data_value=None if value is None else f"{value:.9g}")


def _bar(bar: Bar) -> Element:
    drawn = [
        node("i", class_=_kind(kind), style=f"width:{100 * value / bar.total:.3f}%", data_tip=tip)
        for value, kind, tip in bar.parts
        if value > 0 and bar.total > 0
    ]
    return node("div", *drawn, class_="bar")


def _kind(kind: str) -> str:
    """The class that has the colour of a part: of phases their own."""
    return kind if kind == "idle" else f"p-{kind}"
