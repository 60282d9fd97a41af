"""The log of what runs in a training script, and how to silence TorchRec's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("shardopt")


@contextmanager
def silence_torchrec() -> Iterator[None]:
    """Silence TorchRec, which warns about Topology's constructor and every data-parallel table."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
