"""Kernel models of CPU ops that are stored beside a profile."""

from __future__ import annotations

import pytest

from predictor.cost.ops.cpu_ops import Caches, OpModels
from predictor.errors import ProfileError
from predictor.hardware.loader import load_op_models


def test_stored_models_say_where_they_come_from_and_how_far_they_were_off() -> None:
    provenance = load_op_models("cpu-gloo").provenance
    assert provenance.kind == "measured"
    assert provenance.error is not None
    assert 0.01 < provenance.error.mean < 0.1


def test_models_of_several_ranks_replace_those_of_one() -> None:
    group = load_op_models("cpu-gloo")
    alone, together = group.coefficients(1), group.coefficients(2)
    assert alone.keys() <= together.keys()
    assert alone["gemm"] != together["gemm"] == group.several_ranks["gemm"]
    assert OpModels.of_group(group, 2).caches == Caches(2.0**20, 24 * 2.0**20)


def test_profiles_without_stored_models_are_refused() -> None:
    with pytest.raises(ProfileError, match="'h100-sxm'"):
        load_op_models("h100-sxm")
