"""Measures a machine into a hardware profile: the only code that times kernels to fit them.

`design` says what is measured, `kernels` measures it in the ranks, `rows` keeps it, `profile` fits
it; `run` is the whole, and `joined` the same under torchrun. Imports `measure` and `ranks`.
"""
