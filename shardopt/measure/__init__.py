"""Timing, noise and load: what every measurement shares."""
