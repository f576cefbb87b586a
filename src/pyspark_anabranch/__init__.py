"""Lets Spark find ``spark.read.format("anabranch.state")`` by itself: it looks for this module."""

from anabranch.spark.state_source import StateSource as DefaultSource

__all__ = ["DefaultSource"]
