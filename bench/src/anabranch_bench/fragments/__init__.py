"""Backups as fragments, measured: ``anabranch bench fragments``."""
