"""Configuration files -> validated data, with errors that say file, line, key and what to try."""

from shardopt.config.cluster import ClusterConfig, load_cluster
from shardopt.config.model import load_model, read_model

__all__ = ["ClusterConfig", "load_cluster", "load_model", "read_model"]
