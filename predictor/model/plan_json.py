"""Reads and writes plan.json, schema `shardopt.plan/1`.

Reading checks the form of a plan: keys, types of values, ranks. `predictor.model.plan_check` checks
whether it fits a model.

What TorchRec would refuse of the fields of its `ParameterSharding`, which a plan file only carries,
is refused here, so that a plan that is predicted can also be run. Names
of enumerations are those of torchrec 1.8 (`DataType`, `BoundsCheckMode`, `CacheAlgorithm`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from os import PathLike
from typing import Any, TypeVar

from predictor.csv_rows import MOST_RANKS
from predictor.document import shown
from predictor.errors import PlanError, did_you_mean
from predictor.files import read_whole
from predictor.model.plan import (
    PARAMETER_FIELDS,
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
)

DATA_TYPES = (
    "FP32", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "INT4", "INT2", "NFP8",
)  # fmt: skip
BOUNDS_CHECKS = ("FATAL", "WARNING", "IGNORE", "NONE", "V2_IGNORE", "V2_WARNING", "V2_FATAL")
ALGORITHMS = ("LRU", "LFU")

FLAG, OBJECT = "true or false", "a JSON object"
Allowed = str | tuple[str, ...] | tuple[float, float, str]
"""`FLAG`, `OBJECT`, names, or a range and what it is called."""

_FIELDS: dict[str, Allowed] = {
    "cache_params": OBJECT,
    "enforce_hbm": FLAG,
    "stochastic_rounding": FLAG,
    "bounds_check_mode": BOUNDS_CHECKS,
    "output_dtype": DATA_TYPES,
    "key_value_params": OBJECT,
}
_CACHE: dict[str, Allowed] = {
    "algorithm": ALGORITHMS,
    "load_factor": (math.ulp(0.0), 1.0, "a share of the rows, above 0 and at most 1"),
    "reserved_memory": (0.0, 2.0**63, "GiB, at least 0"),
    "precision": DATA_TYPES,
    "prefetch_pipeline": FLAG,
    "stats": OBJECT,
    "multipass_prefetch_config": OBJECT,
}


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


def _check(value: object, allowed: Allowed, where: str) -> None:
    match allowed:
        case (float(low), float(high), str(said)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and low <= value <= high  # type: ignore[operator]
        case tuple(names):
            good = isinstance(value, str) and value in names
            said = f"one of {', '.join(map(str, names))}"
            said += did_you_mean(str(value)[:40], map(str, names))
        case said:
            good = isinstance(value, bool if said == FLAG else dict)
    if not good:
        raise PlanError(f"{where} is {shown(value)}; it must be {said} (or null)")


SCHEMA = "shardopt.plan/1"

MODEL_FILE = re.compile(r"^(tables|dense):", re.MULTILINE)
SWAPPED = "is a model file, not a plan; the model comes first, then the plans"

# The order that people read: what the plan is for, then what it promises.
_HEADER = (
    "schema",
    "model",
    "hardware",
    "world_size",
    "local_world_size",
    "batch_size",
    "seed",
    "iteration_ms",
    "lower_bound_ms",
    "versions",
)
_OWN = ("schema", "world_size", "local_world_size", "tables")
_REQUIRED = ("sharding_type", "compute_kernel", "shards")
_TABLE_KEYS = (*_REQUIRED, "module", *PARAMETER_FIELDS)
_SHARD_KEYS = ("rank", "offset", "size")

Name = TypeVar("Name", bound=StrEnum)


def plan_to_dict(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as plan.json holds it; `plan_from_dict` is the inverse."""
    known: dict[str, Any] = {
        **{key: value for key, value in plan.meta.items() if key not in _OWN},
        "schema": SCHEMA,
        "world_size": plan.world_size,
        "local_world_size": plan.local_world_size,
    }
    first = {key: known[key] for key in _HEADER if key in known}
    tables = {key: _table_to_dict(table) for key, table in plan.tables.items()}
    return {**first, **known, "tables": tables}


def _table_to_dict(table: TablePlan) -> dict[str, Any]:
    return {
        "sharding_type": table.sharding_type.value,
        "compute_kernel": table.compute_kernel.value,
        "module": table.module,
        "shards": [
            {"rank": s.rank, "offset": list(s.offset), "size": list(s.size)} for s in table.shards
        ],
        **{name: table.parameters.get(name) for name in PARAMETER_FIELDS},
    }


def load_plan(path: str | PathLike[str]) -> ShardingPlan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, is not JSON, or does not have the form of a plan.
    """
    try:
        text = read_whole(path).decode("utf-8")
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file; `shardopt plan` writes plan files") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{path}: cannot be read: {reason}") from None
    return plan_from_dict(_parse(text, str(path)), where=str(path))


def _parse(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json keeps the last of two equal keys, so a table planned twice would silently lose one
        result = dict(pairs)
        if len(result) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise PlanError(f"{where}: the key '{twice}' is there twice in one object; remove one")
        return result

    def finite(number: str) -> float:
        # other readers have neither NaN nor a number beyond the range of a double
        value = float(number)
        if not math.isfinite(value):
            raise PlanError(f"{where}: {number} is no finite number; write null if it is not known")
        return value

    def fits(number: str) -> int:
        value = int(number)
        if not -(2**63) <= value < 2**63:
            raise PlanError(f"{where}: {number[:20]}... does not fit into 64 bits")
        return value

    try:
        return json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=finite,
            parse_float=finite,
            parse_int=fits,
        )
    except json.JSONDecodeError as error:
        if MODEL_FILE.search(text):
            raise PlanError(f"{where}: {SWAPPED}") from None
        raise PlanError(
            f"{where}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: not usable as JSON: {error}") from None


def plan_from_dict(data: object, *, where: str) -> ShardingPlan:
    """The plan that `data`, a parsed plan.json, holds.

    Args:
        where: the file, for messages.

    Raises:
        PlanError: `data` does not have the form of a plan.
    """
    root = _object(data, where, "a plan")
    _check_schema(root, where)
    _require(root, ("world_size", "tables"), where)
    world_size = _integer(root["world_size"], f"{where}: world_size", at_least=1)
    if world_size > MOST_RANKS:
        raise PlanError(f"{where}: world_size is {world_size}; it must be at most {MOST_RANKS}")
    local = root.get("local_world_size")
    if local is None:
        local = min(8, world_size)
    local = _integer(local, f"{where}: local_world_size", at_least=1)
    if world_size % local:
        raise PlanError(
            f"{where}: world_size {world_size} does not fill hosts of local_world_size {local}; "
            "set local_world_size to the ranks per host, a divisor of world_size"
        )
    tables = {
        key: _table(value, f"{where}: table '{key}'", key, world_size)
        for key, value in _object(root["tables"], f"{where}: tables", "tables").items()
    }
    meta = {key: value for key, value in root.items() if key not in _OWN}
    return ShardingPlan(tables, world_size, local, meta)


def _check_schema(root: Mapping[str, Any], where: str) -> None:
    if "schema" not in root:
        raise PlanError(f'{where}: the key \'schema\' is missing; a plan has "schema": "{SCHEMA}"')
    if root["schema"] == 1:
        raise PlanError(f"{where}: {SWAPPED}")
    if root["schema"] != SCHEMA:
        raise PlanError(
            f"{where}: schema is {root['schema']!r}, but this version reads '{SCHEMA}'; "
            "write the plan again with `shardopt plan`"
        )


def _table(value: object, where: str, key: str, world_size: int) -> TablePlan:
    entry = _object(value, where, "a table's plan")
    _only(entry, _TABLE_KEYS, where)
    _require(entry, _REQUIRED, where)
    shards = entry["shards"]
    if not isinstance(shards, list) or not shards:
        raise PlanError(f"{where}: shards must be a list of at least one shard")
    return TablePlan(
        sharding_type=_name(ShardingType, entry["sharding_type"], f"{where}: sharding_type"),
        compute_kernel=_name(ComputeKernel, entry["compute_kernel"], f"{where}: compute_kernel"),
        shards=tuple(
            _shard(shard, f"{where}: shards[{i}]", world_size) for i, shard in enumerate(shards)
        ),
        module=_module(entry.get("module"), where, key),
        parameters=read_parameters(entry, where),
    )


def _module(value: object, where: str, key: str) -> str:
    if value is None:
        return key.rpartition("/")[0] or "ebc"
    if not isinstance(value, str):
        raise PlanError(f"{where}: module is {value!r}; it must be the embedding module's name")
    return value


def _shard(value: object, where: str, world_size: int) -> Shard:
    entry = _object(value, where, "a shard")
    _only(entry, _SHARD_KEYS, where)
    _require(entry, _SHARD_KEYS, where)
    rank = _integer(entry["rank"], f"{where}.rank", at_least=0)
    if rank >= world_size:
        raise PlanError(
            f"{where}.rank is {rank}; world_size is {world_size}, so ranks are "
            f"0..{world_size - 1}: correct the rank or world_size"
        )
    return Shard(
        rank,
        _pair(entry["offset"], f"{where}.offset"),
        _pair(entry["size"], f"{where}.size"),
    )


def _pair(value: object, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(f"{where} is {value!r}; it must be [rows, columns]")
    rows, columns = (_integer(v, f"{where}[{i}]", at_least=0) for i, v in enumerate(value))
    return rows, columns


def _integer(value: object, where: str, *, at_least: int) -> int:
    # bool is an int in Python, but not in a plan
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PlanError(f"{where} is {value!r}; it must be a whole number of at least {at_least}")
    return value


def _name(kind: type[Name], value: object, where: str) -> Name:
    allowed = [member.value for member in kind]
    if value not in allowed:
        near = did_you_mean(str(value), allowed)
        raise PlanError(f"{where} is {value!r}{near}; allowed are {', '.join(allowed)}")
    return kind(value)


def _object(value: object, where: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: {what} must be a JSON object, not {type(value).__name__}")
    return value


def _only(entry: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    allowed = list(allowed)
    for key in entry:
        if key not in allowed:
            near = did_you_mean(key, allowed)
            raise PlanError(f"{where}: unknown key '{key}'{near}; allowed are {', '.join(allowed)}")


def _require(entry: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key not in entry:
            near = did_you_mean(key, entry)
            raise PlanError(f"{where}: the key '{key}' is missing{near}; add it")
