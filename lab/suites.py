"""The suites of `validate`, as suites.yaml lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from predictor.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from lab.validate.report import Report

COMMITTED = Path(__file__).resolve().parents[1] / "configs" / "bench"
ALL = "all"


@dataclass(frozen=True)
class Suite:
    """Predictions of one kind against measurements of one source; suites.yaml says what each is.

    Args:
        readme: rows of the README: ``part`` of the report, ``what`` it is, ``first`` score.
    """

    name: str
    about: str
    builder: str
    text: str
    committed: bool = False
    readme: tuple[Mapping[str, str], ...] = ()

    def run(self, data: Path | None = None) -> Report:
        """Predict and compare.

        Args:
            data: folder with the measurements; the committed ones if None.

        Raises:
            InputError: there are no such files, or they cannot be used.
        """
        if data is None and not self.committed:
            raise InputError(
                f"{self.name} reads public files; give their folder (docs/data.md lists the files "
                "and where they are published)",
                inputs=("data",),
            )
        function = f"validate_{self.name.replace('-', '_')}"
        return getattr(import_module(self.builder), function)(data or COMMITTED / self.name)


def _read() -> tuple[Suite, ...]:
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(Suite(**{**entry, "readme": tuple(entry.get("readme", ()))}) for entry in listed)


SUITES = _read()


def find_suites(name: str) -> list[Suite]:
    """The suite of a name, or every suite for ``all``.

    Raises:
        InputError: there is no such suite.
    """
    names = {suite.name: suite for suite in SUITES}
    if name != ALL and name not in names:
        raise InputError(
            f"there is no suite '{name}'{did_you_mean(name, [*names, ALL])}; there are "
            f"{', '.join([*names, ALL])}"
        )
    return [*SUITES] if name == ALL else [names[name]]


def run_suites(name: str, data: Path | None) -> list[Report]:
    """What each suite of a name finds; under ``all``, ``data`` holds the public files alone."""
    return [
        suite.run(None if name == ALL and suite.committed else data) for suite in find_suites(name)
    ]
