"""Real TorchRec models from a workload: modules, synthetic batches, optimizers, the loop."""
