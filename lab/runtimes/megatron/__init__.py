"""The time of a GPT's training step under Megatron.

May import `graph` and `timeline` of the folder above, and what `predictor.iteration` may.
"""
