"""Loading hardware profiles: shipped ones by name, a user's own by path.

Every complaint says the file, the line, the key, the value and what is allowed.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from predictor.errors import ProfileError, did_you_mean
from predictor.profile_groups import (
    PROVENANCE_ORDER,
    CpuEmbedding,
    CudaEmbedding,
    Elementwise,
    Gemm,
    Group,
    Memory,
    Overheads,
    Provenance,
    ProvenanceKind,
    weakest,
)
from predictor.profile_schema import CollectiveGroups, Curve, HardwareProfile, Inter, Link

__all__ = [
    "DEFAULT_HARDWARE",
    "GROUP_NEEDED_FOR",
    "PROVENANCE_ORDER",
    "CollectiveGroups",
    "CpuEmbedding",
    "CudaEmbedding",
    "Curve",
    "Elementwise",
    "Gemm",
    "Group",
    "HardwareProfile",
    "Inter",
    "Link",
    "Memory",
    "Overheads",
    "Provenance",
    "ProvenanceKind",
    "list_hardware",
    "load_hardware",
    "weakest",
]

DEFAULT_HARDWARE = "h100-sxm"
MOST_PROBLEMS = 12
"""Complaints about one file before the rest is only counted."""

GROUP_NEEDED_FOR = {
    "memory": "embedding lookups, copies and memory caps",
    "gemm": "the MLPs and the interaction",
    "embedding": "embedding forward, backward and UVM prefetch",
    "elementwise": "activations, loss, concatenations and the dense optimizer",
    "overheads": "the host's time per op, launch and collective",
    "collectives": "all-to-alls, all-reduces, reduce-scatters and all-gathers",
    "intra": "collectives inside a host or NVLink domain",
    "inter": "collectives between hosts",
}


def list_hardware() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    folder = resources.files("predictor") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_hardware(name_or_path: str) -> HardwareProfile:
    """A shipped profile by name, or a file by path.

    Raises:
        ProfileError: no such profile, or a file that is no profile; the text says where and why.
    """
    shipped = list_hardware()
    if name_or_path in shipped:
        return _load_shipped(name_or_path)
    path = Path(name_or_path)
    looks_like_path = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1
    if not path.is_file():
        if looks_like_path:
            raise ProfileError(f"hardware profile {name_or_path}: no such file")
        raise ProfileError(
            f"unknown hardware '{name_or_path}'{did_you_mean(name_or_path, shipped)}; "
            f"known: {', '.join(shipped)}, or give the path of a profile file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"hardware profile {name_or_path}: cannot be read: {error}") from error
    return parse_hardware(text, name_or_path)


@lru_cache(maxsize=32)
def _load_shipped(name: str) -> HardwareProfile:
    file = resources.files("predictor") / "profiles" / f"{name}.yaml"
    return parse_hardware(file.read_text(encoding="utf-8"), f"{name}.yaml")


def parse_hardware(text: str, origin: str) -> HardwareProfile:
    """The profile in a YAML text; ``origin`` names it in messages."""
    try:
        data = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ProfileError(
            f"{_yaml_place(origin, error)}: not YAML: {_yaml_what(error)}"
        ) from error
    if not isinstance(data, dict):
        raise ProfileError(f"{origin}: a hardware profile is a mapping of keys, this is not")
    try:
        return HardwareProfile.model_validate(data)
    except ValidationError as error:
        # a misspelt key also makes the right one missing: say first what the file does hold
        problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] == "missing")
        lines = [_describe(origin, root, problem) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            lines.append(f"... and {len(problems) - MOST_PROBLEMS} more")
        raise ProfileError("\n".join(lines)) from error


def _yaml_place(origin: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return origin if mark is None else f"{origin}:{mark.line + 1}"


def _yaml_what(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).strip()


def _describe(origin: str, root: yaml.Node | None, problem: ErrorDetails) -> str:
    """One complaint: ``file:line: key: what was given, what is allowed``."""
    # a tagged union puts its tag into the location, which no file shows
    keys = [key for key in problem["loc"] if key not in ("fbgemm_cuda", "distinct_rows")]
    key = ".".join(str(part) for part in keys)
    last = str(keys[-1]) if keys else ""
    place = f"{origin}:{_line_of(root, keys)}"
    if problem["type"] == "missing":
        need = GROUP_NEEDED_FOR.get(last)
        return f"{place}: {key} is missing" + (f"; it is needed for {need}" if need else "")
    if problem["type"] == "extra_forbidden":
        siblings = _siblings(keys[:-1])
        hint = did_you_mean(last, siblings)
        known = f"; known: {', '.join(siblings)}" if siblings else ""
        return f"{place}: unknown key {key}{hint}{known}"
    return f"{place}: {key} is {_shown(problem['input'])}: {_allowed(problem['msg'])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _allowed(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _siblings(path: list[int | str]) -> tuple[str, ...]:
    """Keys allowed in the mapping at ``path``."""
    models: list[Any] = [HardwareProfile]
    for key in path:
        found = [model.model_fields[key] for model in models if key in model.model_fields]
        models = [model for field in found for model in _models_in(field.annotation)]
    names = (f.alias or name for model in models for name, f in model.model_fields.items())
    return tuple(dict.fromkeys(names))


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models_in(part)]


def _line_of(node: yaml.Node | None, keys: list[int | str]) -> int:
    """Line of the deepest part of ``keys`` that the file has."""
    line = 1
    for key in keys:
        found = _child(node, key)
        if found is None:
            break
        line, node = found
    return line


def _child(node: yaml.Node | None, key: int | str) -> tuple[int, yaml.Node] | None:
    """Line and value of one key of a mapping, or one item of a list."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        item = node.value[key]
        return item.start_mark.line + 1, item
    return None
