"""Fits of shipped profiles to public tables, and the scores of all suites."""
