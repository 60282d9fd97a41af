"""Training steps of small transformers, timed on CPU ranks."""
