"""Keyed state as a first-class object: tables, key groups, checkpoints."""
