"""Profile files that hold only some groups and take the others from a base profile."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from predictor.errors import ProfileError
from predictor.hardware.problems import ProfileDocument
from predictor.hardware.schema import GROUP_NAMES, HardwareProfile

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
