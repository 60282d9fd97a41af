"""The dense part of a user's module, captured for a workload of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.errors import InputError
from predictor.model.captured.dense import CapturedDense
from predictor.model.workload import Table
from shardopt.config.ops_file import with_ops_digest
from shardopt.extras import needs_torchrec
from shardopt.torchrec.capture.capture import capture
from shardopt.torchrec.capture.inputs import Maker, from_features, like_example
from shardopt.torchrec.capture.step import CapturedModule, names_of
from shardopt.torchrec.plan.module_tables import find_embedding_modules

with needs_torchrec():
    from torch import nn


def capture_dense(
    module: nn.Module,
    tables: Sequence[Table],
    batch_size: int,
    *,
    example_inputs: Any = None,
    optimizer: str = "sgd",
    data_type: str = "fp32",
    device: str = "cpu",
    scale: bool = True,
) -> CapturedDense:
    """Everything of a module but its embedding tables, as the ops of a training step.

    The module runs on fake tensors: nothing is computed, and it is left as it is.

    Args:
        module: unsharded, on any device, ``meta`` too.
        tables: of the workload, with the ids that features bring.
        batch_size: samples of a rank.
        example_inputs: what forward takes, as a tuple, a mapping by parameter, or the only
            argument; None to make it from the features.
        optimizer: of the dense parameters.
        data_type: of products: ``fp32``, ``tf32``, or ``bf16`` to run forward under autocast.
        device: type of the devices that are planned for; decides which attention there is.
        scale: find out how sizes grow with the batch; else they hold for this batch alone.

    Raises:
        InputError: the module cannot be captured; names the op and the line of the user's model,
            or the input that is missing, and what else to try.
    """
    if "forward" not in dir(type(module)) or module.forward.__name__ == "_forward_unimplemented":
        raise InputError(
            f"{type(module).__name__} has no forward, so there is nothing to capture; give the "
            "module that is trained"
        )
    features: dict[str, list[str]] = {}
    for table in tables:
        features.setdefault(table.module, []).extend(f.name for f in table.features)
    ids = {(t.module, f.name): f.lookups_per_sample for t in tables for f in t.features}
    if example_inputs is None:
        inputs = _made(module, features)
    else:
        inputs = like_example(example_inputs, module, batch_size)
    subject = CapturedModule(
        module,
        names_of(module, features),
        inputs,
        optimizer,
        bf16=data_type == "bf16",
        gpu=device == "cuda",
    )
    captured = with_ops_digest(capture(subject, features, ids, batch_size, scale=scale))
    return CapturedDense(captured, "fp32" if data_type == "bf16" else data_type)


def linears_outside(module: nn.Module) -> list[nn.Linear]:
    """The linear layers that are in no embedding module, in order."""
    inside: set[nn.Module] = set()
    for _, whole, _ in find_embedding_modules(module):
        inside.update(whole.modules())
    return [m for m in module.modules() if isinstance(m, nn.Linear) and m not in inside]


def _made(module: nn.Module, features: dict[str, list[str]]) -> Maker:
    """Inputs from the features; dense ones are as wide as the first linear layer."""
    collections = [collection for _, _, collection in find_embedding_modules(module)]
    weighted = any(getattr(collection, "is_weighted", bool)() for collection in collections)
    layers = linears_outside(module)
    width = layers[0].in_features if layers else None
    return from_features(module, features, weighted=weighted, width=width)
