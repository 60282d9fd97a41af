"""Loading of hardware profiles: shipped ones by name, those of a user by path.

A user's file may name a ``base`` and hold only some groups, see `_merged`. Every error names the
file, the line, the key, the value and what is allowed.

Kernel models of single CPU ops are stored with a profile: fitted by ``python -m lab fit ops``
on replays of calibration models, and used to predict generated benchmarks.
`predictor.cost.ops.cpu_ops.OpModels` evaluates them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from predictor.document import SAFE_LOADER, KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError, ProfileError, did_you_mean
from predictor.files import read_whole
from predictor.hardware.schema import (
    GROUP_NAMES,
    HardwareProfile,
    StrictModel,
)

DEFAULT_HARDWARE = "h100-sxm"

_MAPPING = ("model_type", "model_attributes_type", "dict_type")
_LAWS = {"async": "fbgemm_cuda", "inline": "distinct_rows"}
"""Way a device runs -> kernel model (key ``law``) of its embedding group."""
_BASES = {"fbgemm_cuda": "h100-sxm", "distinct_rows": "cpu-gloo"}

Model = TypeVar("Model", bound=StrictModel)


@cache
def list_hardware() -> tuple[str, ...]:
    folder = resources.files("predictor.hardware") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_hardware(name_or_path: str) -> HardwareProfile:
    """Load a shipped profile by name, or a profile file by path."""
    return _load(name_or_path, Path(), ())


@cache
def _load_shipped(name: str) -> HardwareProfile:
    file = resources.files("predictor.hardware") / "profiles" / f"{name}.yaml"
    return parse_hardware(file.read_text(encoding="utf-8"), f"{name}.yaml")


@cache
def load_table(name: str) -> Any:
    """Read a YAML file beside this module."""
    file = resources.files("predictor.hardware") / f"{name}.yaml"
    return yaml.load(file.read_text(encoding="utf-8"), Loader=SAFE_LOADER)


def load_runtime(name: str) -> dict[str, Any]:
    """Read the constants of a framework's software."""
    constants: dict[str, Any] = load_table(f"runtimes/{name}")
    return constants


def context_bytes(hardware: HardwareProfile) -> int:
    """Return the bytes of a process on its device outside PyTorch's allocator; 0 on CPUs."""
    return int(load_runtime("cuda")["context_bytes"]) if hardware.device != "cpu" else 0


def parse_hardware(text: str, origin: str) -> HardwareProfile:
    """Parse the profile in a YAML text; ``origin`` names it in messages."""
    return _profile(text, origin, Path(), ())


def _load(name_or_path: str, folder: Path, chain: tuple[Path, ...]) -> HardwareProfile:
    """Load a profile; paths start at ``folder``, ``chain`` are the files that build on this one."""
    shipped = list_hardware()
    if name_or_path in shipped:
        return _load_shipped(name_or_path)
    path = folder / name_or_path
    try:
        real = path.resolve()
        if real in chain:
            files = " -> ".join(file.name for file in (*chain[chain.index(real) :], real))
            raise ProfileError(f"{path} builds on itself: {files}")
        text = read_whole(path).decode("utf-8")
    except (OSError, ValueError) as error:
        absent = isinstance(error, (FileNotFoundError, IsADirectoryError))
        named = path.suffix in {".yaml", ".yml"} or len(Path(name_or_path).parts) > 1
        if named or not absent:
            reason = getattr(error, "strerror", None) or error
            raise ProfileError(f"hardware profile {path}: cannot be read: {reason}") from error
        profile = _profile_of_chip(name_or_path)
        if profile is None:
            raise _unknown(name_or_path) from None
        return _load_shipped(profile)
    return _profile(text, str(path), path.parent, (*chain, real))


def _profile_of_chip(name: str) -> str | None:
    """Return the shipped profile of a chip by its bare name, such as ``h200`` or ``H100 PCIe``."""
    name = re.sub(r"[\s_]+", "-", name.strip().lower())
    chips = {words.lower().replace(" ", "-"): profile for words, profile in _chips()}
    return name if name in list_hardware() else chips.get(name)


def _chips() -> list[tuple[str, str]]:
    """Return the words of each device name, with the shipped profile."""
    chips: list[tuple[str, str]] = load_table("device_names")
    return chips


def _unknown(name: str) -> ProfileError:
    """Return the error for a name that is neither a shipped profile nor a chip."""
    shipped = list_hardware()
    rest, network = next(
        (
            (name.removesuffix(f"-{kind}"), kind)
            for kind in load_table("networks")
            if name.endswith(f"-{kind}")
        ),
        (name, None),
    )
    profile = network and _profile_of_chip(rest)
    if profile:
        return ProfileError(
            f"unknown hardware '{name}': a profile is of devices, the network between hosts is "
            f"given apart; take '{profile}', and 'network: {network}' in a cluster file",
            inputs=("hardware", "cluster"),
        )
    return ProfileError(
        f"unknown hardware '{name}'{did_you_mean(name, shipped)}; "
        f"known: {', '.join(shipped)}, or give the path of a profile file"
    )


def _read(text: str, origin: str) -> tuple[dict[str, Any], Problems]:
    problems = Problems(origin)
    try:
        data = parse_yaml(text, problems)
        problems.raise_if_any()
    except InputError as error:
        raise ProfileError(str(error)) from error
    if not isinstance(data, dict):
        raise ProfileError(f"{origin}: a hardware profile must be a mapping of keys")
    return data, problems


def _profile(text: str, origin: str, folder: Path, chain: tuple[Path, ...]) -> HardwareProfile:
    data, problems = _read(text, origin)

    def named(key: str) -> HardwareProfile | None:
        if key not in data:
            return None
        name, place = data.pop(key), problems.place((key,))
        if not isinstance(name, str) or not name.strip():
            raise ProfileError(
                f"{place}: {key} is {name!r}; give the name of a shipped profile, or the path of a "
                "profile file from this one"
            )
        try:
            return _load(name, folder, chain)
        except ProfileError as error:
            raise ProfileError(f"{place}: {key}: {error}") from error

    base, host = named("base"), named("host")
    if host is not None:
        data = _on_host(data, origin, host)
    merged = data if base is None else _merged(data, origin, base)
    profile = _validated(HardwareProfile, merged, problems, has_base=base is not None)
    _check_law(data, problems, profile)
    if base is None:
        return profile
    own_groups = {name: _has(data, name.split(".")) for name in GROUP_NAMES}
    origins = {n: origin if own_groups[n] else base.origins[n] for n in GROUP_NAMES}
    if host is not None:
        origins["overheads"] = host.origins["overheads"]
    return profile.with_origins(origins)


def _on_host(data: dict[str, Any], origin: str, host: HardwareProfile) -> dict[str, Any]:
    """Return the groups of the file with the costs of another profile's host."""
    if "overheads" in data:
        raise ProfileError(
            f"{origin}: host and overheads both say what the host costs; give one of them"
        )
    execution = data.get("execution")
    if execution not in (None, host.execution):
        raise ProfileError(
            f"{origin}: host: {host.name} is a host of {host.execution} ranks, but execution is "
            f"{execution}; name a profile of {execution} ranks, or a file of "
            "`calibrate --only host`"
        )
    group = host.overheads.model_dump(mode="json", exclude_none=True)
    return data | {"overheads": group}


def _merged(data: dict[str, Any], origin: str, base: HardwareProfile) -> dict[str, Any]:
    """Return the groups of the file, and those of the base that it leaves out.

    A group is replaced as a whole, never key by key: its constants were fitted together and share
    one provenance. Groups of the base stay unchanged, with their provenance. The base's errors of
    whole iterations, the verdict on its calibration and its learned factors do not hold for the
    mixture, so they are left out.
    """
    fields = type(base).model_fields
    inherited = {field.alias or name: getattr(base, name) for name, field in fields.items()}
    own = {"name": PurePath(origin).stem or base.name, "known_error": (), "verdict": None}
    if any(name.split(".")[0] in data for name in GROUP_NAMES):
        own["learned"] = None  # factors on the constants of the base
    merged = inherited | own | data
    links = data.get("collectives")
    if isinstance(links, dict):
        joined = {"intra": base.collectives.intra, "inter": base.collectives.inter}
        merged["collectives"] = joined | links
    return merged


def _has(data: Any, keys: list[str]) -> bool:
    if not keys:
        return True
    return isinstance(data, dict) and keys[0] in data and _has(data[keys[0]], keys[1:])


def _check_law(data: dict[str, Any], problems: Problems, profile: HardwareProfile) -> None:
    """Refuse the kernel model of another kind of device."""
    law, expected = profile.embedding.law, _LAWS[profile.execution]
    if law != expected:
        key, intended = ("embedding", law) if "embedding" in data else ("execution", expected)
        raise ProfileError(
            f"{problems.place((key,))}: embedding.law is {law}, but execution is "
            f"{profile.execution}, which takes {expected}: lookups on a CPU and on a GPU have "
            "different kernel models; choose a base of the same kind of device, such as "
            f"{_BASES[intended]}"
        )


def _validated(
    model: type[Model], data: dict[str, Any], problems: Problems, *, has_base: bool
) -> Model:
    """Validate plain data as a model, and report all of its problems."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for problem in errors:
        # pydantic adds the tag of a union and a mark for mapping keys, which the file lacks
        keys = tuple(key for key in problem["loc"] if key not in (*_BASES, "[key]"))
        problems.add(keys, _what_is_wrong(model, problem, keys, has_base=has_base))
    if any(problem["type"] == "missing" for problem in errors) and not has_base:
        problems.add((), f"a line 'base: {DEFAULT_HARDWARE}' fills in the groups left out")
    try:
        problems.raise_if_any()
    except InputError as error:
        raise ProfileError(str(error)) from None
    raise AssertionError


def _what_is_wrong(
    model: type[StrictModel], problem: ErrorDetails, keys: KeyPath, *, has_base: bool
) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return "missing; a group replaces that of the base as a whole" if has_base else "missing"
    if kind == "extra_forbidden":
        allowed = _siblings(model, keys[:-1])
        listed = f"; known: {', '.join(allowed)}" if allowed else ""
        return f"unknown key{did_you_mean(str(keys[-1]), allowed)}{listed}"
    if kind == "union_tag_not_found":
        return f"no law; it is one of {', '.join(_BASES)}"
    if kind in _MAPPING:
        problem_text = "empty" if value is None else f"got {shown(value)}"
        return f"{problem_text}; it must be a mapping of keys"
    message = problem["msg"].removeprefix("Value error, ")
    return f"got {shown(value)}: {message[:1].lower()}{message[1:]}"


def _siblings(model: type[StrictModel], path: KeyPath) -> tuple[str, ...]:
    """Return the keys allowed in the mapping at ``path``."""
    models: list[Any] = [model]
    for key in path:
        model_fields = [m.model_fields[key] for m in models if key in m.model_fields]
        models = [m for field in model_fields for m in _models_in(field.annotation)]
    names = [f.alias or name for m in models for name, f in m.model_fields.items()]
    return tuple(dict.fromkeys([*names, *(() if path else ("base",))]))


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models_in(part)]
