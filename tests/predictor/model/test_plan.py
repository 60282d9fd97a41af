"""Shardings as values."""

from __future__ import annotations

from dataclasses import replace

from tests.builders import a_table, table_wise


def test_a_plan_is_a_key_whatever_its_parameters() -> None:
    plan = table_wise(a_table())
    cached = replace(plan, parameters={"cache_params": {"load_factor": 0.5}})
    assert hash(plan) == hash(cached)
    assert plan != cached
    assert cached.cache_load_factor == 0.5
    for empty in ({}, {"cache_params": None}, {"cache_params": {"load_factor": None}}):
        assert replace(plan, parameters=empty).cache_load_factor is None
