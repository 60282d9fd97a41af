"""Kernel time of one op of the dense part on any profile, by the op's name and operands.

Products, convolutions and attention take arithmetic (`predictor.cost.gemm`); every other op takes
the bytes that its kernels touch (`predictor.cost.elementwise`), which follow from its operands; the
table of docs/model.md, chapter 5, has them. An op that has no entry is counted by its bytes and
listed. `predictor/hardware/runtimes/aten.yaml` has the names of ops, PyTorch's, by kind, and how
often a kernel reads its input again.

Chains of memory-bound ops are one pass over memory where something joins them. A compiler writes
pointwise ops and reductions that share data as one kernel, which reads what the chain is given and
writes what is used after it (PyTorch's Inductor: Ansel et al. 2024, 4.3). A CPU that steps one
parameter after the other does the same with its caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from predictor import units
from predictor.cost.elementwise import column_sums_ms, columns_ms, decode_ms, memory_ms
from predictor.cost.gemm import attention_ms, batched_ms, gemm_ms
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import Elementwise, HardwareProfile
from predictor.model.op_calls import CAUSAL, OpCall, Operand, letter

_OPS = load_runtime("aten")


def _names(kind: str) -> frozenset[str]:
    return frozenset(_OPS[kind])


def _numbers(kind: str) -> Mapping[str, int]:
    """Op -> a number, of names that the table lists by number."""
    return {name: number for number, names in _OPS[kind].items() for name in names}


PRODUCTS: Mapping[str, bool] = _OPS["products"]
ATTENTION: Mapping[str, bool] = _OPS["attention"]
CONVOLUTIONS, DECODES, RANDOM = _names("convolutions"), _names("decodes"), _names("random")
FILLS, OVERWRITTEN = _names("fills"), _names("overwritten")
GATHERS, SCATTERS, COPIES = _names("gathers"), _names("scatters"), _names("copies")
POINTWISE = _names("pointwise")
FLOATS = ("fp32", "fp16", "bf16")
INDEX_ADDS = frozenset(("index_put", "_index_put_impl", "_unsafe_index_put"))
PASSES = FILLS.union(*map(_names, ("pointwise", "reductions", "softmax", "norms", "losses")))
MATH, READ_AGAIN, KERNELS = _numbers("math"), _numbers("read_again"), _numbers("launches")

FUSED_BY_COMPILERS = (
    PASSES
    | (COPIES - {"cat", "stack"})
    | {"native_dropout", "native_dropout_backward", "bernoulli"}
)
"""Ops that torch.compile's Inductor writes as parts of one kernel: pointwise ops and reductions
(Ansel et al. 2024, section 4.3)."""

KNOWN = PASSES | COPIES | _names("others") | GATHERS | SCATTERS | DECODES
"""Memory-bound ops with a kernel model."""

ADAPTERS = {"_index_put_impl": "index_put", "_unsafe_index_put": "index_put"}
"""Other names of the same kernels."""

LAST_KEYS = frozenset(name for name in ATTENTION if "flash" in name and "for_cpu" not in name)
"""Kernels whose causal mask aligns the last query with the last key; others align the first ones
(`torch.nn.attention.bias`)."""

CONCATENATIONS = frozenset(("cat", "stack"))
ROW_COPIES = ("clone", "copy", "_to_copy", "contiguous")
FOREACH_TENSORS = 110
"""Pointers that one launch of a foreach kernel takes (aten/src/ATen/native/cuda/
MultiTensorApply.cuh: depth_to_max_tensors of one list; several lists share about as many)."""
FOREACH_CHUNK = 65_536
"""Elements that one block of such a kernel steps through (kChunkSize there)."""


@dataclass(frozen=True)
class OpCost:
    """Cost of one call on the device.

    Args:
        kernels: that it launches; 0 for views.
        resource: profile group that its time comes from.
        product: m, n and k of a single product, for `predictor.iteration.ranges`.
        modelled: False where no kernel model exists and its bytes set the price.
    """

    ms: float
    kernels: int
    resource: str = "elementwise"
    product: tuple[int, int, int] | None = None
    modelled: bool = True


VIEW = OpCost(0.0, 0)


class OpTimes:
    """Kernel times on one profile.

    Args:
        product_type: of fp32 products: ``fp32`` or ``tf32``; of operands whose type was not noted,
            the type itself.
    """

    def __init__(self, hardware: HardwareProfile, product_type: str) -> None:
        self.hardware = hardware
        self.product_type = product_type

    def cost(self, call: OpCall, *, compiled: bool = False) -> OpCost:
        """Price one call.

        Args:
            compiled: a compiler writes the kernel where it can; such a kernel loads vectors where
                aten's would not.
        """
        if not call.moves:
            return VIEW
        name = plain_name(call)
        if name in PRODUCTS and _has_operands(call, 2, 1):
            return self._product(call, name)
        if name in CONVOLUTIONS and _has_operands(call, 3 if "backward" in name else 2, 2):
            return self._convolution(call, name)
        if name in ATTENTION and _has_operands(call, 4 if "backward" in name else 3, 3):
            return self._attention(call, name)
        return self._memory(call, name, vectorised=compiled and fusible(call))

    def cost_of_chain(self, chain: Sequence[OpCall]) -> OpCost:
        """Price ops that run as one kernel (`fused_chains`)."""
        if len(chain) == 1:
            return self.cost(chain[0], compiled=True)
        return OpCost(float(memory_ms(self.hardware, outer_bytes(chain))), 1)

    # --- arithmetic -----------------------------------------------------------------------------

    def _product(self, call: OpCall, name: str) -> OpCost:
        count, m, n, k, data_type, layout = product_of(call, self.product_type)
        if count > 1:
            ms = batched_ms(self.hardware, count, m, n, k, data_type, layout)
        else:
            ms = gemm_ms(self.hardware, m, n, k, data_type, layout)
        if PRODUCTS[name] and not self.hardware.elementwise.fused_bias:
            ms += float(memory_ms(self.hardware, 2 * call.outputs[0].bytes))
        return OpCost(ms, 1, "gemm", None if count > 1 else (m, n, k))

    def _convolution(self, call: OpCall, name: str) -> OpCost:
        """Price a convolution as products of the input's patches with the weights.

        Each group is a product of ``N P`` by ``Cout`` by ``Cin / groups`` times the window.
        """
        backward = name.endswith("backward")
        image, weight = call.inputs[1:3] if backward else call.inputs[:2]
        output = call.inputs[0] if backward else call.outputs[0]
        images, out, window = output.shape[0], weight.shape[0], math.prod(weight.shape[1:])
        groups = max(1, image.shape[1] // max(1, weight.shape[1]))
        m, n, k = images * math.prod(output.shape[2:]), max(1, out // groups), window
        shapes = [(m, n, k)]
        if backward:
            gradients = {operand.shape for operand in call.outputs}
            shapes = [(m, k, n)] * (image.shape in gradients) + [(n, k, m)] * (
                weight.shape in gradients
            )
        data_type = _rate_type(image, self.product_type)
        ms = sum(batched_ms(self.hardware, groups, *shape, data_type) for shape in shapes)
        return OpCost(ms, max(1, len(shapes)), "gemm", shapes[0] if shapes else None)

    def _attention(self, call: OpCall, name: str) -> OpCost:
        backward = "backward" in name
        query, key, value = call.inputs[1:4] if backward else call.inputs[:3]
        rows, heads = (1, 2) if ATTENTION[name] else (2, 1)
        hw, count = self.hardware, query.shape[0] * query.shape[heads]
        queries, keys = query.shape[rows], key.shape[rows]
        causal = call.name.endswith(CAUSAL) and queries <= keys
        if causal and name not in LAST_KEYS:
            keys = queries
        shape = queries, keys, (query.shape[-1] + value.shape[-1]) / 2
        precision = _rate_type(query, self.product_type)
        computed = attention_ms(hw, count, shape, precision, backward=backward, causal=causal)
        touched = sum(operand.bytes for operands in read_and_written(call) for operand in operands)
        ms = max(computed, float(memory_ms(hw, touched)))
        return OpCost(ms, 1 if hw.inline else KERNELS.get(name, 1), "gemm")

    # --- memory ---------------------------------------------------------------------------------

    def _memory(self, call: OpCall, name: str, *, vectorised: bool) -> OpCost:
        size, gathered = _memory_bytes(call, name)
        model = columns_ms if _takes_rows_apart(call, name) else memory_ms
        model = decode_ms if name in DECODES else model
        cost = self.hardware.elementwise
        if self.hardware.inline:
            ms = float(model(self.hardware, size))
            ms += units.us(1e-3 * _element_ns(call, name, gathered, cost))
            return OpCost(ms, 1, modelled=name in KNOWN)
        kernels = _kernels(call, name)
        rows = _summed_rows(call, name)
        if rows and cost.column_sum_us:
            return OpCost(column_sums_ms(self.hardware, rows, size), kernels)
        apart = units.us(cost.floor_us + 1e-3 * _apart_on_gpu_ns(call, name, cost))
        ms = max(float(model(self.hardware, size)), 0.0 if vectorised else apart)
        ms += (kernels - 1) * units.us(cost.floor_us) + kernels * _chunk_ms(call, cost)
        if name in INDEX_ADDS:
            ms += units.us(1e-3 * cost.index_add_ns) * gathered / 2
        return OpCost(ms, kernels, modelled=name in KNOWN)


def _has_operands(call: OpCall, count: int, axes: int) -> bool:
    """Tell whether a call has the operands that its cost model reads; else its bytes are priced."""
    operands = call.inputs[:count] if axes > 1 else call.inputs[-count:]
    if len(operands) < count or not call.outputs:
        return False
    least = min(len(operand.shape) for operand in operands)
    return least >= axes and (least > 1 or max(len(o.shape) for o in operands) < 3)


def _element_ns(call: OpCall, name: str, gathered: float, cost: Elementwise) -> float:
    """Return the time in ns that a CPU spends on elements beyond their bytes."""
    ns = cost.gather_ns_per_element * gathered
    if call.inputs and name in cost.math_ns:
        ns += cost.math_ns[name] * call.inputs[0].elements
    elif call.inputs and name in MATH:
        ns += cost.math_ns_per_element * MATH[name] * call.inputs[0].elements
    ns += _apart_ns(call, name, cost)
    if name in RANDOM:
        drawn = call.outputs or call.inputs
        ns += cost.random_ns_per_element * drawn[0].elements
    return ns


def _apart_ns(call: OpCall, name: str, cost: Elementwise) -> float:
    """Return the time in ns of elements that a CPU copies from scattered places.

    A concatenation of contiguous operands runs another kernel (aten's cpu/CatKernel.cpp) than one
    that copies them piece by piece.
    """
    sides = [(operand, _lies(operand)) for operand in call.inputs if operand.elements > 1]
    if name in CONCATENATIONS and any(lies != "whole" for _, lies in sides):
        each = {"turned": cost.turned_ns_per_element}
        return sum(o.elements * each.get(lies, cost.sliced_ns_per_element) for o, lies in sides)
    if name in ROW_COPIES:
        return sum(o.elements * cost.turned_ns_per_element for o, lies in sides if lies == "turned")
    return 0.0


def _apart_on_gpu_ns(call: OpCall, name: str, cost: Elementwise) -> float:
    """Return the time in ns of a pointwise op or a copy on a GPU that cannot load vectors; else 0.

    Operands that are not contiguous, are broadcast or differ in type prevent vector loads. A cast
    from fp32 to half precision loads vectors in a kernel of its own (`bfloat16_copy_kernel_cuda`,
    aten's cuda/Copy.cu).
    """
    if (name not in POINTWISE and name not in ROW_COPIES) or not call.outputs or is_foreach(call):
        return 0.0
    count = call.outputs[0].elements
    inputs = [operand for operand in call.inputs if operand.elements > 1]
    lies = {_lies(o) for o in (*inputs, call.outputs[0]) if o.elements == count}
    broadcast = any(operand.elements < count for operand in inputs)
    types = [o.data_type for o in (*inputs, call.outputs[0]) if o.data_type in FLOATS]
    narrowed = len(inputs) == 1 and types[:1] == ["fp32"]
    mixed = len({*types}) > 1 and not narrowed
    if lies <= {"whole"} and not broadcast and not mixed:
        return 0.0
    each = cost.turned_ns if "turned" in lies else cost.strided_ns
    return count * (each + cost.strided_input_ns * mixed * (len(inputs) - 1))


def _chunk_ms(call: OpCall, cost: Elementwise) -> float:
    """Return the time in ms of a many-tensor launch's longest block, beyond the bytes of all."""
    if not call.name.startswith("_foreach_") or not call.inputs:
        return 0.0
    longest = max(operand.elements for operand in call.inputs)
    return units.us(cost.foreach_us) * min(1.0, longest / FOREACH_CHUNK)


def _summed_rows(call: OpCall, name: str) -> int:
    """Return the rows of a matrix that an op sums over; 0 for other ops."""
    if name != "sum" or not call.outputs or not call.inputs or len(call.inputs[0].shape) < 2:
        return 0
    columns = call.inputs[0].shape[-1]
    if columns == 1 or call.outputs[0].elements != columns:
        return 0
    return call.inputs[0].elements // columns


def _lies(operand: Operand) -> str:
    """Classify a tensor: contiguous (``whole``), of contiguous rows (``sliced``), or ``turned``."""
    expected, apart = 1, False
    for n, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        apart |= n > 1 and stride != expected
        expected *= n
    if not apart:
        return "whole"
    return "sliced" if operand.side == "n" else "turned"


def plain_name(call: OpCall) -> str:
    """Return the name of an op without the marks of in-place ops and other variants."""
    name = call.name.removesuffix(CAUSAL)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    name = name.removeprefix("_foreach_")
    if name.startswith("pow"):
        return "pow"
    return ADAPTERS.get(name, name)


def is_foreach(call: OpCall) -> bool:
    """Tell whether one launch serves many tensors."""
    return call.name.startswith(("_foreach_", "_fused_"))


class Product(NamedTuple):
    """Batch of products ``[m, k] @ [k, n]``; ``layout`` as `batched_ms` takes it."""

    batch: int
    m: int
    n: int
    k: int
    data_type: str
    layout: str


def product_of(call: OpCall, product_type: str) -> Product:
    """Return the product that a call of one of `PRODUCTS` computes.

    Args:
        product_type: of fp32 products, as `OpTimes` takes it.
    """
    name = plain_name(call)
    a, b = call.inputs[:2] if name in ("linear", "_scaled_mm") else call.inputs[-2:]
    # a linear layer is given its weight as [n, k]
    of_b = {"n": "t", "t": "n"}[b.side] if name == "linear" else b.side
    return Product(*_product_shape(name, a, b), _rate_type(a, product_type), a.side + of_b)


def _rate_type(operand: Operand, product_type: str) -> str:
    """Return the type at whose rate a product of an operand runs; fp64 runs at that of fp32."""
    data_type = operand.data_type
    if data_type in ("fp16", "bf16") or data_type.startswith(("fp8", "float8")):
        return "fp8" if "8" in data_type else data_type
    if not data_type and operand.item_bytes == 2:
        return product_type if product_type in ("fp16", "bf16") else "bf16"
    return product_type if product_type in ("fp32", "tf32") else "fp32"


def _product_shape(name: str, a: Operand, b: Operand) -> tuple[int, int, int, int]:
    """Return count, m, n and k."""
    if name == "linear":
        return 1, math.prod(a.shape[:-1]), b.shape[0], a.shape[-1]
    if len(b.shape) == 1:
        return 1, math.prod(a.shape[:-1]), 1, a.shape[-1]
    count = math.prod(a.shape[:-2]) if len(b.shape) > 2 else 1
    m = a.shape[-2] if len(b.shape) > 2 else math.prod(a.shape[:-1])
    return max(1, count), m, b.shape[-1], a.shape[-1]


def _kernels(call: OpCall, name: str) -> int:
    if not is_foreach(call):
        return KERNELS.get(name, 1)
    return max(1, math.ceil(len(call.inputs) / FOREACH_TENSORS))


def unlike(operands: Sequence[Operand]) -> list[Operand]:
    """Return each stretch of memory once."""
    return list({(o.storage, o.span): o for o in operands}.values())


def read_and_written(call: OpCall) -> tuple[list[Operand], list[Operand]]:
    """Return the operands that a call reads and writes, each stretch of memory once."""
    written = list(call.outputs)
    if call.mutates and not written:
        written = list(call.inputs[:1])
    read = list(call.inputs)
    name = plain_name(call)
    if name in FILLS:
        read = []
    elif name in OVERWRITTEN:
        read = read[1:]
    return unlike(read), unlike(written)


def _memory_bytes(call: OpCall, name: str) -> tuple[float, float]:
    """Return the bytes of a memory-bound op, and the elements that it reaches one by one."""
    read, written = read_and_written(call)
    if name in FILLS:
        return _bytes(written), 0.0
    if name in GATHERS and call.inputs:
        table, gathered = call.inputs[0], _bytes(call.outputs)
        size = min(table.bytes, gathered) + gathered + _bytes(call.inputs[1:])
        return size, _loose(table, call.outputs)
    if name in SCATTERS and call.inputs:
        # values are read, their targets are read and written, and the rest is copied
        base, rest = call.inputs[0], call.inputs[1:]
        values = max(rest, key=lambda operand: operand.bytes, default=base)
        copied = 0 if call.mutates else base.bytes + _bytes(call.outputs)
        return copied + _bytes(rest) + 2 * values.bytes, 2 * _loose(base, [values])
    again = READ_AGAIN.get(name, 0) * (call.inputs[0].bytes if call.inputs else 0)
    return _bytes(read) + _bytes(written) + again, 0.0


def _bytes(operands: Sequence[Operand]) -> int:
    return sum(operand.bytes for operand in operands)


def _loose(table: Operand, gathered: Sequence[Operand]) -> float:
    """Count the stretches that a gather takes one by one: rows, or elements of parts of rows."""
    count = sum(operand.elements for operand in gathered)
    together = 1
    for shape in (operand.shape for operand in gathered):
        for mine, other in zip(reversed(table.shape[1:]), reversed(shape), strict=False):
            if mine != other:
                break
            together *= mine
    return count / max(1, together)


def _takes_rows_apart(call: OpCall, name: str) -> bool:
    """Tell whether a copy puts short stretches side by side, or transposes an operand."""
    if not call.outputs or not call.inputs:
        return False
    out = call.outputs[0]
    if name in CONCATENATIONS:
        whole = [o.shape for o in call.inputs if o.shape]
        inner = out.shape[1:] if name == "stack" else out.shape[-1:]
        return len(out.shape) > 1 and any(
            shape[-1:] != inner if name == "cat" else shape != inner for shape in whole
        )
    if name in ("segment_reduce", "_segment_reduce_backward"):
        return True
    if name in ROW_COPIES:
        return letter(call.inputs[-1], call.inputs[-1].elements) not in ("s", "c", "b")
    return False


def outer_bytes(calls: Sequence[OpCall]) -> int:
    """Count the bytes that ops read of earlier memory, and write to memory that outlasts them."""
    produced: set[int] = set()
    freed = {storage for call in calls for storage in call.freed}
    sizes: dict[tuple[str, int, tuple[int, int]], int] = {}
    for call in calls:
        read, written = read_and_written(call)
        for operand in read:
            if operand.storage not in produced:
                sizes["read", operand.storage, operand.span] = operand.bytes
        inputs = {operand.storage for operand in call.inputs}
        produced |= {operand.storage for operand in written if operand.storage not in inputs}
        for operand in written:
            if operand.storage not in freed or operand.storage not in produced:
                sizes["written", operand.storage, operand.span] = operand.bytes
    return sum(sizes.values())


def fusible(call: OpCall) -> bool:
    """Tell whether a compiler can make an op a part of a kernel."""
    name = plain_name(call)
    return not is_foreach(call) and name in FUSED_BY_COMPILERS and name not in GATHERS


def fused_chains(calls: Sequence[OpCall]) -> Iterator[list[OpCall]]:
    """Group ops as a compiler runs them: chains of those that share data, all others alone.

    Views are left out: compiled code does not run them.
    """
    run: list[OpCall] = []
    for call in calls:
        if not call.moves:
            continue
        if fusible(call):
            run.append(call)
            continue
        yield from _connected(run)
        run = []
        yield [call]
    yield from _connected(run)


def _connected(run: Sequence[OpCall]) -> Iterator[list[OpCall]]:
    """Yield the parts of a run that share no memory with each other."""
    parts: list[tuple[set[int], list[OpCall]]] = []
    for call in run:
        used = {operand.storage for operand in (*call.inputs, *call.outputs)}
        chain: list[OpCall] = []
        apart = []
        for storages, calls in parts:
            if storages & used:
                used |= storages
                chain += calls
            else:
                apart.append((storages, calls))
        parts = [*apart, (used, [*chain, call])]
    yield from (calls for _, calls in parts)
