"""Strides and places in storages of tensors at another batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardopt.replay.program.program import TensorSpec
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.scale.sizes import batch_unclear

Shape = tuple[int, ...]


def item_bytes(dtype: str) -> int:
    """Of an item of a tensor."""
    return int(getattr(torch, dtype).itemsize)


def restride(spec: TensorSpec, shape: Shape) -> TensorSpec:
    """A spec with another shape, its dimensions in the order in memory that they have.

    Raises:
        InputError: its items do not lie one after the other, and more than the outermost grows.
    """
    if shape == spec.shape:
        return spec
    strides = _strides(spec, shape)
    if strides is None:
        raise batch_unclear(
            f"a tensor of shape {list(spec.shape)} and strides {list(spec.strides)} has gaps"
        )
    return replace(spec, shape=shape, strides=strides)


def _strides(spec: TensorSpec, shape: Shape) -> Shape | None:
    if spec.strides == contiguous(spec.shape):
        return contiguous(shape)
    order = sorted(range(len(shape)), key=lambda i: (-spec.strides[i], -spec.shape[i], i))
    real = [i for i in order if spec.shape[i] != 1 and spec.strides[i] != 0]
    dense = tuple(spec.shape[i] for i in real)
    kept = [i for i in range(len(shape)) if i not in real]
    if tuple(spec.strides[i] for i in real) == contiguous(dense):
        made = dict(zip(real, contiguous(tuple(shape[i] for i in real)), strict=True))
        old = {spec.strides[i]: made[i] for i in reversed(real)}
        old |= {spec.strides[i] * spec.shape[i]: made[i] * shape[i] for i in real[:1]}
        for i in kept:
            made[i] = old.get(spec.strides[i], spec.strides[i])
        return tuple(made[i] for i in range(len(shape)))
    if all(shape[i] == spec.shape[i] for i in real[1:]):
        return spec.strides
    return None


def place_storages(
    made: Mapping[int, TensorSpec], shapes: Mapping[int, Shape]
) -> dict[int, TensorSpec]:
    """Specs of tensors made up front, with their places in the storages that they share.

    Raises:
        InputError: a storage holds both what grows and what does not.
    """
    members: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, spec in made.items():
        members[spec.storage, spec.dtype].append(number)
    found: dict[int, TensorSpec] = {}
    for numbers in members.values():
        found |= _place({n: made[n] for n in numbers}, shapes)
    return {number: found[number] for number in made}


def _place(specs: Mapping[int, TensorSpec], shapes: Mapping[int, Shape]) -> dict[int, TensorSpec]:
    made = {number: restride(spec, shapes[number]) for number, spec in specs.items()}
    if all(made[n] == spec for n, spec in specs.items()) or not any(
        spec.offset for spec in specs.values()
    ):
        return made
    ratios = {
        (made[n].extent - made[n].offset) / max(spec.extent - spec.offset, 1)
        for n, spec in specs.items()
    }
    ratio = ratios.pop()
    if ratios or ratio != int(ratio):
        raise batch_unclear("tensors that grow share their memory with others that do not")
    return {n: replace(spec, offset=spec.offset * int(ratio)) for n, spec in made.items()}
