"""Benchmarks: Spark's side and ours over the same input, in one run."""
