"""Kernel models of embedding lookups on GPUs and CPUs, and of UVM caches.

`embedding` is the entry for every kind of hardware. Imports nothing else of `cost`.
"""
