"""Writing the best plan of a search as plan.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_to_dict
from predictor.predict import Prediction
from search.problem import Result
from shardopt.api.content import code_digest, digest, solver_versions
from shardopt.api.setting import Setting
from shardopt.files import atomic_write_text
from shardopt.version import __version__


def versions() -> dict[str, str]:
    """Versions that a plan depends on; TorchRec's is read without importing it."""
    found = {"shardopt": __version__}
    with suppress(metadata.PackageNotFoundError):
        found["torchrec"] = metadata.version("torchrec")
    return found


CUT = ("interrupted", "time")
"""Ends of a search that another run need not repeat; the plan file says so."""


def made_by(
    setting: Setting, settings: Mapping[str, Any], before: ShardingPlan | None = None
) -> dict[str, Any]:
    """All that makes a plan, for its file: whoever has the same makes the same bytes.

    Args:
        settings: `PlanRequest.settings` of what was asked for.
        before: the plan in use that the search starts from.

    Keys: ``settings``; ``inputs``: the SHA-256 of what was read, by what it is, so that files may
    lie anywhere; ``code``: of the three packages; ``versions``: of what the search runs on.
    """
    inputs = {
        "model": digest(setting.workload),
        "hardware": digest(setting.hardware),
        "ranks": digest(setting.topology, setting.installed),
    }
    if before is not None:
        inputs["plan in use"] = digest(before)
    return {
        "settings": dict(settings),
        "inputs": inputs,
        "code": code_digest(),
        "versions": solver_versions(),
    }


def plan_meta(setting: Setting, seed: int) -> dict[str, Any]:
    """The head of a plan file, before the times; `to_torchrec` places shards on its device."""
    device = setting.hardware.device
    return {**setting.facts(), "device": device, "seed": seed, "versions": versions()}


def write_best(output: Path, result: Result, best: Prediction, meta: Mapping[str, Any]) -> None:
    """Write the best plan of a search: `best_text`."""
    atomic_write_text(output, best_text(result, best, meta))


def best_text(result: Result, best: Prediction, meta: Mapping[str, Any]) -> str:
    """The plan file of the best plan of a search.

    Args:
        best: its prediction.
        meta: the head of the file: `plan_meta`, and what else should stand there.
    """
    times = {"iteration_ms": best.iteration_ms, "lower_bound_ms": result.lower_bound_ms}
    ended = {"stopped_by": result.stopped_by} if result.stopped_by in CUT else {}
    head = {key: value for key, value in meta.items() if not key.endswith("world_size")}
    return plan_text(plan_to_dict(replace(result.best.plan, meta={**head, **times, **ended})))


def plan_text(data: Mapping[str, Any]) -> str:
    """A line a table, so that plans can be read and compared by eye."""
    head = [f"  {_compact(key)}: {_compact(data[key])}" for key in data if key != "tables"]
    tables = [f"    {_compact(key)}: {_compact(value)}" for key, value in data["tables"].items()]
    lines = [*head, '  "tables": {\n' + ",\n".join(tables) + "\n  }"]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, allow_nan=False)
