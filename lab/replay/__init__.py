"""Models timed against the benchmarks that are generated from their traces."""
