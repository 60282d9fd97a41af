"""Cluster files: the machines of a job, read from YAML or written from what the machines say."""
