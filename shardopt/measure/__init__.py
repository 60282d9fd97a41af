"""Common parts of all measurements: timing, noise, the machine, and the store of rows.

Imports `shardopt.torchrec` for the reference kernels, and `shardopt.files`.
"""
