"""Traces: PyTorch's in, predictions out in the format that Perfetto and chrome://tracing open.

`read` is the entry for files; `simulate` predicts the steps in them. May import all of `predictor`
but `fit`.
"""

from predictor.trace.chrome import chrome_trace
from predictor.trace.read import load_traces, read_traces

__all__ = ["chrome_trace", "load_traces", "read_traces"]
