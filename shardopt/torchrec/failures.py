"""Warning and report where TorchRec's plan takes the place of ours."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

from predictor.errors import ShardoptError
from shardopt.api.cache import solver_versions, versions
from shardopt.extras import needs_torchrec
from shardopt.logs import logger
from shardopt.torchrec.tables import find_tables

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.types import PlannerError


def tell_fallback(error: Exception, module: nn.Module, ranks: TorchRecTopology) -> None:
    """Warn why a plan is TorchRec's, and what to report if the reason is a bug."""
    if isinstance(error, ShardoptError | PlannerError):
        logger.warning(
            "the plan is TorchRec's own (strict=True refuses it), because shardopt cannot plan: %s",
            error,
        )
        return
    by_name = {**versions(), "torch": torch.__version__, **solver_versions()}
    listed_versions = ", ".join(f"{name} {version}" for name, version in by_name.items())
    path = _write_report(f"versions: {listed_versions}", error, module, ranks)
    logger.warning(
        "the plan is TorchRec's own, because shardopt failed: %s: %s; please report this, with %s",
        type(error).__name__,
        error,
        f"the file {path}" if path else f"its traceback and the versions: {listed_versions}",
        exc_info=None if path else error,
    )


def _facts(module: nn.Module, ranks: TorchRecTopology) -> Iterable[str]:
    """The sizes of a problem, without names."""
    yield f"ranks: {ranks.world_size}, {ranks.local_world_size} a host, {ranks.compute_device}"
    yield f"memory: {ranks.devices[0].storage}"
    for table in find_tables(module):
        yield (
            f"table: {table.shape}, {table.data_type}, pooling {table.pooling}, "
            f"{len(table.features)} features"
        )


def _write_report(
    head: str, error: Exception, module: nn.Module, ranks: TorchRecTopology
) -> Path | None:
    """A new file with the facts and the traceback; None where none can be written."""
    try:
        text = "\n".join([head, *_facts(module, ranks), "", *traceback.format_exception(error)])
        with tempfile.NamedTemporaryFile(
            "w", prefix="shardopt-failure-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except Exception:  # the same failure may strike again
        return None
    return Path(file.name)
