"""The fields of `ParameterSharding` that a plan only carries: as JSON values, and back.

Enums are written by name, unset fields are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from predictor.errors import PlanError, did_you_mean
from predictor.model.plan import PARAMETER_FIELDS
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from fbgemm_gpu.tbe.monitoring import StdLogStatsReporterConfig, TBEStatsReporterConfig
    from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
    from torchrec.distributed.types import (
        BoundsCheckMode,
        CacheAlgorithm,
        CacheParams,
        KeyValueParams,
        KVZCHTBEConfig,
        MultiPassPrefetchConfig,
        ParameterSharding,
    )
    from torchrec.types import DataType

Member = TypeVar("Member", bound=Enum)
Reader = Callable[[Any, str], Any]

_KNOWN = ("sharding_type", "compute_kernel", "ranks", "sharding_spec", *PARAMETER_FIELDS)
_REPORTERS = {c.__name__: c for c in (TBEStatsReporterConfig, StdLogStatsReporterConfig)}


def write_fields(sharding: ParameterSharding, where: str) -> dict[str, Any]:
    """The set fields of `sharding` beyond type, kernel, ranks and shards, as JSON values.

    Raises:
        PlanError: a value that JSON cannot hold and nothing here knows, or a subclass.
    """
    if type(sharding) is not ParameterSharding:
        # what a subclass does, no field tells: dynamicemb's bring lookups of their own
        raise PlanError(
            f"{where} has a {type(sharding).__name__}, which a shardopt plan would turn into a "
            "plain ParameterSharding; take the table out of the plan and the module that are "
            "converted, and put its sharding back into TorchRec's plan: plan.plan[path][table]"
        )
    for field in fields(sharding):
        # a later TorchRec's field must not vanish unseen
        if field.name not in _KNOWN and getattr(sharding, field.name) != field.default:
            raise PlanError(
                f"{where}: ParameterSharding.{field.name} is set, which this version of shardopt "
                "does not know; leave it at its default, or use a newer shardopt"
            )
    values = {name: getattr(sharding, name) for name in PARAMETER_FIELDS}
    return {
        name: _write(value, f"{where}: {name}")
        for name, value in values.items()
        if value is not None
    }


def _write(value: Any, where: str) -> Any:
    if isinstance(value, Enum):  # first: some of TorchRec's enums are ints as well
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, EmbeddingOffloadStats):
        return {
            "cacheability": value.cacheability,
            "expected_lookups": value.expected_lookups,
            "mrc_hist_counts": value.hist.tolist(),
            "height": value.height,
        }
    if type(value) in _REPORTERS.values():
        return {"type": type(value).__name__, "interval": value.interval}
    return _write_container(value, where)


def _write_container(value: Any, where: str) -> Any:
    if isinstance(value, CacheParams | KeyValueParams):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, MultiPassPrefetchConfig | KVZCHTBEConfig):
        items = value._asdict()
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_write(item, where) for item in value]
    elif isinstance(value, set | frozenset):
        return [_write(item, where) for item in sorted(value)]
    else:
        raise PlanError(
            f"{where}: a {type(value).__name__} cannot be written to a plan file; "
            "leave it out of the plan and set it in the training script"
        )
    default = type(value)()  # None is left out, unless it is not the default
    return {
        k: _write(v, f"{where}.{k}")
        for k, v in items.items()
        if v is not None or getattr(default, k) is not None
    }


def read_fields(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments of `ParameterSharding` for what `write_fields` wrote.

    Raises:
        PlanError: an unknown key or a value of the wrong kind; names what is allowed.
    """
    readers: dict[str, Reader] = {
        "cache_params": _cache_params,
        "enforce_hbm": _flag,
        "stochastic_rounding": _flag,
        "bounds_check_mode": _member(BoundsCheckMode),
        "output_dtype": _member(DataType),
        "key_value_params": _key_value_params,
    }
    _only(parameters, readers, where)
    return {
        name: readers[name](value, f"{where}: {name}")
        for name, value in parameters.items()
        if value is not None
    }


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{where} is {value!r}; allowed are true, false and null")
    return value


def _member(kind: type[Member]) -> Reader:
    names = list(kind.__members__)

    def read(value: Any, where: str) -> Member:
        if value not in names:
            near = did_you_mean(str(value), names)
            raise PlanError(f"{where} is {value!r}{near}; allowed are {', '.join(names)}")
        return kind[value]

    return read


def _cache_params(value: Any, where: str) -> CacheParams:
    readers: dict[str, Reader] = {
        "algorithm": _member(CacheAlgorithm),
        "precision": _member(DataType),
        "stats": _offload_stats,
        "multipass_prefetch_config": _plain(
            MultiPassPrefetchConfig, MultiPassPrefetchConfig._fields
        ),
    }
    return _build(CacheParams, [f.name for f in fields(CacheParams)], readers, value, where)


def _key_value_params(value: Any, where: str) -> KeyValueParams:
    readers: dict[str, Reader] = {
        "stats_reporter_config": _reporter,
        "kvzch_tbe_config": _kvzch_config,
        "ps_hosts": lambda hosts, _: tuple((host, port) for host, port in hosts),
    }
    return _build(KeyValueParams, [f.name for f in fields(KeyValueParams)], readers, value, where)


def _kvzch_config(value: Any, where: str) -> KVZCHTBEConfig:
    readers: dict[str, Reader] = {
        "optimizer_state_dtypes_for_st": lambda pairs, _: frozenset((k, v) for k, v in pairs),
    }
    return _build(KVZCHTBEConfig, KVZCHTBEConfig._fields, readers, value, where)


def _reporter(value: Any, where: str) -> TBEStatsReporterConfig:
    given = dict(value) if isinstance(value, Mapping) else {}
    name = given.pop("type", None)
    if name not in _REPORTERS:
        raise PlanError(f"{where}: type is {name!r}; allowed are {', '.join(_REPORTERS)}")
    return _build(_REPORTERS[name], ("interval",), {}, given, where)


def _offload_stats(value: Any, where: str) -> EmbeddingOffloadStats:
    readers: dict[str, Reader] = {"mrc_hist_counts": lambda counts, _: torch.tensor(counts)}
    names = ("cacheability", "expected_lookups", "mrc_hist_counts", "height")
    return _build(EmbeddingOffloadStats, names, readers, value, where)


def _plain(kind: Callable[..., Any], names: Iterable[str]) -> Reader:
    return lambda value, where: _build(kind, names, {}, value, where)


def _build(
    kind: Callable[..., Any],
    names: Iterable[str],
    readers: Mapping[str, Reader],
    value: Any,
    where: str,
) -> Any:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} is {value!r}; it must be an object with {', '.join(names)}")
    _only(value, names, where)
    try:
        read = {
            key: readers[key](item, f"{where}.{key}")
            if key in readers and item is not None
            else item
            for key, item in value.items()
        }
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where} cannot be used: {error}") from None


def _only(given: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            near = did_you_mean(key, allowed)
            raise PlanError(f"{where}: unknown key '{key}'{near}; allowed are {', '.join(allowed)}")
