"""Predicts the time of one training iteration of a sharded recommendation model, measuring nothing.

Start reading at `predictor.predict`.
"""
