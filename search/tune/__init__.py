"""Tuning of settings outside the plan: batch size, precision, pipeline, bucket size.

`tune` is the entry point. A plan search scores every setting, so this package may import all
others.
"""
