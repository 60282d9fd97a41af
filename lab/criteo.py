"""The 26 tables of Criteo 1 TB as published models have them."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.model.distribution import Zipf
from predictor.model.workload import Feature, Table

CAPPED_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
MULTI_HOT = (*(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),)
"""facebookresearch/dlrm torchrec_dlrm: --num_embeddings_per_feature, --multi_hot_sizes."""
UNCAPPED_ROWS = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
"""mlcommons/training recommendation_v2/torchrec_dlrm/README.MD."""
RARE_AS_ONE_ROWS = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209),
    *(10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Rows with all ids of fewer than 15 occurrences merged into one (the head of the table)."""
ALPHA = 1.1
"""Assumed Zipf exponent; configs/models/dlrm_dcnv2_criteo1tb.yaml gives the reason."""


def criteo_tables(
    rows: Sequence[int],
    ids: Sequence[int],
    dim: int,
    optimizer: str,
    names: tuple[str, str] = ("t_cat", "cat"),
) -> tuple[Table, ...]:
    """Return tables with the given rows and ids per sample.

    A bag of h ids reads h shuffled copies of one law, so that its head is flatter.

    Args:
        names: of tables and features, before their number.
    """
    return tuple(
        Table(
            f"{names[0]}_{i}",
            size,
            dim,
            (Feature(f"{names[1]}_{i}", float(h), distribution=Zipf(ALPHA, (h - 1) / 2)),),
            optimizer=optimizer,
        )
        for i, (size, h) in enumerate(zip(rows, ids, strict=True))
    )
