"""Stand-ins of embedding modules: tensors of the right shapes, and a note of when they are due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.model.op_calls import Lookup, LookupBackward
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.module_tables import is_pooled

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.modules.embedding_modules import get_embedding_names_by_table
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    from shardopt.torchrec.capture.recorder import Recorder

Shapes = list[tuple[int, int]]


class EmbeddingSource(nn.Module):
    """Gives back what an embedding module would, of nothing.

    Args:
        name: of the module in the workload's tables; None if its lookups are not noted.
        whole: the module as it is sharded.
        collection: what in it has the configs.
        ids: of every feature in the batch, for features whose tensor does not say it.

    Outputs are fp32, as FBGEMM gives them, whatever the tables hold.
    """

    def __init__(
        self,
        name: str | None,
        whole: nn.Module,
        collection: Any,
        recorder: Recorder,
        ids: Mapping[str, int],
    ) -> None:
        super().__init__()
        # out of sight: the tables are no parameters of the dense part
        self.__dict__["whole"] = whole
        self.name, self.recorder, self.ids = name, recorder, ids
        self.pooled = is_pooled(collection)
        configs = (
            collection.embedding_bag_configs() if self.pooled else collection.embedding_configs()
        )
        self.keys = [
            (key, feature, config.embedding_dim)
            for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            for key, feature in zip(names, config.feature_names, strict=True)
        ]
        self.indices = not self.pooled and collection.need_indices()
        self.remaps = hasattr(whole, "_managed_collision_collection")

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingSource:
        return self

    def __getattr__(self, name: str) -> Any:
        """What else the model asks the module for, such as its configs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["whole"], name)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """As the module's own: a `KeyedTensor`, or a `JaggedTensor` a feature."""
        with self.recorder.pause():
            given = self._pooled(features) if self.pooled else self._sequences(features)
        return (given, None) if self.remaps else given

    def _pooled(self, features: KeyedJaggedTensor) -> KeyedTensor:
        widths = [width for _, _, width in self.keys]
        (values,) = self._made([(features.stride(), sum(widths))])
        return KeyedTensor([key for key, _, _ in self.keys], widths, values)

    def _sequences(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        known = features.length_per_key_or_none()
        counts = self.ids if known is None else dict(zip(features.keys(), known, strict=True))
        shapes = [(counts[feature], width) for _, feature, width in self.keys]
        lengths = torch.empty(features.stride(), dtype=features.lengths().dtype)
        return {
            key: JaggedTensor(
                values=values,
                lengths=lengths,
                weights=torch.empty(len(values), dtype=torch.int64) if self.indices else None,
            )
            for (key, _, _), values in zip(self.keys, self._made(shapes), strict=True)
        }

    def _made(self, shapes: Shapes) -> tuple[torch.Tensor, ...]:
        anchor = torch.empty(0, requires_grad=True)
        made: tuple[torch.Tensor, ...] = _Looked.apply(self, shapes, anchor)
        if self.name is not None:
            self.recorder.note(Lookup(self.name, self.recorder.operands(made)))
        return made


class _Looked(torch.autograd.Function):
    """Outputs of a lookup; notes when all their gradients are there."""

    @staticmethod
    def forward(
        ctx: Any, stub: EmbeddingSource, shapes: Shapes, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.stub = stub
        ctx.set_materialize_grads(False)
        return tuple(torch.empty(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        stub = ctx.stub
        if stub.name is not None:
            found = [gradient for gradient in gradients if gradient is not None]
            stub.recorder.note(LookupBackward(stub.name, stub.recorder.operands(found)))
        return None, None, None
