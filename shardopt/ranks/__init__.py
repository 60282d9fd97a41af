"""The launcher of ranks: starts, pins, watches and ends the processes that measure.

`launch` starts ranks and names the one that broke; `rank` is what a rank does about itself, also
under torchrun; `hosts` makes two hosts of one machine. Imports `predictor.errors` alone.
"""
