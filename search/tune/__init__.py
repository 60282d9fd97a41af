"""Chooses what a plan cannot express: batch size, precision, pipeline, bucket size."""
