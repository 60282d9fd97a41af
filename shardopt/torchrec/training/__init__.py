"""A workload as a real TorchRec model: module, synthetic batches, optimizers, training loop.

Imports `plan`.
"""
