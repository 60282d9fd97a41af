"""The model as data: keys, sums and refusals."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from tests.builders import a_table, a_workload


def test_keys_name_the_module_where_names_collide() -> None:
    workload = a_workload(a_table("a"), a_table("b"), a_table("a", module="other"))
    assert workload.keys == ("ebc/a", "b", "other/a")
    assert workload.modules == ("ebc", "other")


def test_refusals_say_what_was_given() -> None:
    with pytest.raises(InputError, match="batch_size is 0"):
        a_workload(batch_size=0)
    with pytest.raises(InputError, match="table 't' appears twice in module 'ebc'"):
        a_workload(a_table(), a_table())
