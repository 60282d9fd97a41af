"""Measuring a machine into a hardware profile: the only code that times kernels to fit them."""
