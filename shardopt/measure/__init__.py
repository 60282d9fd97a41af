"""What every measurement shares: timing, noise, the machine, and the store of measured rows.

Imports `shardopt.torchrec` for the reference kernels, and `shardopt.files`.
"""
