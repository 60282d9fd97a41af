"""Families of models to draw tasks from, written after public descriptions.

A model is sized by counting ids, bytes and products, never by a prediction, so that no predictor
chooses what it is tested on. `families.py` lists them; one file a family. May import
`predictor.model`, the numbers of an architecture, and nothing that predicts or plans.

Why: docs/decisions/0037.
"""
