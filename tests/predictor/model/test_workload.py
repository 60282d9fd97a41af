"""The model as data: keys, sums and refusals."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from predictor.model.workload import WEIGHT_BITS
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


@pytest.mark.parametrize(
    ("data_type", "columns", "size"),
    [
        ("fp32", 64, 256),
        ("bf16", 64, 128),
        ("nfp8", 64, 64),
        ("int8", 64, 80),
        ("int8", 12, 16),
        ("int4", 64, 48),
        ("int4", 128, 80),
        ("int4", 0, 0),
    ],
)
def test_rows_of_integers_have_scale_and_bias_and_are_padded(
    data_type: str, columns: int, size: int
) -> None:
    table = a_table(rows=1000, dim=columns, data_type=data_type)
    assert table.row_bytes(columns) == size
    assert table.weight_bytes == 1000 * size


def test_wider_types_never_have_smaller_rows() -> None:
    by_bits = sorted(WEIGHT_BITS, key=WEIGHT_BITS.__getitem__)
    sizes = [a_table(data_type=kind).row_bytes(256) for kind in by_bits if kind != "nfp8"]
    assert sizes == sorted(sizes)
