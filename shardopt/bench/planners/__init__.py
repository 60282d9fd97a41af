"""Compares planners: how long they take, and what their plans are worth."""
