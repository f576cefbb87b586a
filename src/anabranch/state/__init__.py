"""Keyed state as a thing of its own: tables, key groups, checkpoints."""
