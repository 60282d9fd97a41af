"""The fields of TorchRec's `ParameterSharding` that a plan file only carries: their kinds.

What TorchRec would refuse is refused here, so that a plan that is predicted can also be run. Names
of enumerations are those of torchrec 1.8 (`DataType`, `BoundsCheckMode`, `CacheAlgorithm`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from predictor.errors import PlanError, did_you_mean
from predictor.model.plan import PARAMETER_FIELDS

DATA_TYPES = (
    "FP32", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "INT4", "INT2", "NFP8",
)  # fmt: skip
BOUNDS_CHECKS = ("FATAL", "WARNING", "IGNORE", "NONE", "V2_IGNORE", "V2_WARNING", "V2_FATAL")
ALGORITHMS = ("LRU", "LFU")

Check = Callable[[Any], str | None]
"""What is allowed, if a value is not."""


def read_parameters(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that are set in a table's entry of a plan file.

    Raises:
        PlanError: a value is of the wrong kind or out of range; names the field.
    """
    given = {name: entry[name] for name in PARAMETER_FIELDS if entry.get(name) is not None}
    for name, value in given.items():
        _check(value, _FIELDS[name], f"{where}: {name}")
    for name, value in given.get("cache_params", {}).items():
        if name in _CACHE and value is not None:
            _check(value, _CACHE[name], f"{where}: cache_params.{name}")
    return given


def _check(value: object, check: Check, where: str) -> None:
    allowed = check(value)
    if allowed:
        raise PlanError(f"{where} is {_shown(value)}; it must be {allowed} (or null)")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _object(value: object) -> str | None:
    return None if isinstance(value, dict) else "a JSON object"


def _one_of(names: Iterable[str]) -> Check:
    known = list(names)

    def check(value: object) -> str | None:
        if isinstance(value, str) and value in known:
            return None
        return f"one of {', '.join(known)}{did_you_mean(str(value)[:40], known)}"

    return check


def _number(low: float, high: float, allowed: str) -> Check:
    def check(value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return allowed
        return None if low <= value <= high else allowed

    return check


_FIELDS: dict[str, Check] = {
    "cache_params": _object,
    "enforce_hbm": _flag,
    "stochastic_rounding": _flag,
    "bounds_check_mode": _one_of(BOUNDS_CHECKS),
    "output_dtype": _one_of(DATA_TYPES),
    "key_value_params": _object,
}
_CACHE: dict[str, Check] = {
    "algorithm": _one_of(ALGORITHMS),
    "load_factor": _number(math.ulp(0.0), 1, "a share of the rows, above 0 and at most 1"),
    "reserved_memory": _number(0, 2**63, "GiB, at least 0"),
    "precision": _one_of(DATA_TYPES),
    "prefetch_pipeline": _flag,
    "stats": _object,
    "multipass_prefetch_config": _object,
}
