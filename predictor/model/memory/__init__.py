"""Memory per rank: what shards need (`shards`, `ranks`), and what a rank has at once (`peak`).

`iteration` says in what order blocks are taken and given, `exchange` how large those of embedding
modules are, `blocks` and `allocator` what they add up to. May import what `model` may.
"""

from predictor.model.memory.ranks import RankMemory, fits, missing, plan_memory
from predictor.model.memory.shards import (
    DEFAULT_CACHE_LOAD_FACTOR,
    UVM_KERNELS,
    MemoryRules,
    ShardMemory,
    shard_memory,
)
from predictor.model.reservation import (
    INDEX_BYTES,
    dense_parameters,
    reserve_topology,
    reserved_bytes,
)

__all__ = [
    "DEFAULT_CACHE_LOAD_FACTOR",
    "INDEX_BYTES",
    "UVM_KERNELS",
    "MemoryRules",
    "RankMemory",
    "ShardMemory",
    "dense_parameters",
    "fits",
    "missing",
    "plan_memory",
    "reserve_topology",
    "reserved_bytes",
    "shard_memory",
]
