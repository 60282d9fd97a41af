"""Bytes of quantised rows and types of inference sharding against FBGEMM and TorchRec."""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import rounded_row_size_in_bytes
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    DataType,
    data_type_to_sparse_type,
)

from predictor.model.plan import SERVED
from predictor.model.workload import INTEGERS, ROW_ALIGNMENT, WEIGHT_BITS, row_bytes


@pytest.mark.parametrize("data_type", INTEGERS)
def test_rows_have_the_bytes_that_fbgemm_gives_them(data_type: str) -> None:
    kind = data_type_to_sparse_type(DataType[data_type.upper()])
    for columns in range(4, 520, 4):
        fbgemm_bytes = rounded_row_size_in_bytes(columns, kind, ROW_ALIGNMENT)
        assert row_bytes(data_type, columns) == fbgemm_bytes


def test_weights_have_the_bits_that_torchrec_gives_them() -> None:
    assert {name: DATA_TYPE_NUM_BITS[DataType[name.upper()]] for name in WEIGHT_BITS} == WEIGHT_BITS


def test_types_are_those_of_the_sharder_of_quantised_modules() -> None:
    listed = QuantEmbeddingBagCollectionSharder().sharding_types("cuda")
    assert listed == [str(kind) for kind in SERVED]
