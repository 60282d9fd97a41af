"""Suites on plans that TorchRec ran on CPU ranks: batches of measured tasks."""
