"""A copy of the user's module with fake parameters, and stand-ins for what is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from predictor.errors import InputError
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn

DEEPEST = 8


def fake_copy(module: nn.Module, stubs: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module in training; to be called under a fake mode.

    Every tensor becomes a fake one on the CPU, each once, so that tied weights stay tied.

    Args:
        stubs: what takes the place of which child.

    Raises:
        InputError: a parameter has no shape yet, or the module cannot be copied.
    """
    memo: dict[int, Any] = {id(child): stub for child, stub in stubs.items()}
    for name, tensor in _tensors(module, stubs):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise InputError(
                f"parameter '{name}' has no shape before the first batch; run the module once on a "
                "real batch, then again"
            )
        memo.setdefault(id(tensor), _fake(tensor))
    try:
        found: nn.Module = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied, so it cannot be run on fake tensors: "
            f"{error}"
        ) from error
    return found.train()


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _tensors(
    module: nn.Module, stubs: Mapping[nn.Module, nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a module holds, but for those of what is replaced."""
    seen: set[int] = set()

    def walk(path: str, child: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if child in stubs or id(child) in seen:
            return
        seen.add(id(child))
        for name, value in vars(child).items():
            if name != "_modules":
                yield from _inside(f"{path}{name}", value, 0)
        for name, inner in child.named_children():
            yield from walk(f"{path}{name}.", inner)

    yield from walk("", module)


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping) and depth < DEEPEST:
        for key, item in value.items():
            yield from _inside(f"{name}.{key}", item, depth + 1)
    elif isinstance(value, list | tuple) and depth < DEEPEST:
        for item in value:
            yield from _inside(name, item, depth + 1)
