"""Queries: building them, checking them, and controlling them while they run."""
