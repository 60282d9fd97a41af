"""Greedy partitioners: chosen options onto ranks."""
