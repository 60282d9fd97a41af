"""Everything that is wrong with a configuration, gathered so that the user sees it all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from predictor.errors import InputError

KeyPath = tuple[str | int, ...]

MOST_SHOWN = 100
"""Problems that a message lists; whoever has more has one that repeats."""


def key_text(path: KeyPath) -> str:
    """A key path as people write it: ``tables[3].features[0].pooling_factor``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def shown(value: object) -> str:
    """A given value for a message, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Place:
    """Where a value was written.

    Args:
        file: path as the user gave it.
        line: counted from 1; 0 when the file has no lines to speak of.
        column: name of a CSV column, for files that have them.
    """

    file: str
    line: int = 0
    column: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}" if self.line else self.file
        return f"{text}: column {self.column}" if self.column else text


@dataclass
class Problems:
    """The problems of one configuration and the places of its keys.

    Args:
        file: the main file, which every problem without a better place is laid to.
        places: where each key path was written.
        notes: what is not wrong, but worth one line on the console.
    """

    file: str
    places: dict[KeyPath, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _found: dict[tuple[Place, str], None] = field(default_factory=dict)
    _inputs: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """True once something is wrong."""
        return bool(self._found)

    def place(self, path: KeyPath) -> Place:
        """Place of a key, or of the nearest one around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place(self.file)

    def add(self, path: KeyPath, message: str, *, inputs: Iterable[str] = ()) -> None:
        """Record a problem with the value at ``path``.

        Args:
            inputs: what else could give the value: `ShardoptError.inputs`.
        """
        self._inputs += inputs
        key = key_text(path)
        self.add_at(self.place(path), f"{key}: {message}" if key else message)

    def add_at(self, place: Place, message: str) -> None:
        """Record a problem at a place that no key leads to."""
        self._found[place, message] = None

    def raise_if_any(self) -> None:
        """Raise one `InputError` with a line a problem, in the order of the file."""
        if not self._found:
            return
        order = sorted(self._found, key=lambda p: (p[0].file != self.file, p[0].file, p[0].line))
        lines = [f"{place}: {message}" for place, message in order]
        if len(lines) == 1:
            raise InputError(lines[0], self._inputs)
        more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
        text = "\n  ".join([f"{self.file}: {len(lines)} problems", *lines[:MOST_SHOWN], *more])
        raise InputError(text, self._inputs)
