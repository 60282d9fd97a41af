"""What single ops cost: by kind on any device, by fitted models on CPUs; fused or one by one."""
