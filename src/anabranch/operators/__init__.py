"""Operators: what users implement, and the ones that are built in."""
