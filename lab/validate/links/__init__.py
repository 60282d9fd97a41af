"""What the suite of collectives reads and how: rows of public tables, and the form of the curve.

It imports `predictor` and `lab.validate.report` alone.
"""
