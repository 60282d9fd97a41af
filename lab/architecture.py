"""What a real model is beside its tables, in a few numbers: kind and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.errors import InputError, did_you_mean
from shardopt.bench.rows import BenchRows

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
    sizes: Mapping[str, int | tuple[int, ...]]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"there is no architecture '{self.kind}'{did_you_mean(self.kind, KINDS)}; there "
                f"are {', '.join(KINDS)}"
            )
        names = KINDS[self.kind]
        if sorted(self.sizes) != sorted(names):
            raise InputError(
                f"architecture {self.kind} has sizes {', '.join(names)}, not "
                f"{', '.join(self.sizes) or 'none'}"
            )
        for name, size in self.sizes.items():
            numbers = size if isinstance(size, tuple) else (size,)
            if not numbers or not all(isinstance(n, int) and n > 0 for n in numbers):
                raise InputError(f"size '{name}' is {size!r}; it is one number above 0, or several")

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

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        sizes = {k: v if isinstance(v, int) else list(v) for k, v in self.sizes.items()}
        return {"kind": self.kind, "in_features": self.in_features, "sizes": sizes}


def architecture_of(rows: BenchRows) -> Architecture | None:
    """Of the model of a rows file; None: the DLRM that its model file describes.

    Raises:
        InputError: what the file has is no architecture.
    """
    data = rows.model.get("architecture")
    if data is None:
        return None
    try:
        sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in data["sizes"].items()}
        return Architecture(data["kind"], data["in_features"], sizes)
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"model: architecture: {type(error).__name__}: {error}") from None
