"""Windows of data, as `shardopt stats --window` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_window(
    path: Path, pooling: float, names: Sequence[str] = ("f",), rows: int = 100
) -> Path:
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        arrays |= {
            f"{name}.counts": np.array([10.0, rows - 10.0]),
            f"{name}.weights": np.array([9.0, 1.0]),
            f"{name}.range_rows": np.array([[10.0], [rows - 10.0]]),
            f"{name}.range_width": np.array(rows),
            f"{name}.rows": np.array(rows),
            f"{name}.pooling_factor": np.array(pooling),
        }
    np.savez(path, **arrays)
    return path
