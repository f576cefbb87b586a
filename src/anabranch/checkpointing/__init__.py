"""Checkpointing policies: when checkpoints are taken, full or incremental."""

from anabranch.checkpointing.policy import Checkpointing as Checkpointing
from anabranch.checkpointing.policy import Never as Never
from anabranch.checkpointing.policy import Periodic as Periodic

__all__ = ["Checkpointing", "Never", "Periodic"]
