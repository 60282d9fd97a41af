"""The embedding laws: what a shard's lookups cost, and in what they never fall."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard, state_row_bytes
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import CudaEmbedding
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel
from predictor.model.workload import Optimizer

NAMES = list_hardware()
GPUS = tuple(name for name in NAMES if name != "cpu-gloo")


def shard(
    rows: int = 10_000_000,
    alpha: float = 0.0,
    draws: float = 3 * 65536.0,
    bags: float = 65536.0,
    dim: int = 128,
    **fields: object,
) -> LookupShard:
    bins = (Zipf(alpha) if alpha else Uniform()).bins(rows)
    return LookupShard(bins, draws, bags, rows, dim, **fields)  # type: ignore[arg-type]


shards = st.builds(
    shard,
    rows=st.sampled_from([1, 3, 100, 10_000, 1_000_000, 40_000_000]),
    alpha=st.sampled_from([0.0, 0.7, 1.05, 1.3]),
    draws=st.floats(1, 1e6),
    bags=st.floats(1, 1e5),
    dim=st.sampled_from([4, 16, 32, 36, 64, 100, 128, 256, 512]),
    element_bytes=st.sampled_from([2, 4]),
    optimizer=st.sampled_from(list(Optimizer)),
    weighted=st.booleans(),
    kernel=st.sampled_from(list(ComputeKernel)),
)


def times(s: LookupShard, name: str) -> np.ndarray:
    hw = load_hardware(name)
    return np.array(
        [
            lookup_model(hw).forward_ms(s),
            lookup_model(hw).backward_ms(s),
            lookup_model(hw).prefetch_ms(s),
        ]
    )


@given(st.sampled_from(NAMES), shards, st.floats(1, 8))
@settings(max_examples=200, deadline=None)
def test_never_falls_with_draws_dim_or_element_size(
    name: str, s: LookupShard, factor: float
) -> None:
    base = times(s, name)
    assert np.isfinite(base).all()
    assert (base >= 0).all()
    more = (
        replace(s, draws=s.draws * factor),
        replace(s, dim=s.dim * 2),
        replace(s, dim=s.dim + 4),
        replace(s, element_bytes=2 * s.element_bytes),
    )
    for larger in more:
        assert (times(larger, name) >= base * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", list(ComputeKernel))
def test_uniform_ids_cost_at_least_as_much_as_skewed_ones(name: str, kernel: ComputeKernel) -> None:
    costs = [times(shard(alpha=a, kernel=kernel), name) for a in (0.0, 0.8, 1.05, 1.3)]
    for hotter, colder in zip(costs[1:], costs, strict=False):
        assert (hotter <= colder * (1 + 1e-9)).all()
    if kernel is ComputeKernel.FUSED:
        assert costs[2][0] < 0.9 * costs[0][0]


@pytest.mark.parametrize("name", GPUS)
def test_uvm_is_bound_by_the_host_link(name: str) -> None:
    hw = load_hardware(name)
    model = lookup_model(hw)
    fused, uvm = shard(), shard(kernel=ComputeKernel.FUSED_UVM)
    caching = shard(alpha=1.05, kernel=ComputeKernel.FUSED_UVM_CACHING)
    rows_over_link = uvm.ids * 512 / hw.memory.host_link
    assert model.forward_ms(uvm) >= rows_over_link > 5 * model.forward_ms(fused)
    assert model.prefetch_ms(fused) == 0.0
    assert 0 < model.prefetch_ms(caching) < model.forward_ms(caching)
    # all rows cached: only the probes of ids and of distinct rows are left
    warm = replace(caching, cache_load_factor=1.0)
    assert isinstance(hw.embedding, CudaEmbedding)
    probe = 1e-6 * hw.embedding.prefetch_ns_per_lookup * warm.ids
    probe += 1e-6 * hw.embedding.prefetch_ns_per_row * warm.distinct_rows
    assert model.prefetch_ms(warm) == pytest.approx(probe)
    # rows over PCIe outlast it; over NVLink-C2C they need not
    assert hw.memory.host_link_gb_s > 64 or probe < model.prefetch_ms(caching)


@pytest.mark.parametrize("name", GPUS)
def test_rows_of_host_memory_repeat_in_the_l1_alone(name: str) -> None:
    """A table that fits into the L2 is read over the link again and again, but not a hot row."""
    hw = load_hardware(name)
    model = lookup_model(hw)
    small = shard(rows=10_000, draws=1e6, bags=1e6, kernel=ComputeKernel.FUSED_UVM)
    over_link = model.forward_ms(small) * hw.memory.host_link / 512
    assert small.distinct_rows < 10_001 < 0.5 * small.ids < over_link < 1.2 * small.ids
    skewed = shard(rows=10_000, alpha=1.3, draws=1e6, bags=1e6, kernel=ComputeKernel.FUSED_UVM)
    assert model.forward_ms(skewed) < 0.7 * model.forward_ms(small)


@pytest.mark.parametrize("name", GPUS)
def test_what_crosses_the_link_in_a_backward(name: str) -> None:
    """Weights of a managed table and states per weight; states per row are on the device."""
    hw = load_hardware(name)

    def backward(kernel: ComputeKernel, optimizer: Optimizer) -> float:
        return lookup_model(hw).backward_ms(shard(kernel=kernel, optimizer=optimizer))

    one_way = shard().distinct_rows * 512 / hw.memory.host_link
    cached, uvm = ComputeKernel.FUSED_UVM_CACHING, ComputeKernel.FUSED_UVM
    sgd, rowwise, adam = Optimizer.EXACT_SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAM
    on_device = backward(ComputeKernel.FUSED, sgd)
    assert backward(cached, sgd) < on_device + 0.2 * one_way
    assert backward(uvm, sgd) > one_way
    for kernel in (cached, uvm):
        assert backward(kernel, rowwise) - backward(kernel, sgd) < 0.1 * one_way
        assert backward(kernel, adam) - backward(kernel, sgd) > 2 * one_way


@given(
    st.sampled_from(GPUS),
    st.sampled_from([4, 8, 16, 32, 64, 128, 256, 512, 1024]),
    st.sampled_from(list(ComputeKernel)),
    st.sampled_from([0.0, 1.05]),
    st.floats(1, 1000),
)
@settings(max_examples=100, deadline=None)
def test_never_falls_with_the_rows_of_the_table(
    name: str, dim: int, kernel: ComputeKernel, alpha: float, factor: float
) -> None:
    """More rows mean more distinct ones and more misses; the ids stay. Blocks for rows of many ids
    are another matter: with more rows fewer have so many."""
    hw = load_hardware(name)
    lookups = hw.embedding.model_copy(update={"block_loads": 0.0})
    hw = hw.model_copy(update={"embedding": lookups})
    few = shard(rows=10_000, alpha=alpha, dim=dim, kernel=kernel)
    many = shard(rows=int(10_000 * factor), alpha=alpha, dim=dim, kernel=kernel)
    model = lookup_model(hw)
    for cost in (model.forward_ms, model.backward_ms):
        assert cost(many) >= cost(few) * (1 - 1e-6)


@pytest.mark.parametrize("name", GPUS)
def test_hot_rows_do_not_serialise_for_free(name: str) -> None:
    """One row that all ids hit is not updated faster than a thread block can add it up."""
    hw = load_hardware(name)
    model = lookup_model(hw)
    hot, hotter = (shard(rows=1, draws=n, bags=n) for n in (1024, 1 << 20))
    spread = shard(rows=1024, draws=1024, bags=1024)
    assert model.backward_longest_ms(hot) > model.backward_longest_ms(spread) > 0
    # a block adds up 1024 ids at most; more blocks share what is beyond
    assert model.backward_longest_ms(hotter) == model.backward_longest_ms(hot)


gpu_shards = st.tuples(
    st.sampled_from([n for n in GPUS if n in ("a100-40gb", "v100-32gb", "h100-sxm")]), shards
)


@given(gpu_shards, st.floats(1, 16))
@settings(max_examples=150, deadline=None)
def test_latencies_never_fall_with_ids_or_dim(
    drawn: tuple[str, LookupShard], factor: float
) -> None:
    name, s = drawn
    hw = load_hardware(name)
    model = lookup_model(hw)
    base = np.array([model.forward_longest_ms(s), model.backward_longest_ms(s)])
    assert (base > 0).all()
    for more in (replace(s, draws=s.draws * factor), replace(s, dim=s.dim + 4)):
        latencies = np.array([model.forward_longest_ms(more), model.backward_longest_ms(more)])
        assert (latencies >= base * (1 - 1e-12)).all()
    # more bags alike: no bag waits longer, and the L2 helps some
    wider = replace(s, draws=s.draws * factor, bags=s.bags * factor)
    assert model.forward_longest_ms(wider) <= base[0] * (1 + 1e-12)


def test_a_row_of_many_ids_takes_a_block_of_its_own() -> None:
    """An SM holds one block, whose loads wait for one another, so rows count and not bytes; a row
    of up to 32 ids takes a warp."""
    hw = load_hardware("b200")
    embedding = hw.embedding.model_copy(update={"block_loads": 0.0})
    other_profile = hw.model_copy(update={"embedding": embedding})

    def added(ids_per_row: float) -> float:
        rows = shard(rows=100_000, draws=1e5 * ids_per_row, bags=1e5 * ids_per_row / 30, dim=256)
        return lookup_model(hw).backward_ms(rows) / lookup_model(other_profile).backward_ms(rows)

    assert added(10) == pytest.approx(1.0, rel=1e-3)
    assert added(20) < 1.1
    assert added(79) > 1.8


def test_a_launch_sorts_the_bits_of_all_its_rows() -> None:
    hw = load_hardware("h100-sxm")
    model = lookup_model(hw)
    rows = [1, 255, 256, 65535, 65536, 1 << 24]
    assert model.sort_passes(rows).tolist() == [1, 1, 2, 2, 3, 4]
    pass_ms = model.sort_pass_ms(weighted=False, pooled=True)
    narrow, wide = shard(rows=65535), shard(rows=65536)
    assert model.backward_ms(wide) - model.backward_ms(narrow) == pytest.approx(
        pass_ms * wide.ids, rel=0.2
    )
    assert lookup_model(load_hardware("cpu-gloo")).sort_passes(rows).tolist() == [0] * len(rows)


def test_a_dense_gradient_is_written_whole_even_without_ids() -> None:
    hw = load_hardware("a100-40gb")
    model = lookup_model(hw)
    idle = shard(draws=0.0, kernel=ComputeKernel.DENSE)
    assert model.backward_ms(idle) > 10_000_000 * 512 / (hw.memory.hbm * 1.01)
    assert model.forward_ms(idle) == 0.0
    assert model.backward_ms(shard(draws=0.0)) == 0.0


def test_optimizer_states_are_fp32() -> None:
    assert state_row_bytes("exact_sgd", 8) == (0, 0)
    assert state_row_bytes("exact_row_wise_adagrad", 8) == (4, 0)
    assert state_row_bytes("adam", 8) == (0, 64)
    assert state_row_bytes("partial_row_wise_adam", 8) == (4, 32)
