"""Requirements of ops on their whole numbers."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from shardopt.replay.program.values import roles_of
from tests.shardopt.replay.captured import capture, program


def test_pooled_vectors_are_reordered_whole() -> None:
    arguments = {
        "pooled_embs": (32, 20),
        "offset_dim_list": (4,),
        "permute_list": (3,),
        "inv_offset_dim_list": (4,),
        "inv_permute_list": (3,),
    }
    for name in ("", "_split", "_auto_grad", "_auto_grad_split"):
        roles = roles_of(f"fbgemm::permute_pooled_embs{name}", arguments)
        assert roles["offset_dim_list"] == roles["inv_offset_dim_list"]
        assert roles["offset_dim_list"] == {"kind": "list", "values": [0, 6, 13, 20]}
        assert roles["permute_list"] == roles["inv_permute_list"] == {"kind": "permutation"}


def test_lookups_without_a_summary_have_tables_alike() -> None:
    arguments = {
        "D_offsets": (4,),
        "hash_size_cumsum": (4,),
        "weights_offsets": (3,),
        "momentum1_offsets": (3,),
        "total_D": 32,
        "dev_weights": (320,),
        "momentum1_dev": (30,),
        "indices": (50,),
        "offsets": (7,),
    }
    roles = roles_of("fbgemm::split_embedding_codegen_lookup_sgd_function", arguments)
    assert roles["D_offsets"]["values"] == [0, 12, 24, 32]
    assert roles["hash_size_cumsum"]["values"] == [0, 10, 20, 30]
    assert roles["weights_offsets"]["values"] == [0, 120, 240]
    assert roles["momentum1_offsets"]["values"] == [0, 10, 20]
    assert roles["indices"] == {"kind": "table_ids", "rows": [10, 10, 10]}
    assert roles["offsets"] == {"kind": "offsets", "total": 50}
    arguments["momentum1_dev"] = (320,)
    roles = roles_of("fbgemm::split_embedding_codegen_lookup_adam_function", arguments)
    assert roles["momentum1_offsets"] == roles["weights_offsets"]


def test_lengths_that_are_made_into_offsets_add_up_to_the_ids(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    weight, ids = torch.randn(10, 4), torch.arange(6)
    lengths = torch.tensor([3, 1, 2])

    def step() -> None:
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        nn.functional.embedding_bag(ids, weight, offsets, mode="sum", include_last_offset=True)

    recorded = program(capture(step, tmp_path))
    assert {"kind": "lengths", "total": 6} in recorded.fills.values()
