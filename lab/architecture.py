"""What a real model is beside its tables, in a few numbers: kind and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.errors import InputError, did_you_mean
from shardopt.bench.rows import BenchRows

Sizes = Mapping[str, int | tuple[int, ...]]

KINDS: Mapping[str, tuple[str, ...]] = {
    "dcn_v2": ("bottom", "layers", "low_rank", "top"),
    "deepfm": ("hidden", "deep"),
    "mmoe": ("experts", "expert", "tasks", "tower"),
    "two_dims": ("bottom", "first", "second", "top"),
    "sasrec": ("length", "blocks", "heads", "top"),
    "hstu": ("length", "blocks", "heads", "top"),
}
"""Kind -> the names of its sizes; `lab.rankers` says what they mean."""


@dataclass(frozen=True)
class Architecture:
    """The dense part of a model that `lab.rankers` builds.

    Args:
        kind: one of `KINDS`.
        in_features: dense features of a sample.
        sizes: widths of layers and counts, by the names that `KINDS` lists.

    Raises:
        InputError: there is no such kind, or it has other sizes.
    """

    kind: str
    in_features: int
    sizes: Sizes

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"there is no architecture '{self.kind}'{did_you_mean(self.kind, KINDS)}; there "
                f"are {', '.join(KINDS)}"
            )
        if sorted(self.sizes) != sorted(KINDS[self.kind]):
            raise InputError(
                f"architecture {self.kind} has sizes {', '.join(KINDS[self.kind])}, not "
                f"{', '.join(self.sizes) or 'none'}"
            )

    def number(self, name: str) -> int:
        """A size that is one number."""
        found = self.sizes[name]
        if not isinstance(found, int):
            raise InputError(f"architecture {self.kind}: {name} is {found!r}, not one number")
        return found

    def widths(self, name: str) -> list[int]:
        """A size that is a list of widths."""
        found = self.sizes[name]
        if isinstance(found, int):
            raise InputError(f"architecture {self.kind}: {name} is {found!r}, not a list")
        return [*found]


def architecture_to_dict(architecture: Architecture) -> dict[str, Any]:
    """As JSON holds it."""
    sizes = {k: v if isinstance(v, int) else list(v) for k, v in architecture.sizes.items()}
    return {
        "kind": architecture.kind,
        "in_features": architecture.in_features,
        "sizes": sizes,
    }


def architecture_of(rows: BenchRows) -> Architecture | None:
    """Of the model of a rows file; None: the DLRM that its model file describes."""
    found = rows.model.get("architecture")
    return None if found is None else architecture_from_dict(found, "model: architecture")


def architecture_from_dict(data: Any, where: str) -> Architecture:
    """The inverse of `architecture_to_dict`.

    Args:
        where: file and key, for messages.

    Raises:
        InputError: it is no such object.
    """
    problem = _problem(data)
    if problem:
        raise InputError(f"{where}: {problem}")
    sizes = {k: v if isinstance(v, int) else tuple(v) for k, v in data["sizes"].items()}
    try:
        return Architecture(data["kind"], data["in_features"], sizes)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _problem(data: Any) -> str | None:
    kinds = {"kind": str, "in_features": int, "sizes": dict}
    if not isinstance(data, dict):
        return f"an architecture is an object, not {type(data).__name__}"
    wrong = [key for key, kind in kinds.items() if not isinstance(data.get(key), kind)]
    if wrong:
        return f"'{wrong[0]}' is missing or malformed"
    for name, size in data["sizes"].items():
        numbers = size if isinstance(size, list) else [size]
        if not numbers or not all(isinstance(n, int) and n > 0 for n in numbers):
            return f"size '{name}' is {size!r}; it must be a whole number above 0, or a list"
    return None
