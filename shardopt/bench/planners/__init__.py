"""Planners compared: how long they take, and what their plans are worth."""
