"""A profile file as plain data, and what is wrong with it, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError, ProfileError, did_you_mean
from predictor.hardware.schema import GROUP_NAMES, HardwareProfile

MOST_PROBLEMS = 12
"""Problems listed for one file; further ones are only counted. Missing groups are all listed."""

GROUP_NEEDED_FOR = {
    "memory": "embedding lookups, copies and memory caps",
    "gemm": "the MLPs and the interaction",
    "embedding": "embedding forward, backward and UVM prefetch",
    "elementwise": "activations, loss, concatenations and the dense optimizer",
    "overheads": "the host's time per op, launch and collective",
    "collectives": "all-to-alls, all-reduces, reduce-scatters and all-gathers",
    "collectives.intra": "collectives inside a host or NVLink domain",
    "collectives.inter": "collectives between hosts",
}

_MAPPING = ("model_type", "model_attributes_type", "dict_type")
_TAGS = ("fbgemm_cuda", "distinct_rows")

Keys = list[int | str]


@dataclass(frozen=True)
class ProfileDocument:
    """A profile file: a mapping, and where its keys stand.

    Args:
        origin: the file as messages name it.
    """

    origin: str
    data: dict[str, Any]
    places: Problems

    def place(self, keys: Sequence[int | str]) -> str:
        """``file:line`` of the deepest part of ``keys`` that the file has."""
        return str(self.places.place(tuple(keys)))


def read_document(text: str, origin: str) -> ProfileDocument:
    """The mapping in a YAML text.

    Raises:
        ProfileError: the text is not YAML, or not a mapping.
    """
    problems = Problems(origin)
    try:
        data = parse_yaml(text, problems)
        problems.raise_if_any()
    except InputError as error:
        raise ProfileError(str(error)) from error
    if not isinstance(data, dict):
        raise ProfileError(f"{origin}: a hardware profile must be a mapping of keys")
    return ProfileDocument(origin, data, problems)


def complaints(
    document: ProfileDocument, error: ValidationError, suggestion: str | None
) -> list[str]:
    """A line of text for every problem.

    Args:
        suggestion: what to do about missing groups; None in a file with a base, where each
            incomplete group gets one line.
    """
    # a misspelt key also makes the right one missing: show the misspelt one first
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] == "missing")
    groups = [p for p in problems if p["type"] == "missing" and _dotted_key(p) in GROUP_NEEDED_FOR]
    others = [p for p in problems if p not in groups]
    lines: list[str] = []
    if suggestion is None:
        lacking = [p for p in others if p["type"] == "missing" and _group_of(_keys(p))]
        others = [p for p in others if p not in lacking]
        lines += _lacking(document, lacking)
    partial = suggestion is None
    lines = [_describe(document, problem, partial) for problem in others] + lines
    if len(lines) > MOST_PROBLEMS:
        lines[MOST_PROBLEMS:] = [f"... and {len(lines) - MOST_PROBLEMS} more"]
    lines += [_describe(document, problem, partial) for problem in groups]
    return [*lines, suggestion] if groups and suggestion else lines


def _lacking(document: ProfileDocument, problems: Sequence[ErrorDetails]) -> Iterator[str]:
    """A line for every group that is given in part."""
    lacks: dict[str, list[str]] = {}
    for problem in problems:
        keys = _keys(problem)
        group = _group_of(keys)
        rest = keys[len(group.split(".")) :]
        lacks.setdefault(group, []).append(".".join(map(str, rest)))
    for group, missing in lacks.items():
        yield (
            f"{document.place(group.split('.'))}: group {group} of {document.origin} lacks "
            f"{', '.join(missing)}; a group replaces that of the base as a whole, because its "
            "constants were fitted together: give all of its keys, or leave the group out"
        )


def _group_of(keys: Keys) -> str:
    """Name of the group that a key lies in, or nothing."""
    return next((n for n in GROUP_NAMES if keys[: n.count(".") + 1] == n.split(".")), "")


def _keys(problem: ErrorDetails) -> Keys:
    # pydantic adds the tag of a union and a mark for mapping keys, which are not in the file
    return [key for key in problem["loc"] if key not in (*_TAGS, "[key]")]


def _dotted_key(problem: ErrorDetails) -> str:
    return ".".join(map(str, _keys(problem)))


def _describe(document: ProfileDocument, problem: ErrorDetails, partial: bool) -> str:
    """One message: ``file:line: key: what was given, what is allowed``."""
    keys, key, kind = _keys(problem), _dotted_key(problem), problem["type"]
    place = document.place(keys)
    last = str(keys[-1]) if keys else ""
    need = f"; it is needed for {GROUP_NEEDED_FOR[key]}" if key in GROUP_NEEDED_FOR else ""
    if kind == "missing":
        return f"{place}: {key} is missing{need}"
    if kind == "extra_forbidden":
        siblings = _siblings(keys[:-1])
        hint = did_you_mean(last, siblings)
        known = f"; known: {', '.join(siblings)}" if siblings else ""
        return f"{place}: unknown key {key}{hint}{known}"
    if kind == "union_tag_not_found":
        return f"{place}: {key}.law is missing; it is one of {', '.join(_TAGS)}"
    if kind in _MAPPING and problem["input"] is None:
        advice = ", or leave it out" if partial else ""
        return f"{place}: {key} is empty{need}; give its keys{advice}"
    if kind in _MAPPING:
        return f"{place}: {key} is {shown(problem['input'])}: it must be a mapping of keys{need}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {key} is {shown(problem['input'])}: {message[:1].lower()}{message[1:]}"


def _siblings(path: Keys) -> tuple[str, ...]:
    """Keys allowed in the mapping at ``path``."""
    models: list[Any] = [HardwareProfile]
    for key in path:
        found = [model.model_fields[key] for model in models if key in model.model_fields]
        models = [model for field in found for model in _models_in(field.annotation)]
    names = [f.alias or name for model in models for name, f in model.model_fields.items()]
    return tuple(dict.fromkeys([*names, *(() if path else ("base",))]))


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models_in(part)]
