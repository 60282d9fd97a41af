"""Traces: PyTorch's in, predictions out in the format that Perfetto and chrome://tracing open.

`read` is the entry for files; `simulate` predicts the steps in them.
"""
