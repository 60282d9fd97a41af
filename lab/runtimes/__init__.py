"""Iterations of trainers other than TorchRec: HugeCTR, Megatron and NVIDIA's examples."""
