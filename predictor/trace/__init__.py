"""Traces: predictions out, in the format that Perfetto and chrome://tracing open."""

from predictor.trace.chrome import chrome_trace

__all__ = ["chrome_trace"]
