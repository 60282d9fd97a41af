"""HTML elements; whatever a table or file is called, it is escaped when they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

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


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        numeric: aligned right, and sorted as numbers.
    """

    title: str
    numeric: bool = False
    hint: str | None = None


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the value it is sorted by where that is another."""

    shown: Child
    value: float | None = None


Row = Sequence[Cell | Child]


def grid(columns: Sequence[Column], rows: Iterable[Row], *, sortable: str = "") -> Element:
    """A table.

    Args:
        sortable: its id; columns can then be sorted by a click on their titles.
    """
    head = node("tr", *(_title(column, bool(sortable)) for column in columns))
    body = [
        node("tr", *(_cell(cell, column) for cell, column in zip(row, columns, strict=True)))
        for row in rows
    ]
    kind = "sortable" if sortable else None
    made = node(
        "table", node("thead", head), node("tbody", *body), class_=kind, id=sortable or None
    )
    return node("div", made, class_="scroll")


def _title(column: Column, sortable: bool) -> Element:
    inside: Child = node("button", column.title, type="button") if sortable else column.title
    kind = "number" if column.numeric else None
    return node("th", inside, scope="col", class_=kind, title=column.hint)


def _cell(cell: Cell | Child, column: Column) -> Element:
    given = cell if isinstance(cell, Cell) else Cell(cell)
    value = None if given.value is None else f"{given.value:.9g}"
    return node("td", given.shown, class_="number" if column.numeric else None, data_value=value)


def bar(parts: Iterable[tuple[float, str, str]], total: float) -> Element:
    """Parts side by side; all of the bar is ``total``.

    Args:
        parts: value, class and what the pointer shows, of each.
    """
    drawn = [
        node("i", class_=kind, style=f"width:{100 * value / total:.3f}%", data_tip=tip)
        for value, kind, tip in parts
        if value > 0 and total > 0
    ]
    return node("div", *drawn, class_="bar")
