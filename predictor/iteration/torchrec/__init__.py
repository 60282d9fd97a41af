"""The graph of TorchRec's training iteration, under each of its train pipelines.

May import `graph` of the folder above, and what `predictor.iteration` may.
"""
