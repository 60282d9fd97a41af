"""Benchmarks out of traces: a PyTorch program that does what an execution trace recorded."""
