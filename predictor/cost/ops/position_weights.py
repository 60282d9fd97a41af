"""Feature processors: weights that a model learns by the position of an id in its bag.

`ShardedFeatureProcessedEmbeddingBagCollection` (torchrec/distributed/fp_embeddingbag.py) with a
`PositionWeightedModuleCollection` (modules/feature_processor_.py) adds ops to a weighted lookup:

- before ids are sent, where rows of a table of the module are split: a position would be lost then;
- on the ranks that look up, and in the backward behind that of the lookup;
- on the outputs, to which the sum of all parameters times zero is added, so that every rank has a
  gradient of each parameter.

Bytes are those of each op's operands: ids and positions of 8 bytes, weights of 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.elementwise import memory_ms
from predictor.hardware.schema import HardwareProfile
from predictor.units import us

Array = NDArray[np.float64]

PREPARE_BYTES = 4 + 8 + (8 + 4) + (4 + 4)
"""Bytes per id where positions travel: zeros, range, cast, copy."""
PREPARE_OPS = 6
"""Ops of `PREPARE_BYTES`, and the bags' offsets in 8 bytes."""
READ_BACK_BYTES = (4 + 4) + (4 + 8)
"""Bytes per id of positions that travelled: a copy of the weights, and a cast."""
RANGE_BYTES = 8
"""Bytes per id of positions that did not travel."""
WEIGH_BYTES = (8 + 4) + (4 + 4)
"""Bytes per id: a gather, whose table stays in caches, and the concatenation."""
RETURN_BYTES = (4 + 4) + (8 + 4) + 2 * 4
"""Bytes per id backward: scaling, positions and gradients, and twice the sums they are added to."""
OPS = {False: (3, 1), True: (1, 3)}
"""Ops of an exchange on a rank, and of each of its features there, by ``backward``. Forward: a cast
of offsets, the range and the concatenation, or a copy and a cast of positions and the
concatenation."""
SPREAD_OPS = {False: 4, True: 3}
"""Concatenation, sum and product of all parameters and its addition to the outputs; backward, two
sums and a product."""
SPREAD_BYTES = {False: 8, True: 4}
"""Per element of the outputs."""


def ids_ms(hw: HardwareProfile, ids: Array, *, backward: bool) -> Array:
    """Price the passes over the ids that a rank looks up in ms, in their shape."""
    per_id = RETURN_BYTES if backward else RANGE_BYTES + WEIGH_BYTES
    gathers = us(1e-3 * hw.elementwise.gather_ns_per_element) * (1 + backward)
    return ids * (per_id / hw.streaming + gathers)


def spread_ms(hw: HardwareProfile, outputs: float, *, backward: bool) -> float:
    """Price adding the parameters' sum to ``outputs`` elements, or its backward, in ms."""
    small = (SPREAD_OPS[backward] - 1) * us(hw.elementwise.floor_us)
    return small + float(memory_ms(hw, SPREAD_BYTES[backward] * outputs))
