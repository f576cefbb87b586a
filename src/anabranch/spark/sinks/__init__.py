"""Sinks. A repeated batch replaces its earlier results and never adds to them."""
