"""Reading and writing of plan.json, schema `shardopt.plan/1`.

Reading checks the form of a plan: keys, types of values, ranks. `predictor.model.plan_check` checks
whether it fits a model.

What TorchRec would refuse of the fields of its `ParameterSharding`, which a plan file only carries,
is refused here, so that a plan that is predicted can also be run. Names of enumerations are those
of torchrec 1.8 (`DataType`, `BoundsCheckMode`, `CacheAlgorithm`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from predictor.csv_rows import MOST_RANKS
from predictor.document import key_text, shown
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

SCHEMA = "shardopt.plan/1"
MODEL_FILE = re.compile(r"^(tables|dense):", re.MULTILINE)
PRINTED = re.compile(r"param +\| +sharding type|--- Planner Statistics ---")
"""In what TorchRec prints of a plan, and of planning."""
TO_READ = (
    "this is TorchRec's printed report of a plan, which cannot be read back; in the script, "
    "shardopt.save_plan(shardopt.from_torchrec(plan, module), 'plan.json') writes it as a file"
)
SWAPPED = "is a model file, not a plan; the model comes first, then the plans"
_OWN = ("schema", "world_size", "local_world_size", "tables")
# The order that people read: what the plan is for, then what it promises.
_HEADER = (
    *("schema", "model", "hardware", "world_size", "local_world_size", "batch_size", "seed"),
    *("iteration_ms", "lower_bound_ms", "versions"),
)

DataType = Literal[
    "FP32", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "INT4", "INT2", "NFP8"
]
BoundsCheck = Literal["FATAL", "WARNING", "IGNORE", "NONE", "V2_IGNORE", "V2_WARNING", "V2_FATAL"]
Whole = Annotated[StrictInt, Field(ge=0)]
Ranks = Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)]
Pair = Annotated[list[Whole], Field(min_length=2, max_length=2)]
Object = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Shard(_Strict):
    rank: Whole
    offset: Pair
    size: Pair


class _Cache(BaseModel):
    """TorchRec's `CacheParams`; what it does not know is carried through."""

    algorithm: Literal["LRU", "LFU"] | None = None
    load_factor: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    reserved_memory: Annotated[float, Field(strict=True, ge=0, le=2.0**63)] | None = None
    precision: DataType | None = None
    prefetch_pipeline: StrictBool | None = None
    stats: Object | None = None
    multipass_prefetch_config: Object | None = None


class _Stored(BaseModel):
    """TorchRec's `KeyValueParams`, as far as it is priced; the rest is carried through."""

    max_l1_cache_size: Whole | None = None
    l2_cache_size: Whole | None = None


class _Table(_Strict):
    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    shards: Annotated[list[_Shard], Field(min_length=1)]
    module: StrictStr | None = None
    cache_params: _Cache | None = None
    enforce_hbm: StrictBool | None = None
    stochastic_rounding: StrictBool | None = None
    bounds_check_mode: BoundsCheck | None = None
    output_dtype: DataType | None = None
    key_value_params: _Stored | None = None


class _Plan(BaseModel):
    world_size: Ranks
    local_world_size: Ranks | None = None
    tables: dict[str, _Table]


def plan_to_dict(plan: ShardingPlan) -> dict[str, Any]:
    """Return the plan as data of plan.json; `plan_from_dict` is the inverse."""
    fields: dict[str, Any] = {
        **{key: value for key, value in plan.meta.items() if key not in _OWN},
        "schema": SCHEMA,
        "world_size": plan.world_size,
        "local_world_size": plan.local_world_size,
    }
    first = {key: fields[key] for key in _HEADER if key in fields}
    tables = {key: _table_to_dict(table) for key, table in plan.tables.items()}
    return {**first, **fields, "tables": tables}


def plan_text(data: Mapping[str, Any]) -> str:
    """Return the text of a plan file, with a line for each table, easy to read and compare."""

    def compact(value: object) -> str:
        return json.dumps(value, allow_nan=False)

    lines = [f"  {compact(key)}: {compact(data[key])}" for key in data if key != "tables"]
    tables = [f"    {compact(key)}: {compact(value)}" for key, value in data["tables"].items()]
    lines.append('  "tables": {\n' + ",\n".join(tables) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
    """Read a plan file."""
    if PRINTED.search(str(path)):
        raise PlanError(f"in place of a plan file: {TO_READ}")
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
            raise PlanError(f"{where}: the key '{twice}' appears twice in one object; remove one")
        return result

    def finite(number: str) -> float:
        # other readers have neither NaN nor a number beyond the range of a double
        value = float(number)
        if not math.isfinite(value):
            raise PlanError(
                f"{where}: {number} is not a finite number; write null if it is not known"
            )
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
        if PRINTED.search(text):
            raise PlanError(f"{where}: {TO_READ}") from None
        if MODEL_FILE.search(text):
            raise PlanError(f"{where}: {SWAPPED}") from None
        raise PlanError(
            f"{where}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: not usable as JSON: {error}") from None


def plan_from_dict(data: object, *, where: str) -> ShardingPlan:
    """Return the plan in `data`, a parsed plan.json."""
    if not isinstance(data, dict):
        raise PlanError(f"{where}: a plan must be a JSON object, not {type(data).__name__}")
    if data.get("schema") == 1:
        raise PlanError(f"{where}: {SWAPPED}")
    if data.get("schema") != SCHEMA:
        problem = f"is {data['schema']!r}" if "schema" in data else "is missing"
        raise PlanError(
            f"{where}: schema {problem}, but this version reads '{SCHEMA}'; write the plan again "
            "with `shardopt plan`"
        )
    try:
        parsed = _Plan.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{where}: {_what_is_wrong(error.errors()[0])}") from None
    world_size, local = parsed.world_size, parsed.local_world_size or min(8, parsed.world_size)
    if world_size % local:
        raise PlanError(
            f"{where}: world_size {world_size} does not fill hosts of local_world_size {local}; "
            "set local_world_size to the ranks per host, a divisor of world_size"
        )
    tables = {key: _table(key, table, data["tables"][key]) for key, table in parsed.tables.items()}
    for key, table in tables.items():
        outside = [i for i, rank in enumerate(table.ranks) if rank >= world_size]
        if outside:
            raise PlanError(
                f"{where}: table '{key}': shards[{outside[0]}].rank is {table.ranks[outside[0]]}; "
                f"world_size is {world_size}, so ranks are 0..{world_size - 1}: correct the rank "
                "or world_size"
            )
    meta = {key: value for key, value in data.items() if key not in _OWN}
    return ShardingPlan(tables, world_size, local, meta)


def _table(key: str, table: _Table, entry: dict[str, Any]) -> TablePlan:
    shards = (Shard(s.rank, _pair(s.offset), _pair(s.size)) for s in table.shards)
    module = key.rpartition("/")[0] or "ebc" if table.module is None else table.module
    parameters = {name: entry[name] for name in PARAMETER_FIELDS if entry.get(name) is not None}
    return TablePlan(table.sharding_type, table.compute_kernel, tuple(shards), module, parameters)


def _pair(pair: list[int]) -> tuple[int, int]:
    rows, columns = pair
    return rows, columns


def _what_is_wrong(problem: ErrorDetails) -> str:
    """Describe the key, its value and the allowed values."""
    kind, value, keys = problem["type"], problem["input"], problem["loc"]
    of_table = keys[:1] == ("tables",) and len(keys) > 1
    table, keys = (f"table '{keys[1]}': ", keys[2:]) if of_table else ("", keys)
    text = key_text(keys)
    if kind == "missing":
        return f"{table}the key '{text}' is missing; add it"
    if kind == "extra_forbidden":
        allowed = (_Shard if "shards" in keys else _Table).model_fields
        near = did_you_mean(str(keys[-1]), allowed)
        return f"{table}unknown key '{text}'{near}; allowed are {', '.join(allowed)}"
    if kind in ("model_type", "dict_type"):
        return f"{table}{text} is {shown(value)}; it must be a JSON object"
    names = re.findall(r"'(\w+)'", problem.get("ctx", {}).get("expected", ""))
    near = did_you_mean(str(value)[:40], names)
    rule = re.sub(r"^(Input|List) | after validation, not \d+$", "", problem["msg"])
    return f"{table}{text} is {shown(value)}{near}; it {rule[:1].lower()}{rule[1:]}"
