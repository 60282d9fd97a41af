"""Fits the kernel models of CPU ops that `shardopt bench predict` uses, and writes them as YAML.

    python -m lab fit ops configs/bench/replay predictor/hardware/ops/cpu-gloo.yaml

The folder is what ``python -m lab compare`` writes. Models of the same profile are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.replay.calls import FIT, ModelCalls, fit_replays, read_replays
from lab.suites import Summary
from lab.validate.replay import predict_held_out
from predictor import units
from predictor.cost.ops.cpu_ops import OpModels
from predictor.hardware.loader import CpuOps

MACHINE = "Intel(R) Xeon(R) Processor, 2 cores, 24 GiB, Linux"
VERSIONS = "torch 2.13.0+cpu, fbgemm 1.8.0"
DATE = "2026-11-22"
"""Of the committed rows of ``configs/bench/replay``."""
HEADER = """\
# Kernel models of single ops on CPU ranks, one core each; see predictor/cost/ops/cpu_ops.py. In ms.
# Written by python -m lab fit ops; the rows are configs/bench/replay/calls.jsonl.
"""


def fitted_group(models: Sequence[ModelCalls], name: str) -> dict[str, Any]:
    """The content of the file."""
    one, several = (fit_replays(models, ranks) for ranks in (1, 2))
    held_out = predict_held_out(models)
    errors = Summary.of(held_out)
    fits = [model for model in models if model.part == FIT]
    rows = sum(len(rank.calls) for model in fits for rank in model.ranks)
    return {
        "schema": 1,
        "name": name,
        "provenance": {
            "kind": "measured",
            "source": f"python -m lab compare on {MACHINE}: replays of {len(fits)} calibration "
            "models",
            "versions": VERSIONS,
            "date": DATE,
            "n": rows,
            "error": {
                "suite": "replay",
                "rows": "iterations of calibration models, each predicted from the others",
                "n": errors.n,
                "mean": round(errors.mape, 4),
                "geomean": round(errors.geomean, 4),
            },
        },
        "rel_error": round(float(np.sqrt(np.mean([row.error**2 for row in held_out]))), 4),
        "near_cache_mib": one.caches.near_bytes / units.MIB,
        "far_cache_mib": one.caches.far_bytes / units.MIB,
        "op_ms": one.op_ms,
        "stretch": one.stretch,
        "one_rank": _coefficients(one, {}),
        "several_ranks": _coefficients(several, one.coefficients),
    }


def _coefficients(models: OpModels, known: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of the groups that are not known, or have other coefficients."""
    return {
        group: of.tolist()
        for group, of in sorted(models.coefficients.items())
        if group not in known or not np.array_equal(of, known[group])
    }


def yaml_of(group: Mapping[str, Any]) -> str:
    """The text of the file, which is read back and checked first."""
    text = HEADER + yaml.safe_dump(
        dict(group), sort_keys=False, default_flow_style=None, width=1000, allow_unicode=True
    )
    CpuOps.model_validate(yaml.safe_load(text))
    return text


def run(data: Path, output: Path) -> None:
    """Fit on the calls in a folder and write the file."""
    text = yaml_of(fitted_group(read_replays(data), output.stem))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
