"""Loads hardware profiles: shipped ones by name, those of a user by path.

A user's file may name a ``base`` and hold only some groups, see `merge_onto`. Every error
names the file, the line, the key, the value and what is allowed.

Kernel models of single CPU ops are stored with a profile: fitted by ``python -m lab fit-op-models``
on replays of calibration models, and used to predict generated benchmarks.
`predictor.cost.ops.cpu_ops.OpModels` evaluates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError, ProfileError, did_you_mean
from predictor.files import read_whole
from predictor.hardware.schema import (
    GROUP_NAMES,
    Group,
    HardwareProfile,
    NonNegative,
    Positive,
)

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

KeyPath = list[int | str]


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


def _group_of(keys: KeyPath) -> str:
    """Name of the group that a key lies in, or nothing."""
    return next((n for n in GROUP_NAMES if keys[: n.count(".") + 1] == n.split(".")), "")


def _keys(problem: ErrorDetails) -> KeyPath:
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


def _siblings(path: KeyPath) -> tuple[str, ...]:
    """KeyPath allowed in the mapping at ``path``."""
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


DEFAULT_HARDWARE = "h100-sxm"


def list_hardware() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    folder = resources.files("predictor.hardware") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_hardware(name_or_path: str) -> HardwareProfile:
    """A shipped profile by name, or a file by path.

    Raises:
        ProfileError: there is no such profile, or the file is not a valid one.
    """
    return _load(name_or_path, Path(), ())


@lru_cache(maxsize=32)
def _load_shipped(name: str) -> HardwareProfile:
    file = resources.files("predictor.hardware") / "profiles" / f"{name}.yaml"
    return parse_hardware(file.read_text(encoding="utf-8"), f"{name}.yaml")


def load_runtime(name: str) -> dict[str, Any]:
    """The constants of a framework's software, as `predictor/hardware/runtimes` holds them."""
    file = resources.files("predictor.hardware") / "runtimes" / f"{name}.yaml"
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def context_bytes(hardware: HardwareProfile) -> int:
    """What a process takes of its device outside PyTorch's allocator; 0 on CPUs."""
    return int(load_runtime("cuda")["context_bytes"]) if hardware.device != "cpu" else 0


def parse_hardware(text: str, origin: str) -> HardwareProfile:
    """The profile in a YAML text; ``origin`` names it in messages."""
    return _profile(read_document(text, origin), Path(), ())


def _load(name_or_path: str, folder: Path, chain: tuple[Path, ...]) -> HardwareProfile:
    """A profile; paths start at ``folder``, ``chain`` are the files that build on this one."""
    shipped = list_hardware()
    if name_or_path in shipped:
        return _load_shipped(name_or_path)
    path = folder / name_or_path
    if not _is_there(path):
        if path.suffix in {".yaml", ".yml"} or len(Path(name_or_path).parts) > 1:
            raise ProfileError(f"hardware profile {path}: {_absent(path)}")
        raise ProfileError(
            f"unknown hardware '{name_or_path}'{did_you_mean(name_or_path, shipped)}; "
            f"known: {', '.join(shipped)}, or give the path of a profile file"
        )
    real = path.resolve()
    if real in chain:
        files = " -> ".join(file.name for file in (*chain[chain.index(real) :], real))
        raise ProfileError(f"{path} builds on itself: {files}")
    try:
        text = read_whole(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"hardware profile {path}: cannot be read: {error}") from error
    return _profile(read_document(text, str(path)), path.parent, (*chain, real))


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _absent(path: Path) -> str:
    try:
        return "is a directory; name the file in it" if path.is_dir() else "no such file"
    except (OSError, ValueError):
        return "no such file"


def _profile(document: ProfileDocument, folder: Path, chain: tuple[Path, ...]) -> HardwareProfile:
    name = base_name(document)
    base = None
    if name is not None:
        try:
            base = _load(name, folder, chain)
        except ProfileError as error:
            raise ProfileError(f"{document.place(['base'])}: base: {error}") from error
    data = document.data if base is None else merge_onto(document, base)
    try:
        profile = HardwareProfile.model_validate(data)
    except ValidationError as error:
        hint = f"{document.origin}: a line 'base: {DEFAULT_HARDWARE}' fills in what is missing"
        lines = complaints(document, error, hint if base is None else None)
        raise ProfileError("\n".join(lines)) from error
    check_kernel_model(document, profile)
    return profile if base is None else profile.with_origins(group_origins(document, base))


_KERNEL_MODEL = {"inline": "distinct_rows", "async": "fbgemm_cuda"}
"""How a device runs -> the kernel model (key ``law``) of its embedding group."""
_BASE = {"distinct_rows": "cpu-gloo", "fbgemm_cuda": "h100-sxm"}


def base_name(document: ProfileDocument) -> str | None:
    """The value of ``base:``, None where the file has no such key.

    Raises:
        ProfileError: it is not a name.
    """
    if "base" not in document.data:
        return None
    name = document.data["base"]
    if not isinstance(name, str) or not name.strip():
        raise ProfileError(
            f"{document.place(['base'])}: base is {name!r}; give the name of a shipped profile, "
            "or the path of a profile file from this one"
        )
    return name


def merge_onto(document: ProfileDocument, base: HardwareProfile) -> dict[str, Any]:
    """The groups of the file, and those of the base that it leaves out.

    A group is replaced as a whole, never key by key: its constants were fitted together and share
    one provenance. Groups of the base stay as they are, provenance included. The base's errors of
    whole iterations, and the verdict on its calibration, do not hold for the mixture, so they are
    left out.
    """
    fields = type(base).model_fields
    kept = {field.alias or name: getattr(base, name) for name, field in fields.items()}
    given = {key: value for key, value in document.data.items() if key != "base"}
    links = given.get("collectives")
    if isinstance(links, dict):
        joined = {"intra": base.collectives.intra, "inter": base.collectives.inter}
        given["collectives"] = joined | links
    own = {"name": PurePath(document.origin).stem or base.name, "known_error": (), "verdict": None}
    return kept | own | given


def group_origins(document: ProfileDocument, base: HardwareProfile) -> dict[str, str]:
    """Group -> the file or profile that gives it."""
    return {
        name: document.origin if _has(document.data, name) else base.origins[name]
        for name in GROUP_NAMES
    }


def _has(data: Any, group: str) -> bool:
    for key in group.split("."):
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True


def check_kernel_model(document: ProfileDocument, profile: HardwareProfile) -> None:
    """Refuse the kernel model of another kind of device.

    Raises:
        ProfileError: ``embedding.law`` does not suit the device's ``execution``.
    """
    given, wanted = profile.embedding.law, _KERNEL_MODEL[profile.execution]
    if given == wanted:
        return
    origin = {k: "" if k in document.data else " (of the base)" for k in ("embedding", "execution")}
    meant = given if "embedding" in document.data else wanted
    raise ProfileError(
        f"{document.place(['embedding' if meant == given else 'execution'])}: embedding.law is "
        f"{given}{origin['embedding']}, but execution is {profile.execution}{origin['execution']}, "
        f"which takes {wanted}: lookups on a CPU and on a GPU have different kernel models; choose "
        f"a base of the same kind of device, such as {_BASE[meant]}"
    )


Coefficients = dict[str, tuple[NonNegative, ...]]


class CpuOps(Group):
    """Kernel models of CPU ops.

    Args:
        near_cache_mib, far_cache_mib: sizes of the caches (`predictor.cost.ops.cpu_ops.Caches`).
        op_ms: what an iteration takes beyond its ops, per call.
        stretch: what an iteration takes for each ms that its ops take alone.
        one_rank: group of ops -> coefficients in ms, in the order of `work` in
            `predictor.cost.ops.cpu_ops`.
        several_ranks: the same, of groups that cost something else where several ranks share a
            memory.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    near_cache_mib: Positive
    far_cache_mib: Positive
    op_ms: NonNegative
    stretch: NonNegative
    one_rank: Coefficients
    several_ranks: Coefficients

    def coefficients(self, ranks: int) -> Coefficients:
        """Of all groups, on a number of ranks."""
        return self.one_rank if ranks == 1 else {**self.one_rank, **self.several_ranks}


def load_op_models(name: str) -> CpuOps:
    """The kernel models that the package holds for a profile.

    Args:
        name: of a shipped profile, such as ``cpu-gloo``.

    Raises:
        ProfileError: there are none of that name, or the file is broken.
    """
    file = resources.files("predictor.hardware") / "ops" / f"{name}.yaml"
    if not file.is_file():
        raise ProfileError(f"no kernel models of single ops come with the profile '{name}'")
    document = read_document(file.read_text(encoding="utf-8"), f"ops/{name}.yaml")
    try:
        return CpuOps.model_validate(document.data)
    except ValidationError as error:
        raise ProfileError("\n".join(complaints(document, error, None))) from error
