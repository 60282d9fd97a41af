"""What a search or a reading of data is doing, on stderr, while it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status

from shardopt.formatting import ms
from shardopt.report.console import EscapingConsole


class SearchProgress:
    """A `search.problem.Progress` on the terminal; nothing when off or stderr is no terminal."""

    def __init__(self, *, on: bool) -> None:
        self._console = EscapingConsole(stderr=True)
        self._on = on and self._console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        if self._on:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[best]}", markup=False),
                TextColumn("{task.fields[bound]}", markup=False, style="dim"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=5,
            )
            self._task = self._progress.add_task("starting", total=1.0, best="", bound="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            sys.stderr.flush()

    def __call__(
        self, stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        """Show the stage, the best plan so far and the bound."""
        if self._progress is not None:
            self._progress.update(
                self._task,
                description=stage,
                completed=fraction,
                best="" if best_ms is None else f"best {ms(best_ms)}",
                bound="" if bound_ms is None else f"bound {ms(bound_ms)}",
            )


class LineProgress:
    """What is being done, in one line on stderr; nothing when off or piped away."""

    def __init__(self, starting: str, *, on: bool) -> None:
        console = EscapingConsole(stderr=True)
        self._status = Status(starting, console=console) if on and console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))

    def reading(self, path: Path, samples: int) -> None:
        """Which file is read, and the samples so far, over all files."""
        self._say(f"reading {path.name}: {samples:,} samples")

    def replaying(self, done: int, total: int, left_s: float) -> None:
        """Iterations done, of how many, and the time that is left."""
        self._say(f"iteration {done + 1} of {total}, {left_s:.0f} s left")
