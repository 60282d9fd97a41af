"""Planners of other people's and the suite that compares them with ours."""
