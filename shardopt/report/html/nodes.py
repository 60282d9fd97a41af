"""HTML elements, and reports made of them; names are escaped when the document is written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from xml.etree.ElementTree import Element, tostring

from shardopt.report.blocks import Bar, Block, Cell, Heading, Legend, Line, TextTable

Child = Element | str

_LINES = {"yellow": "dim", "red": "misfit-text"}
"""Style of a line -> its class where they differ: what may be wrong is no louder than what is."""
_COLUMNS = {">": "number", "~": "text"}
"""Side of a column -> the class of its cells."""


def node(tag: str, *children: Child, **attributes: object) -> Element:
    """An element with children and text in their order.

    Args:
        attributes: ``_`` in a name stands for ``-``, a trailing one goes (``class_``); what is None
            or False is left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    root = Element(tag, {n: str(v) for n, v in named.items() if v is not None and v is not False})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            root.append(child)
            last = child
        elif last is None:
            root.text = (root.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return root


def text_of(document: Element) -> str:
    """The document as text; style and script stay as they are."""
    return f"<!DOCTYPE html>\n{fragment_of(document)}\n"


def fragment_of(element: Element) -> str:
    """The element as text, for a page of someone else."""
    return tostring(element, encoding="unicode", method="html")


def section(title: str, aside: str, *children: Child) -> Element:
    """A part of the page under its heading."""
    heading = node("h2", title, " ", node("small", aside)) if aside else node("h2", title)
    return node("section", heading, *children)


def sections(blocks: Iterable[Block]) -> list[Element]:
    """A section for every heading; a report begins with one."""
    drawn: list[Element] = []
    for block in blocks:
        if isinstance(block, Heading):
            drawn.append(section(block.title, block.aside))
        elif block:
            drawn[-1].append(element(block))
    return drawn


def prose(text: str) -> list[Child]:
    """Flowing text; words between backticks are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them belongs to a name
        return [text]
    return [node("code", part) if at % 2 else part for at, part in enumerate(parts)]


def element(block: Block) -> Element:
    """A block that is no heading."""
    if isinstance(block, TextTable):
        return node("div", grid(block), class_="scroll")
    if isinstance(block, Legend):
        keys = (
            node("span", node("i", class_=_kind(k)), f" {words}", class_="key")
            for k, words in block.kinds.items()
        )
        return node("p", *keys)
    assert not isinstance(block, Heading)
    if isinstance(block, Line):
        return node("p", *prose(block.text), class_=_LINES.get(block.style, block.style) or None)
    return node("p", *prose(block))


def grid(table: TextTable) -> Element:
    """A table, whose rows are sorted by a click on a title if it has a name."""
    columns = table.columns or ("<", "~")
    body = [
        node("tr", *(_cell(cell, title) for cell, title in zip(row, columns, strict=True)))
        for row in table.rows
    ]
    titles = [_title(title, bool(table.name)) for title in table.columns]
    return node(
        "table",
        *([node("thead", node("tr", *titles))] if titles else []),
        node("tbody", *body),
        class_="sortable" if table.name else None,
        id=table.name or None,
    )


def _title(title: str, sortable: bool) -> Element:
    inside: Child = node("button", title[1:], type="button") if sortable else title[1:]
    return node("th", inside, scope="col", class_=_COLUMNS.get(title[0]))


def _cell(content: str | Bar | Cell, title: str) -> Element:
    shown = content.shown if isinstance(content, Cell) else content
    value = content.value if isinstance(content, Cell) else None
    kind = _COLUMNS.get(title[0])
    if isinstance(shown, Bar):
        inside: list[Child] = [bar(shown)]
        kind = None
    else:
        inside = prose(shown) if kind == "text" else [shown]
        if kind == "number" and value is None:
            with suppress(ValueError):  # a sorted column may hold other texts
                value = float(shown.replace(",", ""))
    return node("td", *inside, class_=kind, data_value=None if value is None else f"{value:.9g}")


def bar(parts: Bar) -> Element:
    """Parts side by side on a track."""
    drawn = [
        node("i", class_=_kind(kind), style=f"width:{100 * value / parts.total:.3f}%", data_tip=tip)
        for value, kind, tip in parts.parts
        if value > 0 and parts.total > 0
    ]
    return node("div", *drawn, class_="bar")


def _kind(kind: str) -> str:
    """The class that has the colour of a part: of phases their own."""
    return kind if kind == "idle" else f"p-{kind}"
