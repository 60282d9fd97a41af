"""Kind and sizes of a model beside its tables: written, read and refused."""

from __future__ import annotations

import pytest

from lab.architecture import Architecture, architecture_from_dict, architecture_to_dict
from predictor.errors import InputError

MADE = Architecture("mmoe", 13, {"experts": 3, "expert": (32, 16), "tasks": 2, "tower": (8,)})
DATA = {
    "kind": "mmoe",
    "in_features": 13,
    "sizes": {"experts": 3, "expert": [32, 16], "tasks": 2, "tower": [8]},
}


def test_written_and_read_again() -> None:
    assert architecture_to_dict(MADE) == DATA
    assert architecture_from_dict(DATA, "here") == MADE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "an architecture is an object, not int"),
        ({**DATA, "in_features": "13"}, "'in_features' is missing or malformed"),
        ({**DATA, "kind": "mmoes"}, "there is no architecture 'mmoes'.*mmoe"),
        ({**DATA, "sizes": {"experts": 3}}, "has sizes experts, expert, tasks, tower, not experts"),
        ({**DATA, "sizes": {**DATA["sizes"], "tasks": 0}}, "size 'tasks' is 0"),
        ({**DATA, "sizes": {**DATA["sizes"], "tower": []}}, r"size 'tower' is \[\]"),
    ],
)
def test_what_is_refused(data: object, words: str) -> None:
    with pytest.raises(InputError, match=f"here: .*{words}"):
        architecture_from_dict(data, "here")


def test_a_number_is_no_list() -> None:
    assert MADE.number("tasks") == 2
    assert MADE.widths("expert") == [32, 16]
    with pytest.raises(InputError, match="tower is"):
        MADE.number("tower")
    with pytest.raises(InputError, match="tasks is 2, not a list"):
        MADE.widths("tasks")
