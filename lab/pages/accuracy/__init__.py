"""Scores of predictions against measurements: on the console, as JSON, as the accuracy page."""
