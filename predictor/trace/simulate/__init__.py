"""Predicts traced steps from their structure: a graph of what each rank issued, simulated.

May import the readers in the folder above, `predictor.predict` and what lies below it.
"""
