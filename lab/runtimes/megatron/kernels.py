"""A GPT as Megatron trains it: configuration, and the kernels of one micro-batch on one GPU.

Tensor parallelism splits the projections into attention and the feed-forward part by columns, those
out of them by rows, and the attention heads; what is as wide as the hidden state stays whole
(Shoeybi et al. 2019, arXiv 1909.08053, section 3). The kernels are those of Megatron's layer with
its fused softmax, bias-GELU and bias-dropout-add, without flash attention, as in the model that
VIA-Research/vTrain profiles (src/model/gpt_modeling.py, fused_softmax.py). ``t`` tokens of width
``h`` in half precision are ``u = 2 t h`` bytes; attention scores of ``a`` heads over sequences of
``s`` tokens are ``w = 2 b a s^2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from predictor.errors import InputError

HALF_BYTES = 2
MASK_BYTES = 0.5
"""Bytes of a dropout mask (one per element) over those of two-byte elements."""
NORM_PARTS = 2**-6
"""Partial sums of a layer norm's weight gradients, over the bytes of the hidden states."""
FUSED_ROWS = 4
"""Megatron's fused softmax runs if micro-batch times heads of a GPU is a multiple of this."""
LOOKUP_BACKWARD_KERNELS = 10
"""PyTorch's gradient of an embedding in bags of one: sorts the ids, then finds equal ones."""


@dataclass(frozen=True)
class GptTraining:
    """A model and how it is split; the GPUs are ``tensor * data * pipeline``.

    Args:
        vocabulary: rows of the embedding, also those of the logits.
        micro_batch: samples that pass the pipeline together.
        global_batch: samples of an iteration over all replicas.
        recompute: the forward pass of a layer is repeated before its backward pass.

    Raises:
        InputError: sizes do not divide evenly.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    micro_batch: int
    global_batch: int
    tensor: int
    data: int
    pipeline: int
    recompute: bool = False

    def __post_init__(self) -> None:
        share = self.data * self.micro_batch
        for what, whole, parts in (
            ("hidden size", self.hidden, self.heads),
            ("attention heads", self.heads, self.tensor),
            ("layers", self.layers, self.pipeline),
            ("global batch", self.global_batch, share),
        ):
            if whole % parts:
                raise InputError(f"{what} {whole} is not a multiple of {parts}")

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tensor * self.data * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Micro-batches per iteration."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def hidden_bytes(self) -> int:
        """Hidden states of one micro-batch: what stages and tensor-parallel ranks exchange."""
        return HALF_BYTES * self.micro_batch * self.sequence * self.hidden

    @property
    def local_vocabulary(self) -> int:
        """Rows of the embedding on one GPU."""
        return self.vocabulary // self.tensor

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer on one GPU."""
        return 12 * self.hidden**2 // self.tensor

    @property
    def embedding_parameters(self) -> int:
        """Weights of word and position embedding on one GPU."""
        return (self.local_vocabulary + self.sequence) * self.hidden


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one collective.

    Args:
        kind: ``gemm``, ``softmax`` (Megatron's own kernels), ``elementwise``, ``loss`` (softmax
            over the vocabulary and its gradient) or ``all_reduce``.
        bytes_moved: read and written, or the buffer of the all-reduce.
        shape: m, n and k of a multiplication.
        count: multiplications of that shape in one kernel.
        eager: an op of PyTorch for itself, with its call in Python and its node in the backward;
            other kernels share theirs.
    """

    name: str
    kind: str
    bytes_moved: float = 0.0
    shape: tuple[int, int, int] = (0, 0, 0)
    count: int = 1
    eager: bool = False


SEGMENTS = (
    "embedding_forward",
    "layer_forward",
    "head_forward",
    "head_backward",
    "layer_backward",
    "embedding_backward",
)
"""Segments that a micro-batch passes; those of a layer once for each layer of a stage."""


def segment_kernels(model: GptTraining) -> dict[str, tuple[Kernel, ...]]:
    """Segment -> its kernels in launch order."""
    forward = tuple(_layer_forward(model))
    again = forward if model.recompute else ()
    found = (
        tuple(_embedding_forward(model)),
        forward,
        tuple(_head_forward(model)),
        tuple(_head_backward(model)),
        (*again, *_layer_backward(model)),
        tuple(_embedding_backward(model)),
    )
    return dict(zip(SEGMENTS, found, strict=True))


def _gemm(name: str, m: int, n: int, k: int, count: int = 1) -> Kernel:
    return Kernel(name, "gemm", shape=(m, n, k), count=count)


def _moves(name: str, bytes_moved: float, kind: str = "elementwise") -> Kernel:
    return Kernel(name, kind, bytes_moved)


@dataclass(frozen=True)
class _Sizes:
    """``tokens``; ``u`` and ``w`` as above; ``batch`` of the attention's products; widths."""

    tokens: int
    u: float
    w: float
    batch: int
    head: int
    qkv: int
    inner: int
    out: int

    @classmethod
    def of(cls, model: GptTraining) -> _Sizes:
        h, t, s = model.hidden, model.tensor, model.sequence
        batch = model.micro_batch * model.heads // t
        scores = float(HALF_BYTES * batch * s * s)
        tokens = model.micro_batch * s
        return cls(tokens, float(model.hidden_bytes), scores, batch, h // model.heads,
                   3 * h // t, 4 * h // t, h // t)  # fmt: skip


def _all_reduce(model: GptTraining) -> list[Kernel]:
    """The all-reduce of a layer part's output, or of its input's gradient."""
    whole = _moves("tensor-parallel all-reduce", model.hidden_bytes, "all_reduce")
    return [whole] if model.tensor > 1 else []


def _layer_forward(model: GptTraining) -> Iterator[Kernel]:
    z, t, h, s = _Sizes.of(model), model.tensor, model.hidden, model.sequence
    u = z.u
    yield _moves("layer norm", 2 * u)
    yield _gemm("qkv", z.tokens, z.qkv, h)
    yield _moves("qkv bias", 6 * u / t)
    yield _gemm("scores", s, s, z.head, z.batch)
    yield from _softmax_forward(z)
    yield _moves("attention dropout", (2 + MASK_BYTES) * z.w)
    yield _gemm("context", s, z.head, s, z.batch)
    yield _moves("heads side by side", 2 * u / t)
    yield _gemm("attention out", z.tokens, h, z.out)
    yield from _all_reduce(model)
    yield _moves("bias, dropout, residual", (3 + MASK_BYTES) * u)
    yield _moves("layer norm", 2 * u)
    yield _gemm("up", z.tokens, z.inner, h)
    yield _moves("bias, gelu", 8 * u / t)
    yield _gemm("down", z.tokens, h, z.inner)
    yield from _all_reduce(model)
    yield _moves("bias, dropout, residual", (3 + MASK_BYTES) * u)


def _layer_backward(model: GptTraining) -> Iterator[Kernel]:
    z, t, h, s = _Sizes.of(model), model.tensor, model.hidden, model.sequence
    u = z.u
    yield _moves("dropout", (2 + MASK_BYTES) * u)
    yield _moves("bias gradient", u)
    yield _gemm("down, input", z.tokens, z.inner, h)
    yield _gemm("down, weight", h, z.inner, z.tokens)
    yield _moves("gelu", 12 * u / t)
    yield _moves("bias gradient", 4 * u / t)
    yield _gemm("up, input", z.tokens, h, z.inner)
    yield _gemm("up, weight", z.inner, h, z.tokens)
    yield from _all_reduce(model)
    yield from _norm_backward(u)
    yield _moves("dropout", (2 + MASK_BYTES) * u)
    yield _moves("bias gradient", u)
    yield _gemm("attention out, input", z.tokens, z.out, h)
    yield _gemm("attention out, weight", h, z.out, z.tokens)
    yield _moves("heads side by side", 2 * u / t)
    yield _gemm("context, probabilities", s, s, z.head, z.batch)
    yield _gemm("context, values", s, z.head, s, z.batch)
    yield _moves("attention dropout", (2 + MASK_BYTES) * z.w)
    yield from _softmax_backward(z)
    for name in ("query", "key"):
        yield _gemm(f"scores, {name}", s, z.head, s, z.batch)
        # forward the product itself scales
        yield _moves(f"scale, {name}", 2 * u / t)
    yield _moves("query, key, value side by side", 6 * u / t)
    yield _moves("bias gradient", 3 * u / t)
    yield _gemm("qkv, input", z.tokens, h, z.qkv)
    yield _gemm("qkv, weight", h, z.qkv, z.tokens)
    yield from _all_reduce(model)
    yield from _norm_backward(u)


def _norm_backward(u: float) -> Iterator[Kernel]:
    yield _moves("layer norm, input", 3 * u)
    yield _moves("layer norm, weight", 2 * u)
    yield _moves("layer norm, weight sum", NORM_PARTS * u)
    yield _moves("residual", 3 * u)


def _softmax_forward(z: _Sizes) -> Iterator[Kernel]:
    """Scale, mask and softmax: one kernel, or PyTorch's in fp32 where Megatron's cannot run."""
    if z.batch % FUSED_ROWS == 0:
        yield _moves("softmax", 2 * z.w, "softmax")
        return
    for name, passes in (
        ("to fp32", 3), ("scale", 4), ("mask to bool", 1.5), ("mask", 4.5), ("softmax", 4),
        ("to fp16", 3),
    ):  # fmt: skip
        yield Kernel(name, "elementwise", passes * z.w, eager=True)


def _softmax_backward(z: _Sizes) -> Iterator[Kernel]:
    if z.batch % FUSED_ROWS == 0:
        yield _moves("softmax", 3 * z.w, "softmax")
        return
    for name, passes in (
        ("to fp32", 3), ("gradient times output", 6), ("softmax", 6), ("copy", 4), ("mask", 2.5),
        ("scale", 4), ("to fp16", 3),
    ):  # fmt: skip
        yield Kernel(name, "elementwise", passes * z.w, eager=True)


def _embedding_forward(model: GptTraining) -> Iterator[Kernel]:
    z = _Sizes.of(model)
    ids = 8 * z.tokens
    yield _moves("ids of this shard", 2 * ids)
    yield _moves("copy of the ids", 2 * ids)
    yield _moves("ids of others to zero", 2 * ids)
    yield _moves("words", 2 * z.u)
    yield _moves("positions", 2 * z.u)
    yield _moves("sum", 3 * z.u)
    yield _moves("dropout", (2 + MASK_BYTES) * z.u)


def _embedding_backward(model: GptTraining) -> Iterator[Kernel]:
    z = _Sizes.of(model)
    yield _moves("dropout", (2 + MASK_BYTES) * z.u)
    yield _moves("positions", z.u)
    for _ in range(LOOKUP_BACKWARD_KERNELS):
        yield _moves("sort of the ids", 32 * z.tokens)
    table = HALF_BYTES * model.local_vocabulary * model.hidden
    yield _moves("words", 2 * z.u + table)
    yield _moves("positions", 2 * z.u)


def _head_forward(model: GptTraining) -> Iterator[Kernel]:
    """Logits and cross entropy."""
    z, v = _Sizes.of(model), model.local_vocabulary
    logits = HALF_BYTES * z.tokens * v
    yield _gemm("logits", z.tokens, v, model.hidden)
    yield _moves("log-softmax", 2 * logits, "loss")
    yield _moves("loss", 2 * z.tokens)


def _head_backward(model: GptTraining) -> Iterator[Kernel]:
    z, v = _Sizes.of(model), model.local_vocabulary
    logits = HALF_BYTES * z.tokens * v
    yield _moves("loss", 2 * z.tokens)
    yield _moves("gradient to zero", logits)
    yield _moves("log-softmax", 3 * logits, "loss")
    yield _gemm("logits, input", z.tokens, model.hidden, v)
    yield _gemm("logits, weight", v, model.hidden, z.tokens)
