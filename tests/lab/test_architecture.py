"""Kind and sizes of a model beside its tables: written, read and refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lab.architecture import Architecture, architecture_of
from predictor.errors import InputError

MADE = Architecture("mmoe", 13, {"experts": 3, "expert": (32, 16), "tasks": 2, "tower": (8,)})
DATA = {
    "kind": "mmoe",
    "in_features": 13,
    "sizes": {"experts": 3, "expert": [32, 16], "tasks": 2, "tower": [8]},
}


def rows(data: object) -> Any:
    return SimpleNamespace(model={"architecture": data})


def test_written_and_read_again() -> None:
    assert MADE.as_dict() == DATA
    assert architecture_of(rows(DATA)) == MADE
    assert architecture_of(rows(None)) is None


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (3, "int"),
        ({"kind": "mmoe"}, "sizes"),
        ({**DATA, "kind": "mmoes"}, "'mmoes'.*mmoe"),
        ({**DATA, "sizes": {"experts": 3}}, "tower"),
        ({**DATA, "sizes": {**DATA["sizes"], "tasks": 0}}, "'tasks' is 0"),
        ({**DATA, "sizes": {**DATA["sizes"], "tower": []}}, "'tower'"),
    ],
)
def test_what_is_refused(data: object, named: str) -> None:
    with pytest.raises(InputError, match=f"architecture: .*{named}"):
        architecture_of(rows(data))


def test_a_number_is_no_list() -> None:
    assert MADE.number("tasks") == 2
    assert MADE.widths("expert") == [32, 16]
    with pytest.raises(InputError, match="tower"):
        MADE.number("tower")
    with pytest.raises(InputError, match="tasks"):
        MADE.widths("tasks")
