"""What to say when TorchRec is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from predictor.errors import ShardoptError

# 'cpu' needs two steps: torchrec's metadata asks for the CUDA wheel fbgemm-gpu, whose files would
# overwrite those of fbgemm-gpu-cpu.
COMMANDS = """\
  with GPUs:     pip install 'shardopt[cuda]'
  without GPUs:  pip install 'shardopt[cpu]' && pip install torchrec==1.8.0 --no-deps"""


class MissingTorchrecError(ShardoptError, ImportError):
    """TorchRec, or something it needs, cannot be imported; says how to install it."""


@contextmanager
def needs_torchrec() -> Iterator[None]:
    """Turn a failing import of torch, fbgemm_gpu or torchrec into the commands that mend it."""
    try:
        yield
    except ImportError as error:
        raise MissingTorchrecError(
            f"this needs TorchRec, which cannot be imported here ({error}). Install it:\n{COMMANDS}"
        ) from error
