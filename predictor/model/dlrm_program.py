"""The ops of a DLRM that a model file describes: the short form of a dense program.

They are those that PyTorch 2 dispatches for such a module, in the order of TorchRec's own DLRM
(torchrec/models/dlrm.py): bottom MLP, lookups, interaction, top MLP; low-rank DCN v2 is Wang et al.
2021, eq. 5, as in torchrec/modules/crossnet.py. Products in half precision are those of autocast:
parameters stay in fp32 and are cast once an iteration, pooled embeddings are cast to the type of
the bottom output, and a pointwise op of two types gives the wider one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from predictor.model.captured import CapturedDense
from predictor.model.dense_settings import DENSE_STATES
from predictor.model.op_calls import (
    DenseProgram,
    Event,
    Gradient,
    Lookup,
    LookupBackward,
    OpCall,
    Operand,
    free_after_last_use,
)
from predictor.model.workload import DATA_TYPE_BYTES, DcnV2, Table, Workload

ITEM_BYTES = DATA_TYPE_BYTES | {"int64": 8}


class OpWriter:
    """Writer of ops to `events`; an op's method returns its output.

    Args:
        data_type: type of products; fp32 parameters are cast once where products are not.
    """

    def __init__(self, data_type: str) -> None:
        self.type = data_type
        self.storages = 0
        self.events: list[Event] = []
        self.parameters: list[Operand] = []
        self.gradients: list[Operand] = []

    def tensor(self, shape: Sequence[int], data_type: str = "fp32") -> Operand:
        """Return a new contiguous tensor."""
        item = ITEM_BYTES[data_type]
        self.storages += 1
        strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        size = item * math.prod(shape)
        return Operand(self.storages, size, 0, tuple(shape), tuple(strides), item, data_type)

    def like(self, operand: Operand) -> Operand:
        return self.tensor(operand.shape, operand.data_type)

    def op(self, name: str, inputs: Sequence[Operand], output: Operand) -> Operand:
        self.events.append(OpCall(name, tuple(inputs), (output,)))
        return output

    def view(self, name: str, operand: Operand, **changes: object) -> Operand:
        return self.op(name, [operand], replace(operand, **changes))  # type: ignore[arg-type]

    def t(self, operand: Operand) -> Operand:
        """Return a view with the last two axes exchanged."""
        shape = (*operand.shape[:-2], operand.shape[-1], operand.shape[-2])
        strides = (*operand.strides[:-2], operand.strides[-1], operand.strides[-2])
        return self.view(
            "t" if len(shape) == 2 else "transpose", operand, shape=shape, strides=strides
        )

    def columns(self, operand: Operand, first: int, width: int) -> Operand:
        """Return a view of a range of a matrix's columns."""
        shape = (operand.shape[0], width)
        return self.view(
            "slice", operand, shape=shape, strides=operand.strides, offset=operand.offset + first
        )

    def side_by_side(self, operand: Operand, widths: Sequence[int]) -> list[Operand]:
        """Return views of adjacent columns of a matrix."""
        ends = accumulate(widths)
        return [self.columns(operand, end - w, w) for end, w in zip(ends, widths, strict=True)]

    def _split(self, operand: Operand, widths: Sequence[int]) -> list[Operand]:
        """Return the views of `side_by_side`, in one op."""
        ends = accumulate(widths)
        parts = [
            replace(operand, shape=(operand.shape[0], width), offset=operand.offset + end - width)
            for end, width in zip(ends, widths, strict=True)
        ]
        self.events.append(OpCall("split_with_sizes", (operand,), tuple(parts)))
        return parts

    def row(self, stacked: Operand, at: int) -> Operand:
        """Return one matrix of the middle axis of three."""
        batch, count, dim = stacked.shape
        offset, strides = at * dim, (count * dim, 1)
        return self.view("select", stacked, shape=(batch, dim), strides=strides, offset=offset)

    def copy(self, elements: float) -> list[Operand]:
        """Copy so that ``elements`` are read and written; return the input."""
        size = round(elements / 2)
        inputs = [self.tensor((size,))] if size else []
        for operand in inputs:
            self.op("clone", [operand], self.like(operand))
        return inputs

    def cast(self, operand: Operand, data_type: str) -> Operand:
        if operand.data_type == data_type:
            return operand
        return self.op("_to_copy", [operand], self.tensor(operand.shape, data_type))

    def parameter(self, *shape: int) -> tuple[Operand, Callable[[Operand], None]]:
        """Return a parameter in the products' type, and the function that stores its gradient."""
        parameter = self.tensor(shape)
        self.parameters.append(parameter)

        def take(gradient: Operand) -> None:
            self.gradients.append(self.cast(gradient, "fp32"))
            self.events.append(Gradient(parameter.elements))

        return self.cast(parameter, self.type), take

    def optimizer_step(self, kind: str) -> list[Operand]:
        """Write one step of torch.optim's foreach form; return the states."""
        p, g = self.parameters, self.gradients
        states = [[self.like(operand) for operand in p] for _ in range(DENSE_STATES[kind])]
        if kind == "sgd":
            self.each("_foreach_add_", p, g)
        elif kind == "adagrad":
            self.each("_foreach_addcmul_", states[0], g, g)
            root = self.made("_foreach_sqrt", states[0])
            self.each("_foreach_add_", root)
            self.each("_foreach_addcdiv_", p, self.made("_foreach_mul", g), root)
        else:
            first, second = states
            self.each("_foreach_lerp_", first, g)
            self.each("_foreach_mul_", second)
            self.each("_foreach_addcmul_", second, g, g)
            root = self.made("_foreach_sqrt", second)
            self.each("_foreach_div_", root)
            self.each("_foreach_add_", root)
            self.each("_foreach_addcdiv_", p, first, root)
        return [state for same_kind in states for state in same_kind]

    def each(self, name: str, *lists: Sequence[Operand]) -> None:
        """Write a foreach op that is in place on the first list."""
        inputs = tuple(operand for operands in lists for operand in operands)
        if inputs:
            self.events.append(OpCall(name, inputs, tuple(lists[0]), mutates=True))

    def made(self, name: str, inputs: Sequence[Operand]) -> list[Operand]:
        outputs = [self.like(operand) for operand in inputs]
        if outputs:
            self.events.append(OpCall(name, tuple(inputs), tuple(outputs)))
        return outputs


Backward = Callable[[Operand], Operand]
"""Gradient of a result -> gradient of its input."""

HALVES = ("fp16", "bf16")


def dense_program(workload: Workload) -> DenseProgram:
    """Return the dense part of a workload as ops, with the parameters of feature processors."""
    dense = workload.dense
    if isinstance(dense, CapturedDense):
        program = dense.program(workload)
    else:
        program = _Dlrm(workload).write()
    return program.with_parameters(workload.position_weights, DENSE_STATES[dense.optimizer])


class _Dlrm(OpWriter):
    """Writer of a DLRM's program; a layer's method returns its output and its backward."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.dense = workload.dlrm
        self.batch = workload.batch_size
        super().__init__(self.dense.data_type if self.dense.data_type in HALVES else "fp32")
        self.inputs: list[Operand] = []

    def write(self) -> DenseProgram:
        if self.dense.linears:
            backward = self._loose()
        else:
            backward = self._wired()
        forward, self.events = self.events, []
        backward()
        written, self.events = self.events, []
        states = self.optimizer_step(self.dense.optimizer)
        lasting = [*self.parameters, *self.inputs, *states]
        forward_part, backward_part, step = free_after_last_use(
            (forward, written, self.events), lasting
        )
        return DenseProgram(
            self.batch,
            forward_part,
            backward_part,
            step,
            resident=tuple(self.parameters),
            state_bytes=sum(state.storage_bytes for state in states),
        )

    def _wired(self) -> Callable[[], None]:
        """Write bottom MLP, lookups, interaction, top MLP and loss."""
        features = self.tensor((self.batch, self.dense.in_features))
        self.inputs.append(features)
        bottom, bottom_back = self._mlp(features, self.dense.bottom_mlp)
        embeddings, lookups_back = self._lookups()
        kind = self.dense.interaction
        joined, interaction_back = (
            self._dot(bottom, embeddings) if kind == "dot" else self._concat([bottom, *embeddings])
        )
        crossed, cross_back = self._cross(joined)
        top, top_back = self._mlp(crossed, self.dense.top_mlp, is_top=True)
        loss_back = self._loss(top)

        def backward() -> None:
            grads = interaction_back(cross_back(top_back(loss_back())))
            lookups_back(grads[1:])
            bottom_back(grads[0])

        return backward

    def _loose(self) -> Callable[[], None]:
        """Write layers of unknown wiring one after the other, behind the lookups."""
        embeddings, lookups_back = self._lookups()
        joined, concat_back = self._concat(embeddings)
        backs = []
        x = joined
        for width, out in self.dense.linears:
            x = self.tensor((self.batch, width), self.type)
            self.inputs.append(x)
            x, back = self._linear(x, out, input_gradient=True)
            x, activation_back = self._relu(x)
            backs += [back, activation_back]
        loss_back = self._loss(self.tensor((self.batch, 1), self.type))

        def backward() -> None:
            loss_back()
            for at, (_, out) in reversed([*enumerate(self.dense.linears)]):
                grad = self.tensor((self.batch, out), self.type)
                backs[2 * at](backs[2 * at + 1](grad))
            lookups_back(concat_back(self.like(joined)))

        return backward

    # --- layers ---------------------------------------------------------------------------------

    def _mlp(
        self, x: Operand, layers: Sequence[int], *, is_top: bool = False
    ) -> tuple[Operand, Backward]:
        """Write linear layers with their activations; the input batch needs no gradient."""
        swish = is_top and self.dense.activation != "relu"
        backs: list[Backward] = []
        for i, out in enumerate(layers):
            x, back = self._linear(x, out, input_gradient=is_top or i > 0)
            backs.append(back)
            if swish or not is_top or i < len(layers) - 1:
                x, back = self._swish_layer_norm(x) if swish else self._relu(x)
                backs.append(back)
        return x, _chain(backs)

    def _linear(
        self, x: Operand, out: int, *, input_gradient: bool, bias: bool = True
    ) -> tuple[Operand, Backward]:
        input_type, x = x.data_type, self.cast(x, self.type)
        weight, take_weight = self.parameter(out, x.shape[-1])
        y = self.tensor((self.batch, out), self.type)
        if bias:
            added, take_bias = self.parameter(out)
            self.op("addmm", [added, x, self.t(weight)], y)
        else:
            self.op("mm", [x, self.t(weight)], y)

        def backward(grad: Operand) -> Operand:
            x_grad = grad
            if input_gradient:
                x_grad = self.op("mm", [grad, self.t(self.t(weight))], self.like(x))
            weight_grad = self.op("mm", [self.t(grad), x], self.like(weight))
            if bias:
                total = self.op("sum", [grad], self.tensor((1, out), self.type))
                take_bias(self.view("view", total, shape=(out,), strides=(1,)))
            take_weight(self.t(self.t(weight_grad)))
            return self.cast(x_grad, input_type) if input_gradient else x_grad

        return y, backward

    def _relu(self, x: Operand) -> tuple[Operand, Backward]:
        y = self.op("relu", [x], self.like(x))
        return y, lambda grad: self.op("threshold_backward", [grad, y], self.like(y))

    def _swish_layer_norm(self, x: Operand) -> tuple[Operand, Backward]:
        """Write TorchRec's ``x * sigmoid(layer_norm(x))`` (modules/activation.py)."""
        width = x.shape[-1]
        scale, take_scale = self.parameter(width)
        shift, take_shift = self.parameter(width)
        normal = self.op("native_layer_norm", [x, scale, shift], self.like(x))
        gate = self.op("sigmoid", [normal], self.like(x))
        y = self.op("mul", [x, gate], self.like(x))

        def backward(grad: Operand) -> Operand:
            gate_grad = self.op("mul", [grad, x], self.like(x))
            direct_x_grad = self.op("mul", [grad, gate], self.like(x))
            normal_grad = self.op("sigmoid_backward", [gate_grad, gate], self.like(x))
            normal_x_grad, scale_grad, shift_grad = self.like(x), self.like(scale), self.like(shift)
            name = "native_layer_norm_backward"
            inputs = (normal_grad, x, scale, shift)
            self.events.append(OpCall(name, inputs, (normal_x_grad, scale_grad, shift_grad)))
            take_scale(scale_grad)
            take_shift(shift_grad)
            return self.op("add", [direct_x_grad, normal_x_grad], self.like(x))

        return y, backward

    def _concat(
        self, vectors: Sequence[Operand]
    ) -> tuple[Operand, Callable[[Operand], list[Operand]]]:
        """Concatenate the vectors; their gradients are columns of the whole."""
        widths = [vector.shape[-1] for vector in vectors]
        whole = self.tensor((self.batch, sum(widths)), vectors[0].data_type if vectors else "fp32")
        if len(vectors) > 1:
            self.op("cat", vectors, whole)
        elif vectors:
            whole = vectors[0]

        return whole, lambda grad: self.side_by_side(grad, widths)

    def _dot(
        self, bottom: Operand, embeddings: Sequence[Operand]
    ) -> tuple[Operand, Callable[[Operand], list[Operand]]]:
        """Join the bottom output with the dot products of all pairs of feature vectors."""
        batch, count, dim = self.batch, 1 + len(embeddings), bottom.shape[-1]
        pair_count = count * (count - 1) // 2
        shape = (batch, count, dim)
        stacked = self.op("stack", [bottom, *embeddings], self.tensor(shape, self.type))
        square = self.tensor((batch, count, count), self.type)
        self.op("bmm", [stacked, self.t(stacked)], square)
        picked, picked_back = self._pairs(square, pair_count)
        joined = [bottom, picked]
        missing = self.dense.joined_width(dim, count) - dim - picked.shape[-1]
        if missing:
            joined.append(self.tensor((batch, missing), self.type))
            self.inputs.append(joined[-1])
        whole, concat_back = self._concat(joined)

        def backward(grad: Operand) -> list[Operand]:
            bottom_grad, pairs_grad, *_ = concat_back(grad)
            square_grad = picked_back(pairs_grad)
            right_grad = self.tensor((batch, dim, count), self.type)
            self.op("bmm", [self.t(stacked), square_grad], right_grad)
            left_grad = self.op("bmm", [square_grad, stacked], self.like(stacked))
            both = self.op("add", [left_grad, self.t(right_grad)], self.like(stacked))
            rows = [self.row(both, at) for at in range(count)]
            rows[0] = self.op("add", [bottom_grad, rows[0]], self.like(bottom))
            return rows

        return whole, backward

    def _pairs(self, square: Operand, count: int) -> tuple[Operand, Backward]:
        """Select the products that the top MLP reads; return them and their backward."""
        batch, how = self.batch, self.dense.pairs
        flat = (batch, math.prod(square.shape[1:]))
        if how == "all":
            products = self.view("view", square, shape=flat, strides=(flat[1], 1))
            return products, lambda grad: self.op("clone", [grad], self.like(square))
        pairs = self.tensor((batch, count), self.type)
        if how == "gather":
            index = self.tensor((1, count), "int64")
            self.inputs.append(index)
            index = replace(index, shape=(batch, count), strides=(0, 1))
            flat_products = self.view("view", square, shape=flat, strides=(flat[1], 1))
            self.op("gather", [flat_products, index], pairs)
        else:
            index = self.tensor((2, count), "int64")
            self.inputs.append(index)
            self.op("index", [square, index], pairs)

        def backward(grad: Operand) -> Operand:
            zeros = self.op("new_zeros", [grad], self.like(square))
            if how == "index":
                return self.op("index_put", [zeros, index, grad], self.like(square))
            self.events.append(OpCall("scatter_add_", (zeros, index, grad), (zeros,), mutates=True))
            return zeros

        return pairs, backward

    def _cross(self, first: Operand) -> tuple[Operand, Backward]:
        """Write the layers ``x0 * (U (V x) + b) + x`` of DCN v2; none for other interactions.

        The bias is a parameter in fp32, which autocast leaves alone.
        """
        kind = self.dense.interaction
        x, layers = first, []
        for _ in range(kind.layers if isinstance(kind, DcnV2) else 0):
            assert isinstance(kind, DcnV2)
            layer_input = x
            low, down_back = self._linear(x, kind.low_rank_dim, input_gradient=True, bias=False)
            width = first.shape[-1]
            high, up_back = self._linear(low, width, input_gradient=True, bias=False)
            bias = self.tensor((width,))
            self.parameters.append(bias)
            biased = self._join("add", high, bias)
            x = self._join("add", self._join("mul", first, biased), x)
            layers.append((layer_input, high, biased, down_back, up_back))

        def backward(grad: Operand) -> Operand:
            total: Operand | None = None
            for layer_input, high, biased, down_back, up_back in reversed(layers):
                biased_grad = self._join("mul", grad, first)
                first_grad = self.cast(self._join("mul", grad, biased), first.data_type)
                bias_grad = self.op("sum", [biased_grad], self.tensor((1, first.shape[-1])))
                self.gradients.append(
                    self.view("view", bias_grad, shape=(first.shape[-1],), strides=(1,))
                )
                self.events.append(Gradient(first.shape[-1]))
                below = down_back(up_back(self.cast(biased_grad, high.data_type)))
                grad = self.op(
                    "add", [self.cast(grad, layer_input.data_type), below], self.like(below)
                )
                total = self._sum(total, first_grad)
            return self._sum(total, grad)

        return x, backward

    def _join(self, name: str, a: Operand, b: Operand) -> Operand:
        """Write a pointwise op of two operands in the wider type; the second may be broadcast."""
        same = a.data_type == b.data_type
        return self.op(name, [a, b], self.tensor(a.shape, a.data_type if same else "fp32"))

    def _sum(self, total: Operand | None, more: Operand) -> Operand:
        return more if total is None else self.op("add", [total, more], self.like(more))

    def _loss(self, logits: Operand) -> Callable[[], Operand]:
        """Write the mean binary cross-entropy; its backward follows PyTorch's derivatives.yaml."""
        logits = self.cast(logits, "fp32")
        labels = self.like(logits)
        self.inputs.append(labels)
        name = "binary_cross_entropy_with_logits"
        self.op(name, [logits, labels], self.tensor(()))

        def backward() -> Operand:
            grad = self.op("ones_like", [self.tensor(())], self.tensor(()))
            chance = self.op("sigmoid", [logits], self.like(logits))
            less = self.op("sub", [chance, labels], self.like(logits))
            scaled = self.op("mul", [less, grad], self.like(logits))
            self.events.append(OpCall("div_", (scaled,), (scaled,), mutates=True))
            return self.cast(scaled, self.type)

        return backward

    # --- embeddings -----------------------------------------------------------------------------

    def _lookups(self) -> tuple[list[Operand], Callable[[Sequence[Operand]], None]]:
        """Return one `[batch, width]` tensor per feature, and the backward of all."""
        tables = {
            m: [t for t in self.workload.tables if t.module == m] for m in self.workload.modules
        }
        outputs_of = {
            module: self._outputs(module_tables) for module, module_tables in tables.items()
        }
        self.events += [Lookup(module, outputs) for module, outputs in outputs_of.items()]
        pooled: list[Operand] = []
        for module, module_tables in tables.items():
            if _unpooled(module_tables):
                sums = ((values, (self.batch, values.shape[-1])) for values in outputs_of[module])
                pooled += [self.op("segment_reduce", [v], self.tensor(shape)) for v, shape in sums]
            else:
                widths = [table.embedding_dim for table in module_tables for _ in table.features]
                pooled += self._split(self.cast(outputs_of[module][0], self.type), widths)
        self.inputs += self.copy(self.batch * self.dense.copies[0])

        def backward(grads: Sequence[Operand]) -> None:
            self.inputs += self.copy(self.batch * self.dense.copies[1])
            remaining = list(grads)
            for module, module_tables in reversed(tables.items()):
                start = len(remaining) - sum(len(table.features) for table in module_tables)
                remaining, mine = remaining[:start], remaining[start:]
                outputs = outputs_of[module]
                if _unpooled(module_tables):
                    name, pairs = "_segment_reduce_backward", zip(mine, outputs, strict=True)
                    returned = [self.op(name, [grad], self.like(values)) for grad, values in pairs]
                else:
                    returned = [self.op("cat", mine, self.like(outputs[0]))]
                self.events.append(LookupBackward(module, tuple(returned)))

        return pooled, backward

    def _outputs(self, tables: Sequence[Table]) -> tuple[Operand, ...]:
        """Return a KeyedTensor's values, or the values of one JaggedTensor per feature."""
        if not _unpooled(tables):
            width = sum(t.embedding_dim for t in tables for _ in t.features)
            return (self.tensor((self.batch, width)),)
        return tuple(
            self.tensor((max(1, round(self.batch * f.lookups_per_sample)), t.embedding_dim))
            for t in tables
            for f in t.features
        )


def _unpooled(tables: Sequence[Table]) -> bool:
    return not tables[0].is_pooled


def _chain(backs: Sequence[Backward]) -> Backward:
    def backward(grad: Operand) -> Operand:
        for back in reversed(backs):
            grad = back(grad)
        return grad

    return backward
