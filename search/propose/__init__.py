"""Candidates: plans for the local descent to start from."""
