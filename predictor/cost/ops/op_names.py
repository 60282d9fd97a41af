"""Which kernel model an op has, by PyTorch's names (aten/src/ATen/native/native_functions.yaml)."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = {
    "mm": False,
    "addmm": True,
    "_addmm_activation": True,
    "bmm": False,
    "baddbmm": True,
    "mv": False,
    "addmv": True,
    "linear": True,
    "matmul": False,
    "_scaled_mm": False,
}
"""Whether something is added to the product."""

CONVOLUTIONS = frozenset(
    (
        "convolution",
        "convolution_backward",
        "_convolution",
        "cudnn_convolution",
        "mkldnn_convolution",
        "_conv_depthwise2d",
    )
)

ATTENTION = {
    **{
        f"_scaled_dot_product_{kind}_attention{suffix}{end}": False
        for kind, suffix in (
            ("flash", ""),
            ("flash", "_for_cpu"),
            ("efficient", ""),
            ("cudnn", ""),
            ("fused", "_overrideable"),
        )
        for end in ("", "_backward")
    },
    "_scaled_dot_product_attention_math": False,
    "_flash_attention_forward": True,
    "_flash_attention_backward": True,
    "_efficient_attention_forward": True,
    "_efficient_attention_backward": True,
}
"""Whether its operands are ``[batch, sequence, heads, width]``; else heads come first."""

FILLS = _words(
    """
    zeros zeros_like new_zeros zero ones ones_like new_ones full full_like new_full fill
    arange eye triu_indices tril_indices scalar_tensor normal uniform bernoulli
    random randn rand randint randperm exponential
    """
)
"""Written without being read."""

OVERWRITTEN = _words(
    """
    copy zero fill normal uniform random exponential
    """
)
"""Of these the first input is only written, where they work in place."""

GATHERS = _words(
    """
    index index_select gather embedding take take_along_dim nll_loss_forward
    """
)
SCATTERS = _words(
    """
    index_put _index_put_impl _unsafe_index_put index_add index_copy scatter scatter_add
    scatter_reduce select_scatter embedding_dense_backward put masked_scatter
    """
)

NORMS = _words(
    """
    native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
    cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward native_group_norm
    native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward
    """
)
SOFTMAX = _words(
    """
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    _masked_softmax _masked_softmax_backward
    """
)
REDUCTIONS = _words(
    """
    sum mean amax amin max min argmax argmin any all prod var var_mean std std_mean norm
    linalg_vector_norm logsumexp nansum count_nonzero aminmax
    """
)
POINTWISE = _words(
    """
    abs acos add addcdiv addcmul atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min cos cosh div elu elu_backward eq erf erfc exp exp2 expm1 floor
    floor_divide fmod frac ge gelu gelu_backward glu glu_backward gt hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward isinf isnan le
    leaky_relu leaky_relu_backward lerp log log10 log1p log2 log_sigmoid_forward
    log_sigmoid_backward logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mish mish_backward mul nan_to_num ne neg polar pow reciprocal relu remainder
    round rsqrt rsub selu sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus
    softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward tril
    triu trunc where xlogy
    """
)
LOSSES = _words(
    """
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits mse_loss
    mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    l1_loss nll_loss_forward nll_loss_backward
    """
)
COPIES = _words(
    """
    cat stack clone copy _to_copy contiguous repeat roll flip constant_pad_nd slice_backward
    select_backward slice_scatter split_with_sizes_copy repeat_interleave _reshape_copy
    _unsafe_view lift_fresh_copy unfold_backward expand_copy permute_copy view_copy
    diagonal_backward
    """
)
OTHERS = _words(
    """
    native_dropout native_dropout_backward dropout bernoulli segment_reduce
    _segment_reduce_backward avg_pool2d avg_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    _fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_non_finite_check_and_unscale
    _amp_foreach_non_finite_check_and_unscale
    """
)

DECODES = _words(
    """
    dequantize dequantize_mx_cuda FP8RowwiseQuantizedToFloat HFP8QuantizedToFloat
    Fused8BitRowwiseQuantizedToFloat Fused8BitRowwiseQuantizedToFloatOrHalf
    FusedNBitRowwiseQuantizedSBHalfToFloat FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf
    """
)
"""Quantised values to floating point: aten's op, and FBGEMM's (fbgemm_gpu, quantize_ops)."""

PASSES = POINTWISE | REDUCTIONS | SOFTMAX | NORMS | LOSSES | FILLS

FUSED_BY_COMPILERS = (
    PASSES
    | (COPIES - {"cat", "stack"})
    | {"native_dropout", "native_dropout_backward", "bernoulli"}
)
"""Ops that torch.compile's Inductor writes as parts of one kernel: pointwise ops and reductions
(Ansel et al. 2024, section 4.3)."""

KNOWN = PASSES | COPIES | OTHERS | GATHERS | SCATTERS | DECODES
"""Memory-bound ops with a kernel model."""

MATH = {
    **dict.fromkeys(
        _words(
            """
            exp exp2 expm1 log log10 log1p log2 tanh sigmoid silu gelu mish erf erfc
            _softmax sin cos _safe_softmax softplus logsumexp native_layer_norm
            _fused_rms_norm logit sinh cosh tan _log_softmax_backward_data pow elu
            log_sigmoid_forward atan acos
            """
        ),
        1,
    ),
    **dict.fromkeys(
        _words(
            """
            _log_softmax gelu_backward silu_backward mish_backward log_sigmoid_backward
            binary_cross_entropy_with_logits binary_cross_entropy xlogy
            """
        ),
        2,
    ),
}
"""Exponentials, or divisions and roots that take as long, for each element of the first input."""
RANDOM = _words(
    """
    bernoulli native_dropout dropout normal uniform random randn rand exponential
    """
)
"""A random number for each element that is made."""

READ_AGAIN = {
    "slice_backward": 1,
    "select_backward": 1,
    "native_layer_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "native_batch_norm": 1,
    "_native_batch_norm_legit": 1,
    "_native_batch_norm_legit_functional": 1,
    "_batch_norm_with_update": 1,
    "cudnn_batch_norm": 1,
    "native_batch_norm_backward": 2,
    "cudnn_batch_norm_backward": 2,
    "batch_norm_backward": 2,
    "native_group_norm": 1,
    "native_group_norm_backward": 2,
    "binary_cross_entropy_with_logits": 9,
}
"""Passes over arrays as large as the first input beyond one over each operand: what a second kernel
reads again (aten's layer_norm_kernel.cu, Normalization.cuh, group_norm_kernel.cu), or what a chain
of pointwise ops behind one name reads and writes (Loss.cpp)."""

KERNELS = {
    "native_layer_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "native_batch_norm": 2,
    "_native_batch_norm_legit": 2,
    "_native_batch_norm_legit_functional": 2,
    "_batch_norm_with_update": 2,
    "cudnn_batch_norm": 2,
    "native_batch_norm_backward": 2,
    "cudnn_batch_norm_backward": 2,
    "batch_norm_backward": 2,
    "native_group_norm": 2,
    "native_group_norm_backward": 3,
    "binary_cross_entropy_with_logits": 5,
    "index_put": 8,
    "_index_put_impl": 8,
    "_unsafe_index_put": 8,
    "embedding_dense_backward": 6,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "_flash_attention_backward": 3,
    "_efficient_attention_backward": 2,
}
"""Launches of an op that makes several; the sort of the indices counts to ops that add by index
(Indexing.cu, Embedding.cu)."""

ADAPTERS = {"_index_put_impl": "index_put", "_unsafe_index_put": "index_put"}
"""Names of the same kernels."""
