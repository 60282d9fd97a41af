"""Names of annotations that may be written: those of PyTorch and TorchRec, and those asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable

OPTIMIZERS = (
    "ASGD|Adadelta|Adafactor|Adagrad|Adam|AdamW|Adamax|LBFGS|NAdam|RAdam|RMSprop|Rprop|SGD|"
    "SparseAdam|Muon"
)
AWAITED = (
    "KJTList|KJTListSplits|KJTAllToAllTensors|KJTAllToAllSplits|SplitsAllToAll|PooledEmbeddings|"
    "EmbeddingBagCollection|EmbeddingCollection|SequenceEmbeddings|SequenceEmbeddingsAllToAll"
)
WORD = (
    "zero_grad|copy_batch_to_gpu|wait_for_batch|forward|backward|optimizer|sparse_data_dist|"
    "wait_sparse_data_dist|init_data_dist|prefetch|load_batch|loss|"
    "all2all_data:(?:kjt splits|kjt lengths|kjt values|recat_values|recat_permute_gen)|"
    "alltoall_(?:fwd|bwd)_single|alltoall_seq_embedding_(?:fwd|bwd)_single|"
    "reduce_scatter(?:_base)?(?:_v)?_(?:fwd|bwd)|All2All_Seq_(?:fwd|bwd)_permute|"
    f"(?:NoWait|Request|(?:{AWAITED})Awaitable) wait\\(\\)"
)
KNOWN = re.compile(
    rf"(?:## (?:{WORD}) ##|ProfilerStep#\d+|DistributedDataParallel\.forward|"
    rf"Optimizer\.(?:step|zero_grad)#(?:{OPTIMIZERS})\.(?:step|zero_grad))$"
)


class Annotations:
    """Gives each annotation the name under which it is written.

    Args:
        kept: names that the user asks to keep.
    """

    def __init__(self, kept: Iterable[str] = ()) -> None:
        self.kept = frozenset(kept)
        self._numbered: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name in self.kept or KNOWN.match(name):
            return name
        return self._numbered.setdefault(name, f"annotation {len(self._numbered) + 1}")

    @property
    def replaced(self) -> int:
        """How many names were replaced."""
        return len(self._numbered)
