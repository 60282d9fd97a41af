"""Cost of one kernel on one device, a family of kernels a file."""
