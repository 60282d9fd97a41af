"""HugeCTR's hybrid embedding of MLPerf rounds v2.x: which rows are frequent, and what is sent.

After NVIDIA-Merlin/HugeCTR, HugeCTR/src/embeddings/hybrid_embedding. Rows that occur more often in
a batch than a threshold are *frequent*: every rank has a copy of them. All others
are spread over the ranks one by one. `calibration_data.cu` sets the threshold:

* one host: a rank's share of the batch holds an infrequent row twice with chance ``p`` at most;
* several hosts: all-reducing the row's gradient costs as much as exchanging its occurrences.

With the Zipf distribution of this package it finds 31 thousand frequent rows that serve 87 % of the
lookups of eight A100 at a batch of 55296; the log of a submission says 33096 and 89.5 %
(mlcommons/training_results_v2.0, H3C/results/R5300G5x8A100-PCIE-80GB/dlrm).

Why: docs/decisions/0016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from predictor.model.workload import Workload


@dataclass(frozen=True)
class HybridRule:
    """Arguments of HugeCTR's ``HybridEmbeddingParam`` as a submission gave them.

    Args:
        duplicates: ``p_dup_max``, the chance of a repeated infrequent row, in (0, 1).
        bandwidth_ratio: bandwidth of the all-to-all over that of the all-reduce, times
            ``efficiency_bandwidth_ratio``.
    """

    duplicates: float
    bandwidth_ratio: float

    def threshold(self, batch: int, ranks: int, hosts: int) -> float:
        """Number of occurrences in a batch from which on a row is frequent.

        Args:
            batch: samples of all ranks.
        """
        if hosts > 1:
            return hosts * self.bandwidth_ratio * hosts / (hosts - 1)
        local = max(batch / ranks, 2.0)
        return float(batch * math.sqrt(2 * self.duplicates / (local * (local - 1))))


@dataclass(frozen=True)
class HybridSplit:
    """How the rule splits a workload.

    Args:
        infrequent: share of the lookups that rows of other ranks serve, in [0, 1].
        needed: frequent rows that a rank's samples hold, over its lookups, in [0, 1].
        elements: of all frequent rows.
    """

    infrequent: float
    needed: float
    elements: float

    @classmethod
    def of(cls, workload: Workload, rule: HybridRule, ranks: int, hosts: int) -> HybridSplit:
        """Expected values over a batch of ``ranks`` times the workload's."""
        batch = workload.batch_size * ranks
        threshold = rule.threshold(batch, ranks, hosts)
        lookups = served = needed = elements = 0.0
        for table in workload.tables:
            for feature in table.features:
                bins = feature.distribution.bins(table.num_embeddings)
                draws = batch * feature.lookups_per_sample
                often = float(bins.counts[draws * bins.probs >= threshold].sum())
                frequent = bins.slice(0.0, often)
                lookups += draws
                served += draws * frequent.mass
                needed += ranks * frequent.unique(draws / ranks)
                elements += often * table.embedding_dim
        return cls(1 - served / lookups, needed / lookups, elements)
