"""Costs of single ops: by kind on any device, by fitted models on CPUs; fused or one by one."""
