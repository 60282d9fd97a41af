"""The rows file: every sample of a bench run, with all that is needed to predict it again.

History of the format, which `SCHEMA` names:
    shardopt.bench-rows/1: the first. A round, a session and a plan have a line each. Times are
        milliseconds; `ranks_ms[plan][rank]` are a round's iteration periods, `lead_ms[plan][rank]`
        is the iteration before them, which no median counts; `reference_ms[kernel][rank]` are the
        repeats of `shardopt.measure.reference` in the same round; `other_cores` is how many cores
        were busy with something else meanwhile (null where the system does not tell). Times have
        four decimals, and what a plan leaves open is left out; files from before have all digits.
    `model` may hold more: what the job says of a model that is no DLRM, such as
        `model.linears` lists (in, out) of its `nn.Linear` layers.
    `settings.runtime` is plain or tuned; files from before it are of the tuned runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from predictor.errors import InputError
from shardopt.files import atomic_write_text
from shardopt.measure.store import read_json
from shardopt.ranks.realtime import Runtime

SCHEMA = "shardopt.bench-rows/1"
_TIMES = ("lead_ms", "ranks_ms", "reference_ms")
_ROUNDED = (*_TIMES, "ms")
_HEAD = ("schema", "model", "settings")
_PARTS = {
    "plans": ("name", "plan"),
    "sessions": ("environment", "started", "load", "warmup"),
    "rounds": ("round", "session", "at", "load", "other_cores", "order", *_TIMES),
}
"""Lists of the file, and what each of their entries has."""
MOST = 1e12
"""Above any load, and any milliseconds: 30 years."""


@dataclass
class BenchRows:
    """Measurements of one bench run so far.

    Args:
        model: name, sha256, batch_size, train_pipeline, and the job's `facts`.
        settings: all else that times depend on, but plan and machine: backend, ranks, block, seed.
        plans: `name`, and `plan` as a plan file holds it.
        sessions: one for each process group: when, `environment`, `load` before, `warmup`.
        rounds: as the head of this file says; `session` counts from 0.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    plans: list[dict[str, Any]]
    sessions: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the plans, in the order given."""
        return [plan["name"] for plan in self.plans]

    def samples_ms(self, plan: str, rank: int = 0) -> list[list[float]]:
        """Iteration times of a plan as a rank saw them, round by round."""
        return [measured["ranks_ms"][plan][rank] for measured in self.rounds]


def write_rows(path: Path, rows: BenchRows) -> None:
    """Replace the file by one with all rows; it never holds half of them."""
    head = {"schema": SCHEMA, "model": rows.model, "settings": rows.settings}
    parts = [f" {json.dumps(key)}: {_line(value)}" for key, value in head.items()]
    for key in _PARTS:
        entries = ",\n".join(f"  {_line(entry)}" for entry in getattr(rows, key))
        parts.append(f" {json.dumps(key)}: [\n{entries}\n ]" if entries else f' "{key}": []')
    atomic_write_text(path, "{\n" + ",\n".join(parts) + "\n}\n", update=True)


def round_times(message: Mapping[str, Any]) -> dict[str, Any]:
    """Round the times in a message of rank 0 to a tenth of a microsecond, as the file has them."""
    return {key: _round(value) if key in _ROUNDED else value for key, value in message.items()}


def _round(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _round(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_round(inner) for inner in value]
    return round(value, 4)


def drop_nulls(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as a plan file holds it, less what its tables leave open: most of the text."""
    tables = {
        key: {name: value for name, value in table.items() if value is not None}
        for key, table in plan.get("tables", {}).items()
    }
    return {**plan, "tables": tables}


def _line(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def read_rows(path: Path) -> BenchRows:
    """Read and check a rows file.

    Raises:
        InputError: it is not JSON, of another schema, or a part is missing; names the line.
    """
    kinds = {**dict.fromkeys(_HEAD[1:], dict), **dict.fromkeys(_PARTS, list)}
    file = read_json(path, "rows file", SCHEMA, kinds, "restore the file, or measure into another")
    rows = BenchRows(**{key: file.data[key] for key in kinds})
    rows.settings.setdefault("runtime", Runtime.TUNED.value)
    for key in _PARTS:  # rounds are checked against the plans
        for index, entry in enumerate(getattr(rows, key)):
            if problem := _problem(key, entry, index, rows):
                file.refuse(problem, key, index)
    return rows


def _problem(key: str, entry: object, index: int, rows: BenchRows) -> str | None:
    if not isinstance(entry, dict):
        return f"one of the {key} is an object, not {type(entry).__name__}"
    lacks = [name for name in _PARTS[key] if name not in entry]
    if lacks:
        return f"'{lacks[0]}' is missing"
    if key == "plans":
        return _plan_problem(entry)
    return _session_problem(entry) if key == "sessions" else _round_problem(entry, rows, index)


def _plan_problem(entry: Mapping[str, Any]) -> str | None:
    if not isinstance(entry["name"], str) or not isinstance(entry["plan"], dict):
        return "the 'name' is a text, and the 'plan' an object"
    tables = entry["plan"].get("tables", {})
    whole = isinstance(tables, dict) and all(isinstance(table, dict) for table in tables.values())
    return None if whole else "the tables of the 'plan' are no objects"


def _session_problem(entry: Mapping[str, Any]) -> str | None:
    if not _is_number(entry["load"]):
        return f"load is {entry['load']!r}, no number"
    warmup = entry["warmup"]
    whole = isinstance(warmup, dict) and {"rounds", "settled"} <= warmup.keys()
    return None if whole else "warmup does not say its 'rounds' and whether they 'settled'"


def _round_problem(entry: Mapping[str, Any], rows: BenchRows, index: int) -> str | None:
    if entry["round"] != index:
        return f"round is {entry['round']!r}, but {index} is next"
    if not (isinstance(entry["session"], int) and 0 <= entry["session"] < len(rows.sessions)):
        return f"session is {entry['session']!r}, but there are {len(rows.sessions)}"
    ranks, block = rows.settings.get("world_size"), rows.settings.get("block")
    for name in rows.names:
        if _times_shape(_get(entry["ranks_ms"], name)) != (ranks, block):
            return f"ranks_ms of plan '{name}' are not {block} times above 0 for {ranks} ranks"
        if _times_shape(_get(entry["lead_ms"], name)) != (ranks,):
            return f"lead_ms of plan '{name}' are not {ranks} times above 0"
    if entry["other_cores"] is not None and not _is_number(entry["other_cores"]):
        return f"other_cores is {entry['other_cores']!r}; it is a number, or null"
    kernels = entry["reference_ms"]
    if not isinstance(kernels, dict) or [*kernels] != [*rows.rounds[0]["reference_ms"]]:
        return "reference_ms are not of the kernels of the first round"
    for kernel, blocks in kernels.items():
        count, *repeats = _times_shape(blocks) or (0,)
        if count != ranks or len(repeats) != 1 or not repeats[0]:
            return f"reference_ms of {kernel} are not as many times above 0 for {ranks} ranks"
    return None


def _is_number(value: object) -> bool:
    """Tell if a value is a number >= 0 of a size that a load, a count or milliseconds have."""
    return isinstance(value, float | int) and 0 <= value < MOST


def _get(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, Mapping) else None


def _times_shape(value: object) -> tuple[int, ...] | None:
    """Return the shape of nested lists of positive, finite numbers; None for anything else."""
    try:
        times = np.array(value)
    except ValueError:  # lists of several lengths
        return None
    valid = times.dtype.kind in "if" and bool(((times > 0) & (times < MOST)).all())
    return times.shape if valid else None


def check_continues(path: Path, old: BenchRows, new: BenchRows) -> None:
    """Refuse to extend rows by those of another bench or machine.

    Args:
        new: the rows asked for now, with the session about to start.

    Raises:
        InputError: says what differs.
    """
    environment = [s["environment"] for s in (*old.sessions[-1:], *new.sessions[-1:])]
    pairs: dict[str, tuple[object, object]] = {
        "the model": (old.model, new.model),
        "the settings": (old.settings, new.settings),
        "the plans": (_lean(old.plans), _lean(new.plans)),
        "the machine": (environment[0], environment[-1]),
    }
    for part, (was, now) in pairs.items():
        if was != now:
            raise InputError(
                f"{path}: holds rows of another bench: {part} {_differ(was, now)}; "
                "choose another file, or remove it"
            )


def _lean(plans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Older files hold nulls."""
    return [{**entry, "plan": drop_nulls(entry["plan"])} for entry in plans]


def _differ(was: object, now: object) -> str:
    """Say which key differs, where both are objects."""
    if isinstance(was, dict) and isinstance(now, dict):
        key = next(k for k in (*was, *now) if was.get(k) != now.get(k))
        return f"had {key} {was.get(key)!r}, now {now.get(key)!r}"
    if isinstance(was, list) and isinstance(now, list):
        names = [[entry["name"] for entry in entries] for entries in (was, now)]
        if names[0] != names[1]:
            return f"were {', '.join(names[0])}, now {', '.join(names[1])}"
    return "are not the same"
