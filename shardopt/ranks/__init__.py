"""Starts, pins, watches and ends the processes that measure."""
