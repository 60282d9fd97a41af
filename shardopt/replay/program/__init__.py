"""From an execution trace to programs: which ops, on which tensors, written as Python.

Imports nothing else of `shardopt.replay`.
"""
