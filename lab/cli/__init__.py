"""The commands of `python -m lab`, one file each."""
