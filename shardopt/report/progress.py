"""Progress of a search or of a reading of data, on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from shardopt.formatting import ms
from shardopt.report.console import EscapingConsole


class LineProgress:
    """Progress in one line on stderr; nothing when off or piped away."""

    def __init__(self, starting: str, *further: ProgressColumn, on: bool) -> None:
        console = EscapingConsole(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *further,
            console=console,
            transient=True,
            refresh_per_second=5,
            disable=not (on and console.is_terminal),
        )
        self._task = self._progress.add_task(starting, total=1.0, best="", bound="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        sys.stderr.flush()

    def reading(self, path: Path, samples: int) -> None:
        """Show the file that is read, and the samples so far, over all files."""
        self._progress.update(self._task, description=f"reading {path.name}: {samples:,} samples")

    def replaying(self, done: int, total: int, left_s: float) -> None:
        """Iterations done, of how many, and the time that is left."""
        text = f"iteration {done + 1} of {total}, {left_s:.0f} s left"
        self._progress.update(self._task, description=text)


class SearchProgress(LineProgress):
    """A `search.problem.Progress`: the stage, the best plan so far and the bound."""

    def __init__(self, *, on: bool) -> None:
        best = TextColumn("{task.fields[best]}", markup=False)
        bound = TextColumn("{task.fields[bound]}", markup=False, style="dim")
        super().__init__(
            "starting", BarColumn(bar_width=24), best, bound, TimeElapsedColumn(), on=on
        )

    def __call__(
        self, stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        self._progress.update(
            self._task,
            description=stage,
            completed=fraction,
            best="" if best_ms is None else f"best {ms(best_ms)}",
            bound="" if bound_ms is None else f"bound {ms(bound_ms)}",
        )
