"""Inputs of a module's forward in a capture: fake tensors of any batch size.

Made after the user's example, or from the features where forward says what it takes.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from predictor.errors import InputError
from shardopt.extras import needs_torchrec
from shardopt.torchrec.tables import find_embedding_modules

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

LABELS = ("label", "target")
ADVICE = (
    "give example_inputs=: a tuple or mapping of what forward takes, or the batch object that it "
    "is given"
)


class BatchNumbers(NamedTuple):
    """The sizes of one capture.

    Args:
        batch_size: samples.
        ids: of each feature in the batch.
    """

    batch_size: int
    ids: Mapping[str, int]


class Arguments(NamedTuple):
    """Positional and named arguments of a call of forward."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


Maker = Callable[[BatchNumbers], Arguments]


def like_example(example: Any, module: nn.Module, batch_size: int) -> Maker:
    """Makes inputs of any batch size that look as an example does.

    The example's batch is that of its KeyedJaggedTensor, else ``batch_size``. The first axis of
    a tensor grows with the batch if it is as long as the batch or a multiple of it, else another
    axis that is as long.

    Raises:
        InputError: no tensor in it has the batch.
    """
    keyed = [tensor for tensor in tensors_in(example) if isinstance(tensor, KeyedJaggedTensor)]
    for each in keyed:
        if each.values().device.type != "meta":
            # counted while its lengths can be read, and kept by it
            each.length_per_key()
    example_batch = _ExampleBatch(int(keyed[0].stride()) if keyed else batch_size)
    tensors = dense_tensors(example)
    if not keyed and not any(example_batch.axis(tensor.shape) is not None for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:5]) or "no tensors"
        raise InputError(
            "example_inputs holds no KeyedJaggedTensor and no tensor with an axis of batch_size, "
            f"{batch_size}: got {shapes}; give a batch of batch_size samples"
        )

    def make(numbers: BatchNumbers) -> Arguments:
        inputs = _changed(example, lambda tensor: example_batch.grown(tensor, numbers))
        if isinstance(inputs, dict) and set(inputs) <= set(_parameters(module)):
            return Arguments((), inputs)
        return Arguments(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})

    return make


def _changed(example: Any, change: Callable[[Any], Any]) -> Any:
    """A batch, a list, a mapping or an object of the user's, with its tensors of all kinds
    changed."""
    if isinstance(example, torch.Tensor | KeyedJaggedTensor | JaggedTensor | KeyedTensor):
        return change(example)
    if isinstance(example, Mapping):
        return {key: _changed(value, change) for key, value in example.items()}
    if isinstance(example, tuple | list):
        items = [_changed(item, change) for item in example]
        return type(example)(*items) if hasattr(example, "_fields") else type(example)(items)
    if hasattr(example, "__dict__") and not isinstance(example, type | nn.Module):
        changed = copy.copy(example)
        for name, value in vars(example).items():
            object.__setattr__(changed, name, _changed(value, change))
        return changed
    return example


def tensors_in(value: Any) -> list[Any]:
    """List the tensors in a value, of all kinds and in order."""
    tensors: list[Any] = []
    _changed(value, tensors.append)
    return tensors


def dense_tensors(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors among forward's inputs; ids and their weights are left out."""
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, torch.Tensor)]


class _ExampleBatch:
    """Example inputs and the number of samples in their batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def grown(self, tensor: Any, numbers: BatchNumbers) -> Any:
        """A tensor at other numbers, as a fake one."""
        size = numbers.batch_size
        if isinstance(tensor, torch.Tensor):
            return torch.empty(self._shape(tensor.shape, size), dtype=tensor.dtype)
        if isinstance(tensor, KeyedJaggedTensor):
            return self._keyed(tensor, numbers)
        if isinstance(tensor, JaggedTensor):
            return self._jagged(tensor, size)
        values = self.grown(tensor.values(), numbers)
        return KeyedTensor(list(tensor.keys()), list(tensor.length_per_key()), values)

    def axis(self, shape: Sequence[int]) -> int | None:
        """The one that grows with the batch."""
        if shape and shape[0] and shape[0] % self.batch == 0:
            return 0
        return next((at for at, n in enumerate(shape) if n == self.batch), None)

    def _shape(self, shape: Sequence[int], size: int) -> list[int]:
        resized, axis = list(shape), self.axis(shape)
        if axis is not None:
            resized[axis] = resized[axis] // self.batch * size
        return resized

    def _keyed(self, tensor: KeyedJaggedTensor, numbers: BatchNumbers) -> KeyedJaggedTensor:
        keys = list(tensor.keys())
        counts = dict(zip(keys, tensor.length_per_key_or_none() or [], strict=False))
        ids = {key: self._each(counts.get(key, 0), numbers.batch_size) for key in keys}
        weights = tensor.weights_or_none()
        return keyed_jagged(
            {key: numbers.ids.get(key, count) for key, count in ids.items()},
            numbers.batch_size,
            values=tensor.values().dtype,
            lengths=tensor.lengths().dtype,
            weights=None if weights is None else weights.dtype,
        )

    def _each(self, count: int, size: int) -> int:
        """Ids of a feature that no table has: as many a sample, in whole numbers."""
        return max(1, round(count / self.batch)) * size

    def _jagged(self, tensor: JaggedTensor, size: int) -> JaggedTensor:
        values, weights = tensor.values(), tensor.weights_or_none()
        count = self._each(values.shape[0], size)
        return JaggedTensor(
            values=torch.empty(count, *values.shape[1:], dtype=values.dtype),
            lengths=torch.empty(size, dtype=torch.int32),
            weights=None if weights is None else torch.empty(count, dtype=weights.dtype),
        )


def keyed_jagged(
    ids: Mapping[str, int],
    batch_size: int,
    *,
    values: torch.dtype = torch.int64,
    lengths: torch.dtype = torch.int32,
    weights: torch.dtype | None = None,
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor that knows how many ids each feature has, without their lengths."""
    counts = list(ids.values())
    total = sum(counts)
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.empty(total, dtype=values),
        weights=None if weights is None else torch.empty(total, dtype=weights),
        lengths=torch.empty(len(ids) * batch_size, dtype=lengths),
        stride=batch_size,
        length_per_key=counts,
        offset_per_key=[sum(counts[:at]) for at in range(len(counts) + 1)],
    )


def linears_outside(module: nn.Module) -> list[nn.Linear]:
    """The linear layers that are in no embedding module, in order."""
    inside: set[nn.Module] = set()
    for _, whole, _ in find_embedding_modules(module):
        inside.update(whole.modules())
    return [m for m in module.modules() if isinstance(m, nn.Linear) and m not in inside]


def from_features(module: nn.Module, features: Mapping[str, Sequence[str]]) -> Maker:
    """Makes what forward takes: KeyedJaggedTensors of all features, labels, and dense inputs as
    wide as the first linear layer.

    Args:
        features: of each embedding module.

    Raises:
        InputError: forward takes something else; names it.
    """
    collections = [collection for _, _, collection in find_embedding_modules(module)]
    weighted = any(getattr(collection, "is_weighted", bool)() for collection in collections)
    layers = linears_outside(module)
    every = list(dict.fromkeys(name for names in features.values() for name in names))

    def keyed(names: Sequence[str], numbers: BatchNumbers) -> KeyedJaggedTensor:
        ids = {name: numbers.ids[name] for name in names}
        weights = torch.float32 if weighted else None
        return keyed_jagged(ids, numbers.batch_size, weights=weights)

    def made(name: str, kind: Any, numbers: BatchNumbers) -> Any:
        if kind is torch.Tensor:
            if any(word in name.lower() for word in LABELS):
                return torch.empty(numbers.batch_size)
            if not layers:
                raise InputError(f"forward takes the tensor '{name}' of unknown width; {ADVICE}")
            return torch.empty(numbers.batch_size, layers[0].in_features)
        if kind is KeyedJaggedTensor:
            return keyed(every, numbers)
        if kind == dict[str, KeyedJaggedTensor]:
            # by the name that a module has where it is held
            return {
                path.rpartition(".")[2]: keyed(feature_names, numbers)
                for path, feature_names in features.items()
            }
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            fields = {
                field: made(field, feature_names, numbers) for field, feature_names in hints.items()
            }
            return typing.cast(Any, kind)(**fields)
        annotation = getattr(kind, "__name__", None) or "something that has no annotation"
        raise InputError(
            f"forward of {type(module).__name__} takes '{name}' ({annotation}), which "
            f"cannot be made from the features; {ADVICE}"
        )

    arguments = {
        name: kind
        for name, (kind, optional) in _parameters(module).items()
        if not optional or kind in (torch.Tensor, KeyedJaggedTensor)
    }

    def make(numbers: BatchNumbers) -> Arguments:
        return Arguments((), {name: made(name, kind, numbers) for name, kind in arguments.items()})

    make(BatchNumbers(1, dict.fromkeys(every, 1)))  # fail early where an input cannot be made
    return make


def _parameters(module: nn.Module) -> dict[str, tuple[Any, bool]]:
    """Annotation of every parameter of forward, and whether it has a default."""
    try:
        hints = typing.get_type_hints(module.forward)
    except (NameError, TypeError, AttributeError):
        hints = {}
    parameters = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            optional = parameter.default is not parameter.empty
            parameters[name] = (hints.get(name), optional)
    return parameters
