"""Chooses what a plan cannot express: batch size, precision, pipeline, bucket size.

`tune` is the entrance. Every setting is scored by a search of its plans, so this room lies above
all others.
"""
