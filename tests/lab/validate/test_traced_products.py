"""Matrix products that a trace carries with their shapes."""

from dataclasses import replace

from lab.validate.traced_products import gemm_calls
from predictor.trace.events import HostEvent, RankTrace
from tests.predictor.trace.handmade import Recorder


def test_products_have_the_shapes_of_their_op_and_its_kernels() -> None:
    record = Recorder()
    record.step(0, 1e6)
    record.op("aten::mm", 10, 40)
    record.launch((20, 30), (40, 9e5), name="volta_sgemm")
    record.op("aten::relu", 50, 80)
    record.launch((60, 70), (9e5, 9.1e5), name="relu_kernel")

    def shaped(event: HostEvent) -> HostEvent:
        return replace(event, shapes=((64, 32), (32, 16)), dtypes=("float", "float"))

    trace: RankTrace = record.trace(world_size=1, device="Tesla V100-SXM2-32GB")
    trace = replace(trace, host=tuple(map(shaped, trace.host)))
    (call,) = gemm_calls(trace)
    assert (call.count, call.m, call.n, call.k, call.data_type) == (1, 64, 16, 32, "fp32")
    assert [kernel.name for kernel in call.kernels] == ["volta_sgemm"]
