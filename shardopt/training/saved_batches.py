"""Ids that torch.save wrote: KeyedJaggedTensors, or tuples as in facebookresearch/dlrm_datasets."""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError
from shardopt.extras import needs_torchrec
from shardopt.files import read_problem

ALLOWED = (
    "allowed: a KeyedJaggedTensor, a list of them, or a tuple (indices, offsets, lengths) with "
    "lengths [tables, samples]"
)


@dataclass(frozen=True, eq=False)
class SavedBatch:
    """One batch.

    Args:
        names: of the features.
        ids: of all features, one after the other, each sample by sample.
        lengths: ids of each sample, ``[features, samples]``.
    """

    names: Sequence[str]
    ids: NDArray
    lengths: NDArray[np.int64]


def load_batches(path: Path) -> list[SavedBatch]:
    """The batches of a file, gzipped or not.

    Nothing in the file is executed: only tensors and KeyedJaggedTensors are unpickled.

    Raises:
        InputError: it cannot be read or holds something else.
        MissingPackageError: torch or TorchRec is not installed.
    """
    with needs_torchrec():
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    try:
        with (
            gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream,
            torch.serialization.safe_globals([KeyedJaggedTensor]),
        ):
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise InputError(f"{path}: is truncated or damaged") from None
    except pickle.UnpicklingError:
        raise InputError(f"{path}: holds other things than tensors; {ALLOWED}") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(read_problem(path, "data file", error)) from None
    if isinstance(content, KeyedJaggedTensor):
        content = [content]
    if isinstance(content, list) and all(isinstance(item, KeyedJaggedTensor) for item in content):
        return [_of_kjt(item) for item in content]
    if isinstance(content, tuple) and len(content) == 3 and all(map(torch.is_tensor, content)):
        return [_of_tuple(path, *(tensor.numpy() for tensor in content))]
    raise InputError(f"{path}: holds a {type(content).__name__}; {ALLOWED}")


def _of_kjt(kjt: Any) -> SavedBatch:
    names = list(kjt.keys())
    lengths = kjt.lengths().numpy().astype(np.int64)
    return SavedBatch(names, kjt.values().numpy(), lengths.reshape(len(names), -1))


def _of_tuple(path: Path, indices: NDArray, offsets: NDArray, lengths: NDArray) -> SavedBatch:
    """Source: facebookresearch/dlrm_datasets, README: bag b of table t has the indices
    ``offsets[t B + b]`` to ``offsets[t B + b + 1]``."""
    if lengths.ndim != 2 or indices.ndim != 1 or int(lengths.sum()) != len(indices):
        raise InputError(
            f"{path}: indices {indices.shape}, offsets {offsets.shape} and lengths {lengths.shape} "
            f"(sum {int(lengths.sum())}) do not fit together; {ALLOWED}"
        )
    lengths = lengths.astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths.reshape(-1))))
    if not np.array_equal(offsets[: lengths.size], starts[: len(offsets[: lengths.size])]):
        raise InputError(f"{path}: the offsets are not the running sum of the lengths; {ALLOWED}")
    return SavedBatch([f"table_{i}" for i in range(len(lengths))], indices, lengths)
