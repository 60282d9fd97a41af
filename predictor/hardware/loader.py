"""Loads hardware profiles: shipped ones by name, those of a user by path.

A user's file may name a ``base`` and hold only some groups, see `predictor.hardware.overlay`. Every
error names the file, the line, the key, the value and what is allowed.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from predictor.errors import ProfileError, did_you_mean
from predictor.files import read_whole
from predictor.hardware.groups import (
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
from predictor.hardware.overlay import base_name, check_kernel_model, group_origins, merge_onto
from predictor.hardware.problems import (
    GROUP_NEEDED_FOR,
    ProfileDocument,
    complaints,
    read_document,
)
from predictor.hardware.schema import CollectiveGroups, Curve, HardwareProfile, Inter, LinkCurves

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
    "LinkCurves",
    "Memory",
    "Overheads",
    "Provenance",
    "ProvenanceKind",
    "list_hardware",
    "load_hardware",
    "load_runtime",
    "weakest",
]

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
