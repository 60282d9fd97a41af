"""Fixed kernels timed between the plans: a change of their times is the machine's, not a plan's.

Their shapes are part of the format of rows: times are compared between files and with those of a
calibration, so a change of any constant here is a change of `REFERENCE_VERSION`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from predictor.model.distribution import Zipf
from shardopt.extras import needs_torchrec
from shardopt.measure.sampling import REFERENCE_VERSION
from shardopt.training.batch import popularity_ranks

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

TABLES, ROWS, DIM, BATCH, POOLING, ALPHA = 4, 100_000, 64, 1024, 10, 1.05
GEMM = 512
MESSAGE_BYTES = 4 << 20
REPEATS = 4
RING = 4


class Reference:
    """Lookup forward and backward, GEMM and all-to-all of fixed shapes on one rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        cpu = device.type == "cpu"
        location = EmbeddingLocation.HOST if cpu else EmbeddingLocation.DEVICE
        where = ComputeDevice.CPU if cpu else ComputeDevice.CUDA
        self.lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, DIM, location, where)] * TABLES,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            device=device,
        )
        self.lookup.init_embedding_weights_uniform(-0.01, 0.01)
        rng = np.random.default_rng([REFERENCE_VERSION, rank])
        self.ids = [self._indices(rng) for _ in range(RING)]
        count = TABLES * BATCH
        offsets = torch.arange(0, count * POOLING + 1, POOLING, dtype=torch.int64)
        self.offsets = offsets.to(device)
        self.gradient = torch.full((BATCH, TABLES * DIM), 1e-3, device=device)
        self.matrices = [torch.full((GEMM, GEMM), 0.5, device=device) for _ in range(2)]
        elements = MESSAGE_BYTES // 4
        ranks = dist.get_world_size()
        self.sent = torch.zeros(elements // ranks * ranks, device=device)
        self.received = torch.empty_like(self.sent)

    def _indices(self, rng: np.random.Generator) -> torch.Tensor:
        """Draw ids with scattered hot rows, by a multiplier that shares no factor with `ROWS`."""
        drawn = popularity_ranks(Zipf(ALPHA), ROWS, TABLES * BATCH * POOLING, rng)
        return torch.from_numpy(drawn * 48_271 % ROWS).to(self.device)

    def measure(self) -> dict[str, list[float]]:
        """Return the milliseconds of every repeat by kernel; collective over all ranks."""
        # the first repeat refills caches that the plans before have emptied
        every = [self._once(self.ids[repeat % RING]) for repeat in range(1 + REPEATS)][1:]
        return {kernel: [spent[kernel] for spent in every] for kernel in every[0]}

    def _once(self, ids: torch.Tensor) -> dict[str, float]:
        outputs: list[torch.Tensor] = []
        spent = {
            "lookup_forward": self._timed(lambda: outputs.append(self.lookup(ids, self.offsets))),
            "lookup_backward": self._timed(lambda: outputs[0].backward(self.gradient)),
            "gemm": self._timed(lambda: torch.mm(*self.matrices)),
        }
        dist.barrier()  # else the exchange's time would hold the wait for the slower rank
        exchange = self._timed(lambda: dist.all_to_all_single(self.received, self.sent))
        return {**spent, "all_to_all": exchange}

    def _timed(self, call: Callable[[], object]) -> float:
        self._settle()
        start = time.perf_counter()
        call()
        self._settle()
        return 1e3 * (time.perf_counter() - start)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
