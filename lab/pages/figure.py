"""The picture of the README: plans timed for real, beside what was predicted of them.

Left, the plans of fresh task sets (`validate torchrec-cpu`), predicted against measured. Right,
every task of `validate against-torchrec` in the plain runtime, which users run: the time of
TorchRec's plan and of ours, with the predictions as marks.
Both come from the committed rows; `python -m lab pages` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from xml.etree.ElementTree import Element, tostring

from lab.pages.tables import read_csv, scores_file
from lab.suites import SUITES
from lab.tasks.against import OURS, THEIRS
from shardopt.ranks.realtime import Runtime
from shardopt.report.html.nodes import node

WIDTH, HEIGHT = 960, 380
TOP, BOTTOM = 64, 330
LEFT_PANEL, RIGHT_PANEL = (60, 400), (490, 940)
"""Left and right edges of the panels."""
BAND = 0.1
TICKS_MS = (20, 30, 50, 70, 100, 150, 200, 300)
INK, GREY, PALE = "#1f2328", "#6e7781", "#d8dee4"
THEIR_COLOUR, OUR_COLOUR, POINT = "#b0b8c1", "#0969da", "#0969da"
Timed = Mapping[str, str]
"""A row of a suite's CSV file."""
STYLE = "font-family: system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def figure_of_rows(folder: Path) -> str:
    """Draw the picture as SVG text, from the CSV files of docs/accuracy.

    Raises:
        InputError: one of them cannot be read.
    """
    plain = {
        row["batch"]
        for row in read_csv(folder / scores_file("against-torchrec", "batches"))
        if row["runtime"] == Runtime.PLAIN
    }
    plans, tasks = (
        [row for row in read_csv(folder / f"{name}.csv") if row["part"] == SUITES[name].headline]
        for name in ("torchrec-cpu", "against-torchrec")
    )
    return figure(plans, [row for row in tasks if row["batch"] in plain])


def figure(plans: Sequence[Timed], tasks: Sequence[Timed]) -> str:
    """Draw the picture as SVG text.

    Args:
        plans: rows for the left panel.
        tasks: rows of TorchRec's plan and ours, for the right panel.
    """
    parts = (*_scatter(plans), *_bars(tasks))
    drawing = node(
        "svg",
        node("title", "Measured and predicted iteration times of sharding plans"),
        node("rect", width=WIDTH, height=HEIGHT, fill="#ffffff"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        role="img",
        style=STYLE,
    )
    return tostring(drawing, encoding="unicode") + "\n"


def _measured(row: Timed) -> float:
    return float(row["measured_ms"])


def _predicted(row: Timed) -> float:
    return float(row["predicted_ms"])


def _scatter(rows: Sequence[Timed]) -> Iterator[Element]:
    """Draw both axes on one logarithmic range, so that equal errors are equally far off."""
    pairs = [(_measured(row), _predicted(row)) for row in rows]
    times = [time for pair in pairs for time in pair]
    error = fmean(abs(predicted / measured - 1) for measured, predicted in pairs)
    low, high = 0.95 * min(times), 1.05 * max(times)
    left, right = LEFT_PANEL
    floor = BOTTOM

    def x(ms: float) -> float:
        return left + (right - left) * math.log(ms / low) / math.log(high / low)

    def y(ms: float) -> float:
        return floor - (floor - TOP) * math.log(ms / low) / math.log(high / low)

    yield from _head(left, f"{len(rows)} plans under TorchRec, two CPU ranks")
    # the band as it meets the frame: between predicted = (1 - BAND) and (1 + BAND) x measured
    up, down = 1 + BAND, 1 - BAND
    corners = [(low, low), (low, low * up), (high / up, high), (high, high), (high, high * down)]
    corners.append((low / down, low))
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    yield node("polygon", points=points, fill="#ddf4ff")
    for tick in (tick for tick in TICKS_MS if low < tick < high):
        yield _line(x(tick), TOP, x(tick), floor, PALE)
        yield _line(left, y(tick), right, y(tick), PALE)
        yield _text(x(tick), floor + 16, str(tick), anchor="middle")
        yield _text(left - 6, y(tick) + 4, str(tick), anchor="end")
    yield _line(x(low), y(low), x(high), y(high), GREY)
    for measured, predicted in pairs:
        yield node(
            "circle",
            cx=f"{x(measured):.1f}",
            cy=f"{y(predicted):.1f}",
            r=2,
            fill=POINT,
            fill_opacity=0.45,
        )
    yield _text((left + right) / 2, floor + 34, "measured", anchor="middle")
    yield _text(left, TOP - 8, "predicted")
    yield _text(right - 6, floor - 10, f"mean error {100 * error:.1f} %", INK, anchor="end")
    yield _text(right - 6, floor - 26, f"shaded: within {100 * BAND:.0f} %", anchor="end")


def _bars(rows: Sequence[Timed]) -> Iterator[Element]:
    """Draw two measured bars a task; the prediction of each is a mark across it."""
    tasks = dict.fromkeys((row["batch"], row["task"]) for row in rows)
    named = {(row["batch"], row["task"], row["plan"]): row for row in rows}
    high = 1.08 * max(max(_measured(row), _predicted(row)) for row in rows)
    left, right = RIGHT_PANEL
    step = (right - left) / len(tasks)
    thick = min(14.0, step / 3)

    def y(ms: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * ms / high

    yield from _head(left, f"{len(tasks)} models on plain ranks: TorchRec's plan, ours")
    for tick in range(0, math.ceil(high), 50):
        yield _line(left, y(tick), right, y(tick), PALE)
        yield _text(left - 6, y(tick) + 4, str(tick), anchor="end")
    for at, task in enumerate(tasks):
        middle = left + step * (at + 0.5)
        for start, plan, colour in (
            (middle - thick - 1, THEIRS, THEIR_COLOUR),
            (middle + 1, OURS, OUR_COLOUR),
        ):
            row = named[(*task, plan)]
            top = y(_measured(row))
            yield node(
                "rect",
                x=f"{start:.1f}",
                y=f"{top:.1f}",
                width=f"{thick:.1f}",
                height=f"{BOTTOM - top:.1f}",
                fill=colour,
            )
            mark = y(_predicted(row))
            yield _line(start - 2, mark, start + thick + 2, mark, INK, 2)
    yield _text((left + right) / 2, BOTTOM + 16, "two bars a model", anchor="middle")
    yield from _legend(left, TOP - 16)


def _legend(left: float, y: float) -> Iterator[Element]:
    for at, (colour, words) in enumerate(
        ((THEIR_COLOUR, "TorchRec's plan"), (OUR_COLOUR, "shardopt's plan"))
    ):
        yield node("rect", x=left + 120 * at, y=y, width=10, height=10, fill=colour)
        yield _text(left + 120 * at + 15, y + 9, words)
    yield _line(left + 240, y + 5, left + 254, y + 5, INK, 2)
    yield _text(left + 260, y + 9, "predicted from the calibration")


def _head(left: float, title: str) -> Iterator[Element]:
    heading = _text(left, 24, title, INK)
    heading.set("font-size", "15")
    heading.set("font-weight", "600")
    yield heading
    yield _text(left, 41, "ms an iteration")


def _text(x: float, y: float, words: str, fill: str = GREY, anchor: str = "start") -> Element:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return node("text", words, **place, fill=fill, font_size=12, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1) -> Element:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    shown = {name: f"{value:.1f}" for name, value in ends.items()}
    return node("line", **shown, stroke=stroke, stroke_width=width)
