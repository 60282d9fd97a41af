"""Kind and sizes of a real model's dense part."""

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
"""Kind -> names of its sizes; `lab.rankers` explains them."""


@dataclass(frozen=True)
class Architecture:
    """Dense part of a model that `lab.rankers` builds.

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
        """Return a size that is one number."""
        size = self.sizes[name]
        if not isinstance(size, int):
            raise InputError(f"architecture {self.kind}: {name} is {size!r}, not one number")
        return size

    def widths(self, name: str) -> list[int]:
        """Return a size that is a list of widths."""
        size = self.sizes[name]
        if isinstance(size, int):
            raise InputError(f"architecture {self.kind}: {name} is {size!r}, not a list")
        return [*size]

    def as_dict(self) -> dict[str, Any]:
        """Return the architecture as plain data for JSON."""
        sizes = {k: v if isinstance(v, int) else list(v) for k, v in self.sizes.items()}
        return {"kind": self.kind, "in_features": self.in_features, "sizes": sizes}


def architecture_of(rows: BenchRows) -> Architecture | None:
    """Return the architecture of a rows file; None for the DLRM of its model file.

    Raises:
        InputError: the file's entry is no architecture.
    """
    data = rows.model.get("architecture")
    if data is None:
        return None
    try:
        sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in data["sizes"].items()}
        return Architecture(data["kind"], data["in_features"], sizes)
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"model: architecture: {type(error).__name__}: {error}") from None
