"""Benchmarks out of Kineto traces that come without an execution trace; imports `program`."""
