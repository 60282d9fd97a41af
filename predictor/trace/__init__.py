"""Traces: PyTorch's in, predictions out in the format that Perfetto and chrome://tracing open."""

from predictor.trace.chrome import chrome_trace
from predictor.trace.read import load_traces, read_traces

__all__ = ["chrome_trace", "load_traces", "read_traces"]
