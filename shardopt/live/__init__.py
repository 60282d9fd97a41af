"""A running job: what its data have become, which other plan would pay, and the move to it.

The monitor is the door; it counts, proposes and moves through the other modules.
"""
