"""JSON objects of commands as pydantic models: a field is a key; imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field

Object = dict[str, Any]
T = TypeVar("T")

if TYPE_CHECKING:
    Opaque = Annotated[T, "passed on without validation"]
else:

    class Opaque:
        """A type of this program, which pydantic does not look into."""

        def __class_getitem__(cls, kind: type) -> Any:
            return Any


def finite(value: Any) -> Any:
    """Plain data in which a number that is not finite, and so not known, is None."""
    if isinstance(value, BaseModel):
        return finite(value.model_dump(mode="json", by_alias=True, exclude_unset=True))
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def key(description: str, source: str | None = None, *path: str | int, **options: Any) -> Any:
    """A key of the output.

    Args:
        source, path: attribute of its value where that has another name, and the way on from it.
    """
    if source is not None:
        options["validation_alias"] = AliasPath(source, *path)
    return Field(description=description, **options)


def drawn(**options: Any) -> Any:
    """A field that drawings need beside the keys."""
    return Field(exclude=True, repr=False, **options)


class JsonObject(BaseModel):
    """JSON object with its fields as keys; one that has a default is left out unless it is set."""

    model_config = ConfigDict(
        frozen=True,
        from_attributes=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        defer_build=True,
    )

    def to_dict(self) -> Object:
        """Return what ``--json`` prints."""
        data: Object = finite(self)
        return data
